"""Timing of kernels and decoding: one JSON row per result."""
