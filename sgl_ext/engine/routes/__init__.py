"""Paths that the extension adds to SGLang's HTTP server, or answers in its place."""
