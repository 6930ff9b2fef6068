"""Adapters: folders of trained indexers for a server, bound to one checkpoint and one pattern."""
