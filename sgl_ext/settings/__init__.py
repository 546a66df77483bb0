"""The settings of the launcher, the balancer and the engines; docs/settings.md lists them."""
