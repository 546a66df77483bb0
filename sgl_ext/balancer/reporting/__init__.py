"""The request log, and the diagnosis of prompts that diverge."""
