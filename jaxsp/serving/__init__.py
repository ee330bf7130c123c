"""An OpenAI-compatible HTTP server: `jaxsp serve` (needs the extra `serve`)."""
