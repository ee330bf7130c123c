"""Batched sampling from a decoder: `await generate(GenerateRequest) -> Completion`."""
