"""Where consecutive prompts part, and what to do about it: `python -m sgl_ext.doctor`."""
