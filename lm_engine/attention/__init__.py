"""Attention over the paged KV cache: the plain path and the faster ones beside it."""
