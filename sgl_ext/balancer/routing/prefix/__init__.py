"""What each worker holds of the prompts that are sent, and what engines say of it."""
