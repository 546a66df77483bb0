"""What a request log says about the cache as a whole, and two logs compared."""
