"""How much fits: KV cache, sessions and pins, from a model's config and a GPU's memory."""
