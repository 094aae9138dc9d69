"""The encoder stage: token-budget batches across requests, single flight, and the per-item embedding
cache."""
