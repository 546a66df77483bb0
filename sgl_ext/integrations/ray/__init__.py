"""A fleet of engines on Ray: an actor for each engine, and the process that keeps them."""
