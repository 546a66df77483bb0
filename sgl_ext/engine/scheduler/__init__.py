"""The engine's scheduler process: radix cache, pins, priority, preemption."""
