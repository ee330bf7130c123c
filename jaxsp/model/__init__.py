"""Decoder models in Flax NNX and their weights."""
