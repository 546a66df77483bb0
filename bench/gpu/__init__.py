"""What `make gpu-report` runs: the benches in a short form on engines of this machine's GPU."""
