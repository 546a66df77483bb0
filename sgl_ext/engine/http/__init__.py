"""The HTTP process of an engine: reading requests, and what clients ask it itself."""
