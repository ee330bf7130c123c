"""Playing roles on the host: prompts, episodes, rewards. No JAX."""
