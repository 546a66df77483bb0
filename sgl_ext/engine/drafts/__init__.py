"""Drafts from context: guesses of tokens from what a request has read."""
