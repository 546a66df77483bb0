"""Where the balancer learns which workers there are."""
