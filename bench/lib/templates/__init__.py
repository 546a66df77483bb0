"""How bench.templates makes conversations and what it compares."""
