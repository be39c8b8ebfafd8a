"""What the experiments about serving are made of: models, links with a distance, modes of decoding."""
