"""The layer stack with every set of kernels on one card; start with ``../device_check.sh``."""
