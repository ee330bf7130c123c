"""The embedded corpus: short documents, held-out questions (made by `generate.py`) and warm-start
conversations (made by `jaxsp.rollout.warm_start`)."""
