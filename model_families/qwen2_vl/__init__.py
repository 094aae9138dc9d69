"""Qwen2-VL."""
