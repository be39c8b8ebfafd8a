"""What the experiments about swarms are made of: processes, hosts, load, liars, a swarm on a virtual clock."""
