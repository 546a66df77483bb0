"""HTTP/1.1 on both sides: bytes in, requests and responses out."""
