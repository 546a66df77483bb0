"""One node's processes: what to start, how to watch it, and how to end it."""
