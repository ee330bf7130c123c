"""Self-play reinforcement learning for language models in JAX and Flax."""
