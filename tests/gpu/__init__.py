"""Tests that need a card: ``python -m benchmarks.card.phases``, or ``pytest -m gpu``."""
