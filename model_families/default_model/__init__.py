"""Builds the default model: a small real language model behind an untrained vision tower."""
