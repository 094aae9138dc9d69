"""The OpenAI-compatible HTTP API, its metrics and the command line."""
