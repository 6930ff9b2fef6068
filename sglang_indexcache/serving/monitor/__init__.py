"""Watching a server: traffic, metrics, whether it skips what it should."""
