"""Several balancer processes on one port, and what they tell each other."""
