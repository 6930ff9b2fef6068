"""Helpers that exist once: files, provenance, statistics, figures, text."""
