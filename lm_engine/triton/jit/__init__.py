"""The kernels themselves, in Triton's language: not Python to a type checker. Launched from above."""
