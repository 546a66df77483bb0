"""Host-side work on a request that is not done twice: tokens, messages, schemas."""
