"""Checks of an answer against a reference. No JAX."""
