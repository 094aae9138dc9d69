"""Qwen3, dense."""
