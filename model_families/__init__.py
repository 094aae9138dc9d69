"""One folder per model family, the same file names in each: pipeline, processor, encoder, decoder,
weights."""
