"""Whether a running server's layers skip what its patterns say: what ``server show`` tells.

It compares what a rank counted with the patterns that it served. A layer counts when its Python
runs, so a prefill counts and the replay of a decode graph does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.protocol import OTHERS, RankState, disobedient

_MOST_RANGES = 6
"""More ranges of layers than these are given as a count."""


@dataclass(frozen=True)
class Skipping:
    """Proof from a rank's counters, and what it cannot see.

    Attributes:
        proven: whether every layer did as its patterns say; None while nothing was counted, or the
            rank does not name every pattern that it served.
        text: the verdict, in a sentence.
        uncounted: forwards or layers that the counters do not see; empty if they see all.
    """

    proven: bool | None
    text: str
    uncounted: str = ""


def judge(state: RankState) -> Skipping:
    """Judge whether a rank's layers did what the patterns that it served say."""
    runs, reuses, layers = state.indexer_selections, state.index_reuses, state.counted_layers
    counted = max((runs[layer] + reuses[layer] for layer in layers), default=0)
    if not counted:
        return Skipping(None, "not known yet, for no forward was counted. Send a request.")
    if state.mode == "live" and (not state.rows or OTHERS in state.rows):
        return Skipping(None, "not known, for the rank does not name every pattern that it served")
    wrong = disobedient(_full_layers(state), runs, reuses, layers)
    kinds = sorted({runs[layer] for layer in layers}, reverse=True)
    shares = [
        f"{kind:,} of {counted:,} {'forwards ' if kind == kinds[0] else ''}in "
        f"{_layers(layer for layer in layers if runs[layer] == kind)}"
        for kind in kinds
    ]
    text = f"indexer ran {', '.join(shares)}: "
    if wrong:
        text += f"NOT OK, for {_layers(wrong)} did not do what the pattern says"
    else:
        text += "OK"
    if state.mode == "live":
        text += " (since the server started, under every pattern that it had)"
    return Skipping(not wrong, text, _uncounted(state, counted))


def describe_index_keys(state: RankState) -> str:
    """Say the index-K bytes of a token beside those of plain DSA, which stores every indexer's.

    In live mode the two are the same: every layer stores its keys.
    """
    pattern, plain = Pattern(state.pattern), Pattern(state.checkpoint_pattern)
    if state.mode == "live":
        pattern = plain
    here = state.counted_layers
    layers, all_layers = (sum(map(each.is_full, here)) for each in (pattern, plain))
    stored = state.index_k_bytes_per_token
    text = f"{stored:,} bytes per token"
    if layers:
        text += f"; plain DSA: {stored * all_layers // layers:,}"
    return text + (" (in the layers of one pipeline stage)" if len(here) < len(plain) else "")


def describe_row_shares(state: RankState) -> str:
    """Say which share of the rows this rank's indexers scored; "" where ranks do not split rows."""
    if not state.scored_rows:
        return ""
    ranks = len(state.scored_rows)
    if not state.selected_rows:
        return f"row split over {ranks} ranks: no prefill was scored yet"
    shares = ", ".join(f"{rows / state.selected_rows:.0%}" for rows in state.scored_rows)
    return f"row split over {ranks} ranks: their indexers scored {shares} of the prefills' rows"


def _full_layers(state: RankState) -> set[int]:
    """Find the layers that are F in any pattern that was served; static mode has but one."""
    every = state.rows or {state.pattern}
    return {layer for pattern in every for layer in Pattern(pattern).full_layers}


def _uncounted(state: RankState, counted: int) -> str:
    if len(state.counted_layers) < len(Pattern(state.pattern)):
        return "the other layers are in pipeline stages that do not report"
    if missing := max(0, state.forwards - counted):
        replayed = min(missing, sum(state.graph_replays.values()))
        why = {
            "replayed CUDA graphs": replayed,
            "attended densely, as short prompts do on GPUs": missing - replayed,
        }
        text = " and ".join(f"{times:,} {what}" for what, times in why.items() if times)
        return f"of {state.forwards:,} forwards {text}, in which layers cannot be counted"
    if counted > state.forwards:
        return (
            "more than the forwards were counted: captures of prefill graphs and the halves of an "
            "overlapped batch count too"
        )
    return ""


def _layers(layers: Iterable[int]) -> str:
    """Say ``layers 0-2 and 5``, or a count where there are many pieces."""
    numbers: Sequence[int] = sorted(layers)
    pieces = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda placed: placed[1] - placed[0])
    ]
    if len(pieces) > _MOST_RANGES:
        return f"{len(numbers)} layers"
    ranges = [f"{piece[0]}-{piece[-1]}" if len(piece) > 1 else str(piece[0]) for piece in pieces]
    text = " and ".join([", ".join(ranges[:-1]), ranges[-1]] if len(ranges) > 1 else ranges)
    return f"layer {text}" if len(numbers) == 1 else f"layers {text}"
