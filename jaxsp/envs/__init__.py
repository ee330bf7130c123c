"""What the host side plays in: documents, and environments in worker processes. No JAX."""
