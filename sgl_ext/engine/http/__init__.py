"""The engine's HTTP process: reading requests, and completing SGLang's responses."""
