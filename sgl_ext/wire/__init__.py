"""The messages that cross from one process to another, each written and read in one place."""
