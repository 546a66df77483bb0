"""Traces of coding agents: how they are made, sent to a router and measured."""
