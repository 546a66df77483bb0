"""Finds where consecutive prompts diverge: `python -m sgl_ext.doctor`."""
