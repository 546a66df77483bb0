"""How each protocol's bodies are translated, a file a protocol: see `sgl_ext.requests.dialect`."""
