"""The processes of one node: their hardware, start, logs and end."""
