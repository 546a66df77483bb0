"""Several balancer processes on one port, and the messages between them."""
