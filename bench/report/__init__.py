"""One report of all benches: `make report`."""
