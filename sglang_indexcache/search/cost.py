"""What a search will cost: forward passes, tokens, GPU-hours."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_indexcache.errors import SearchError
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.targets import Targets


@dataclass(frozen=True)
class Cost:
    """The bill of one search.

    Attributes:
        evaluations: patterns times the whole calibration set.
        sequences: forward passes of one sequence.
        tokens: tokens forwarded.
        hours: wall-clock on ``gpus`` GPUs, or None without a prefill rate.
        gpu_hours: ``hours`` times the GPUs, or None.
    """

    evaluations: float
    sequences: float
    tokens: float
    hours: float | None
    gpu_hours: float | None


def cost(
    constraints: Constraints,
    targets: Targets,
    options: Options,
    sequences: int,
    context: int,
    tokens_per_second: float | None = None,
    gpus: int = 1,
) -> Cost:
    """Predict a search.

    What keeps to a budget is billed with the whole budget. A pattern with S layers prefills faster
    than the all-F rate that is usually at hand, so hours are an upper bound too.

    Args:
        constraints: of the search.
        targets: of the search.
        options: of the search.
        sequences: in the whole calibration set.
        context: tokens of each.
        tokens_per_second: prefill rate of the whole engine at this context.
        gpus: of that engine.

    Raises:
        SearchError: numbers below one, or options whose cost nobody can predict.
    """
    if sequences < 1 or context < 1 or gpus < 1 or (tokens_per_second or 1) <= 0:
        raise SearchError("sequences, context, GPUs and the prefill rate must be above zero")
    tokens = options.expected_tokens(constraints, targets, sequences * context)
    if tokens is None:
        raise SearchError(f"there is no cost model for: {options.in_words()}")
    hours = tokens / tokens_per_second / 3600 if tokens_per_second else None
    return Cost(
        evaluations=tokens / (sequences * context),
        sequences=tokens / context,
        tokens=tokens,
        hours=hours,
        gpu_hours=hours * gpus if hours is not None else None,
    )
