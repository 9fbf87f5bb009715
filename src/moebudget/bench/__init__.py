"""Timing of kernels and decoding; one JSON row a result."""
