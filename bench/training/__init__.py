"""What the experiments about training on one machine are made of."""
