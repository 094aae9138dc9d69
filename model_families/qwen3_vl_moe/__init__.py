"""Qwen3-VL with sparse layers."""
