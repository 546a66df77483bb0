"""The balancer's Prometheus metrics."""
