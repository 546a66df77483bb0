"""SGLang on a CPU: a platform, its attention backend, and a model maker."""
