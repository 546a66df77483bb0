"""Which worker takes a request, and what each worker holds."""
