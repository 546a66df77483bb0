"""Which worker takes a request: what it costs on each, and which workers are compared."""
