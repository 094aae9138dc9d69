"""The HTTP edge, against a scripted service and a byte-level toy tokenizer."""
