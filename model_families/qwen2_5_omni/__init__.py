"""Qwen2.5-Omni: hears, sees, speaks."""
