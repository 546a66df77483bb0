"""The endpoint picker: a balancer that tells Envoy and other gateways where each request goes."""
