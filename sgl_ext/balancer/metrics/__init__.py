"""What the balancer counts, for Prometheus."""
