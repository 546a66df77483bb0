"""The control plane: health, metrics, workers, and requests that concern every worker."""
