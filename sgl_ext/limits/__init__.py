"""What a client can make the server spend: bytes, elements, time and concurrency."""
