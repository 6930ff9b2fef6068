"""What a bare machine with a card needs: ``python -m benchmarks.card.pack``."""
