"""Where the CUDA implementation of each op can run."""

from sglang_indexcache.kernels.contract import INDEXER_HEADS, Limits, OpName

_HOPPER = Limits(architectures=frozenset({(9, 0)}))
_INDEXER = Limits(architectures=_HOPPER.architectures, heads=frozenset(INDEXER_HEADS))

LIMITS: dict[OpName, Limits] = {
    "indexer_logits_prefill": _INDEXER,
    "indexer_logits_decode": _INDEXER,
    "indexer_select_prefill": _INDEXER,
    "indexer_select_decode": _INDEXER,
    "topk": _HOPPER,
    "sparse_mla_prefill": _HOPPER,
    "sparse_mla_decode": _HOPPER,
}
