"""Coding agents as clients of a node, and the judge of what they get."""
