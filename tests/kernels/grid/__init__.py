"""One grid of inputs (``cases``), one set of checks (``suite``) for every implementation of an op.

The tests, ``benchmarks/card/phases.py`` and anyone with another card run the same.
"""
