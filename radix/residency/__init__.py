"""The segments that one engine holds, on its device and on its host."""
