"""Measure folding an indexer beside sharing its selection: see ``__main__.py``."""
