"""Tensor types and their tiles."""
