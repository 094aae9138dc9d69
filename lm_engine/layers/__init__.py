"""The decoder's building blocks: the kernels' seam, the plain kernels, rotary positions."""
