"""The prompts of sessions: what each was made of, and where it diverges from an earlier one."""
