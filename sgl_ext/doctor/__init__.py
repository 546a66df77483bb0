"""Finds where consecutive prompts diverge: `sgl-ext doctor`."""
