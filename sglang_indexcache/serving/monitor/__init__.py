"""Watching a server: traffic, drift of its pattern, metrics, whether it skips what it should."""
