"""Vectors and instruction sets for numba."""
