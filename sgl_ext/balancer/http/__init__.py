"""HTTP/1.1 on both sides: downstream to clients, upstream to workers."""
