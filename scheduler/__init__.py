"""Scheduling decisions: pure functions over plain data. Callers read the clock and act."""
