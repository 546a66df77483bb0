"""Who may send a request, and how many: authentication, API keys and rate limits."""
