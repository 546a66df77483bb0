"""What a start checks, before SGLang could be imported, and shows."""
