"""The files of `launch/`: settings, alerts, manifests. A wheel holds them in `files/`."""
