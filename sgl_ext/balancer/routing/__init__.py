"""Which engine takes a request: the engines, what they hold, and the admission queue."""
