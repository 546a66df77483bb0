"""The protocols that clients speak: Anthropic's, OpenAI's two, and SGLang's own."""
