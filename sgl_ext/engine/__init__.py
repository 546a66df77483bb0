"""What runs inside an SGLang engine: the plugin, its hooks, and the engine's own entry point."""
