"""Everything that touches HTTP, SGLang, processes or argv."""
