"""How to connect clients to a node: what they need, shown, written or started."""
