"""Stored responses and contexts: what the balancer stores for clients."""
