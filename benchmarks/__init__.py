"""Benchmarks that users run: they speak HTTP and work against any OpenAI-compatible server."""
