"""Streaming decoders from codec frames to PCM, and audio containers."""
