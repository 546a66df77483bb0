"""What a request says: its prompt in segments, its marks, hints, session and client."""
