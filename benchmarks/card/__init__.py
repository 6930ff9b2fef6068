"""Tools for a bare machine with a card: ``python -m benchmarks.card.pack``."""
