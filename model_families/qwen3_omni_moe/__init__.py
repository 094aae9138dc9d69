"""Qwen3-Omni, mixture of experts."""
