"""References for the kernels of SGLang's CUDA path that a DSA model on one Hopper card launches.

Each computes in float64 and rounds once, so that its rows do not depend on each other; each checks
what the kernel demands of its inputs and poisons what the kernel leaves undefined.
"""
