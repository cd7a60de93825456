"""Measurements; those of the kernels have other libraries' own functions beside them."""
