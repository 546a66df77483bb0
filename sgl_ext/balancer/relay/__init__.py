"""The life of one request: it is prepared, placed, sent to a worker, and its response relayed."""
