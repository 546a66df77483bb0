"""The settings of launcher, balancer and engines; docs/reference/settings.md lists them."""
