"""Faults of a running node, and what shows that it has recovered."""
