"""Agents: how long they stay away, what memory they use, and which of them wait for some."""
