"""Prompts that are prefilled before they are sent: next turns, and `/v1/prefill`."""
