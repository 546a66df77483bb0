"""Simulated engines: SGLang's scheduling and prefix cache without a model."""
