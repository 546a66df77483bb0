"""One script a claim: `python -m bench.NAME [--quick]`; its last line is one JSON object."""
