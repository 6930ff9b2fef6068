"""Checks, before SGLang starts, of fields that it takes for granted in a DSA ``config.json``.

transformers neither writes nor needs all of these fields. Without them SGLang fails with a bare
AttributeError or AssertionError after it has begun to load, or serves other weights than were
saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sglang_indexcache.checkpoint import text_config
from sglang_indexcache.errors import CheckpointError, Findings
from sglang_indexcache.kernels.contract import INDEX_DIM
from sglang_indexcache.models import BY_ARCHITECTURE, read_field

LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "index_head_dim": (
        lambda value, _: value == INDEX_DIM,
        f"must be {INDEX_DIM}, the width of SGLang's index-K pages on GPUs: the indexers have "
        "to be made and trained with it (only the CPU platform stores other widths)",
    ),
    "qk_rope_head_dim": (
        lambda value, config: value <= (read_field(config, "index_head_dim") or value),
        "must be at most index_head_dim: an indexer rotates as many entries of its keys",
    ),
    "hidden_act": (lambda value, _: value == "silu", "must be silu, the one that is built"),
    "moe_layer_freq": (
        lambda value, _: type(value) is int and value >= 1,
        "must be a whole number of at least 1",
    ),
    "n_group": (
        lambda value, config: (read_field(config, "n_routed_experts") or 0) % (value or 1) == 0,
        "must divide n_routed_experts, whose groups are of equal size",
    ),
    "mlp_layer_types": (
        lambda value, config: _mlps_that_sglang_builds(config, len(value)) in (None, list(value)),
        "must be what first_k_dense_replace and moe_layer_freq say, which is all that SGLang "
        "reads: mend those, or the weights of other layers stay unread",
    ),
}
"""Limits by field: a check whether SGLang can serve the value, and the text that says which values
are served and what to do. A field that the config does not have is not checked."""


def check_config(config: Any, where: str, *, on_cpu: bool = False) -> None:
    """Refuse a config on which SGLang would fail later.

    Args:
        config: a transformers config object or a ``config.json`` dict with a known architecture.
        on_cpu: whether the CPU platform serves it, which stores index keys of any width.

    Raises:
        IndexCacheError: has the lines to add to ``config.json``, and the limits that are exceeded.
    """
    findings, text = Findings(), text_config(config)
    family = BY_ARCHITECTURE[str(read_field(config, "architectures")[0])]
    absent = {n: v for n, v in family.extra_config.items() if read_field(text, n) is None}
    if absent:
        lines = json.dumps(absent)
        findings.each.append(
            CheckpointError(
                f"SGLang reads what the config of {where} does not have (transformers does not "
                f"write it). Add to its config.json: {lines[1:-1]}; or start with "
                f"--json-model-override-args '{lines}'."
            )
        )
    problems = [
        f"{field}{'' if isinstance(value, list) else f' is {value!r} and'} {demand}"
        for field, (holds, demand) in LIMITS.items()
        if not (on_cpu and field == "index_head_dim")
        and (value := read_field(text, field)) is not None
        and not holds(value, text)
    ]
    if problems:
        findings.each.append(
            CheckpointError(f"SGLang cannot serve {where}: {'; '.join(problems)}.")
        )
    findings.report()


def _mlps_that_sglang_builds(config: Any, count: int) -> list[str] | None:
    """Return the ``mlp_layer_types`` that SGLang builds; None if it uses other fields instead."""
    first, step = read_field(config, "first_k_dense_replace"), read_field(config, "moe_layer_freq")
    if first is None or type(step) is not int or step < 1:
        return None
    return ["sparse" if i >= first and i % step == 0 else "dense" for i in range(count)]
