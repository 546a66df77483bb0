"""Authentication, API keys and rate limits."""
