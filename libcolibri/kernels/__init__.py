"""All numba kernels."""
