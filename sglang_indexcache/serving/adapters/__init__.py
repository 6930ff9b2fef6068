"""Adapters: trained indexers in a folder, bound to checkpoint and pattern, which a server loads."""
