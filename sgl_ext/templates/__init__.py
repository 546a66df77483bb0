"""What a chat template does with a conversation, and messages fitted to it."""
