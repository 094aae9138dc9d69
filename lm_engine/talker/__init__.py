"""The talker: a language model over codec frames whose input arrives as a stream of embeddings."""
