"""Checks before a server starts: refusals, the model's config, and ``server doctor``."""
