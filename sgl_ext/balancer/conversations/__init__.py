"""Stored responses and contexts."""
