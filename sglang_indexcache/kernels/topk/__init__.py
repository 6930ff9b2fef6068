"""Exact top-k of a logits matrix: the k largest, ties to the smaller position, ascending output."""

from sglang_indexcache.kernels.topk.cpu import topk_ascending

__all__ = ["topk_ascending"]
