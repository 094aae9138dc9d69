"""Qwen3-ASR: speech to text."""
