"""What the processes of an engine share: hints, settings, counters, and names of slices."""
