"""Lines of system texts that differ between sessions, and their move to the first user message."""
