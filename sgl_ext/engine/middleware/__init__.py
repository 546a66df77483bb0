"""What stands around every answer of the engine: its errors in shape, and who may ask."""
