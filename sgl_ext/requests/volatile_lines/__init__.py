"""Lines of system texts that differ between sessions, and their move behind the stable part."""
