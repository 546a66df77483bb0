"""Chat templates rendered incrementally: only messages that are new are rendered."""
