"""Load generators of other projects against our node, stock SGLang and peers, on the same work."""
