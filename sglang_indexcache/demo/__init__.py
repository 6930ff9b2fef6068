"""The demo and its checkpoint."""
