"""Benchmarks of single parts; unlike the others they import what they measure."""
