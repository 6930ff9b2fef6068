"""One grid of inputs and one set of checks for every implementation of every op.

``cases`` makes the inputs, ``suite`` runs an implementation on them and says what is wrong. The
tests, ``benchmarks/device_check.sh`` and anyone with another card run the same.
"""
