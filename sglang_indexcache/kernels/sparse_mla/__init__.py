"""Sparse multi-head latent attention: attend to the selected latent rows only."""

from sglang_indexcache.kernels.sparse_mla.cpu import sparse_mla

__all__ = ["sparse_mla"]
