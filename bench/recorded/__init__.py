"""Recorded sessions of coding agents, played again: on one engine, and through routers."""
