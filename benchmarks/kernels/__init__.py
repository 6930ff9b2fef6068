"""Correctness and speed of the kernels on one card; start with ``../device_check.sh``."""
