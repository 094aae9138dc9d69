"""Qwen3-VL, dense."""
