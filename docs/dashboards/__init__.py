"""The Grafana dashboards in `launch/grafana`, as code."""
