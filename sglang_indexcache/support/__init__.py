"""Helpers that exist once: files, lengths, text, drawings."""
