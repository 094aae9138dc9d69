"""Tests of the preprocessing pool."""
