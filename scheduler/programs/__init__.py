"""Whose turn it is: agents, what they do between two requests, and whose memory to take first."""
