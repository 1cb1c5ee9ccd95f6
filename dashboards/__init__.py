"""The Grafana dashboards as Python, and the alert rules and runbooks that are shipped with it."""
