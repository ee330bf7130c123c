"""The embedded corpus: short documents, held-out questions and warm-start conversations, all made by `generate.py`."""
