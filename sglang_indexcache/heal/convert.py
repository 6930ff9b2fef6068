"""Stage 0: turn a dense MLA checkpoint into a DSA checkpoint by adding indexers.

The paper shortens DSA training this way: it starts from a dense model instead of a base DSA one
(paper section "Experiments", Setup). The new indexers are random; the warm-up stage trains them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_indexcache.checkpoint import read_config
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.checkpoints import save_checkpoint
from sglang_indexcache.heal.model import is_indexer
from sglang_indexcache.models import TRAINABLE
from sglang_indexcache.stored import check_trainable_dtypes

TARGETS = {family.dense_type: kind for kind, family in TRAINABLE.items() if family.dense_type}
"""Dense model types and the DSA type that each becomes."""

_OWN_FIELDS = ("model_type", "architectures", "transformers_version", "dtype", "layer_types")


def convert(
    source: Path,
    target: Path,
    index_topk: int = 2048,
    index_n_heads: int = 32,
    index_head_dim: int = 128,
    to: str | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Write a DSA checkpoint with the dense checkpoint's weights and new random indexers.

    Args:
        source: a dense MLA checkpoint with its tokenizer.
        target: folder to write. It holds every tensor of the dense checkpoint, MTP layers too,
            bit for bit.
        index_topk: keys that a query will select.
        index_n_heads: heads of an indexer.
        index_head_dim: width of an indexer's head; SGLang serves 128 only.
        to: "deepseek_v32" or "glm_moe_dsa"; by default the dense model's own family.
        seed: of the indexers.

    Returns:
        The DSA model.

    Raises:
        CheckpointError: not a checkpoint.
        TrainingError: not a dense MLA checkpoint, or one whose attention DSA cannot take over.
    """
    config = _dense_config(source)
    kind = to or TARGETS[config.model_type]
    if kind not in TARGETS.values():
        raise TrainingError(
            f"cannot convert to {kind!r}; there are {' and '.join(TARGETS.values())}"
        )
    check_trainable_dtypes(source)
    dense = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    fields = {k: v for k, v in config.to_dict().items() if k not in _OWN_FIELDS}
    fields |= {
        "index_topk": index_topk,
        "index_n_heads": index_n_heads,
        "index_head_dim": index_head_dim,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **fields)
    sparse = AutoModelForCausalLM.from_config(config, dtype=dense.dtype)
    _copy(dense, sparse)
    tokenizer = AutoTokenizer.from_pretrained(source)
    save_checkpoint(sparse, sparse.state_dict(), tokenizer, None, target, base=source)
    return sparse


def _dense_config(source: Path) -> Any:
    read_config(source)  # transformers would look for a folder without one on the internet
    config = AutoConfig.from_pretrained(source)
    if config.model_type not in TARGETS:
        raise TrainingError(
            f"{source} is a {config.model_type}; dense MLA models are {' and '.join(TARGETS)}"
        )
    if config.q_lora_rank is None:
        raise TrainingError(
            f"{source} has no q_lora_rank: an indexer reads the low-rank query, so a model "
            "without one cannot get an indexer"
        )
    if not getattr(config, "rope_interleave", True):
        raise TrainingError(
            f"{source} has rope_interleave false; DSA models rotate interleaved pairs"
        )
    return config


def _copy(dense: PreTrainedModel, sparse: PreTrainedModel) -> None:
    """Copy every weight; only indexers may stay as they are."""
    missing, unexpected = sparse.load_state_dict(dense.state_dict(), strict=False)
    lost = [*unexpected, *(name for name in missing if not is_indexer(name))]
    if lost:
        raise TrainingError(
            f"these weights have no counterpart: {', '.join(lost[:5])}. This dense model differs "
            "from the DSA family in more than its indexers."
        )
