"""Exact top-k of a logits matrix: the k largest, ties to the smaller position, ascending output."""
