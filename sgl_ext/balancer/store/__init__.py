"""Where documents and what balancers share is stored: SQLite, Redis, PostgreSQL."""
