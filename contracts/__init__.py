"""Leaf package: the value types, messages, errors and digests that every other package is written against."""
