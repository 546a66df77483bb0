"""What a chat template does with a conversation, found out by rendering made-up ones."""
