"""Correctness and speed of the kernels on one card; start with ``../card/README.md``."""
