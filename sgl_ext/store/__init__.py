"""What the balancer keeps for clients: stored responses and contexts."""
