"""Rules by which clients believe a server, each defined only here.

They say which servers are alike, whether layers obeyed a pattern, and whether an answer was made
under the requested pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from sglang_indexcache.errors import ServerError, ServerUnavailableError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.protocol import PATTERN_OF_REQUEST, RankState, states_of

ENGINE_FACTS = (
    "model_path",
    "version",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "tp_size",
    "dp_size",
    "pp_size",
    "ep_size",
    "enable_dp_attention",
    "page_size",
    "chunked_prefill_size",
    "disable_radix_cache",
    "enable_deterministic_inference",
    "speculative_algorithm",
    "moe_runner_backend",
    "sampling_backend",
    "device",
)
"""Fields of SGLang's ``/server_info`` that can change answers, so compared servers must agree on
them."""


def check_answered_under(info: Mapping[str, Any], pattern: str, server: str) -> None:
    """Refuse an answer that was not made under the requested pattern, or does not name its pattern.

    Args:
        info: the answer's ``meta_info``.
        pattern: the F/S string that the request named.
    """
    if (reported := info.get(PATTERN_OF_REQUEST)) == [pattern]:
        return
    claim = f"under {reported[0]}" if reported else "without saying under which pattern"
    raise ServerError(
        f"{server} was asked for pattern {pattern} and answered {claim}. Does it run another "
        "version of sglang-indexcache? Install the same on both sides; `indexcache server show` "
        "says what is wrong with its plugin."
    )


def check_obeyed(
    before: Sequence[RankState],
    after: Sequence[RankState],
    patterns: Iterable[str],
    server: str,
    *,
    alone: bool = False,
) -> None:
    """Refuse a server whose layers did not do what its requests' patterns say.

    A layer that is F in some of the patterns must have run its indexer, and a layer that is S in
    all of them must have reused indices. Only layers of a stage that reports are judged. Prefills
    are counted and replays of decode graphs are not, so a request must have been prefilled between
    the two states.

    Args:
        patterns: F/S strings of all requests between the two states.
        alone: whether nobody else used the server and every rank was asked. If so, each rank is
            judged by itself, and no layer that is S in all patterns may have run its indexer.

    Raises:
        ServerUnavailableError: the server was restarted in between; ask again.
        ServerError: names the layers that disobeyed.
    """
    names = sorted(set(patterns))
    full = {layer for name in names for layer in Pattern(name).full_layers}
    then = {state.rank: state for state in before}
    if then.keys() != {state.rank for state in after} or any(
        state.forwards < then[state.rank].forwards for state in after
    ):
        raise ServerUnavailableError(f"{server} was restarted meanwhile: it counts anew")
    pairs = [(then[state.rank], state) for state in after]
    ran = [_risen(old.indexer_selections, new.indexer_selections) for old, new in pairs]
    reused = [_risen(old.index_reuses, new.index_reuses) for old, new in pairs]
    if not alone:  # a rank may have had requests of only one of the patterns
        ran, reused = [_total(ran)], [_total(reused)]
    for runs, reuses in zip(ran, reused, strict=True):
        if wrong := disobedient(full, runs, reuses, after[0].counted_layers, alone=alone):
            hint = ", or others use the server" if alone else ""
            raise ServerError(
                f"{server} ignores the pattern: asked for {' and '.join(names)}, its layers "
                f"{', '.join(map(str, wrong))} did not do what that says (indexer runs by layer: "
                f"{runs}; reuses: {reuses}){hint}. Ask `indexcache server show` what is "
                "wrong with its plugin."
            )


def disobedient(
    full: Set[int],
    runs: Sequence[int],
    reuses: Sequence[int],
    layers: Iterable[int],
    *,
    alone: bool = True,
) -> list[int]:
    """Return the counted ``layers`` that did not do what the requests' patterns say.

    Args:
        full: layers that are F for some request; all others are S for every request.
        runs: how often each layer's indexer ran; ``reuses`` is how often it reused indices.
        alone: whether nobody else was served. If so, an S layer's indexer must not have run.
    """
    return [
        layer
        for layer in layers
        if (not runs[layer] if layer in full else not reuses[layer] or (alone and runs[layer]))
    ]


def _risen(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [new - old for old, new in zip(before, after, strict=True)]


def _total(ranks: Sequence[Sequence[int]]) -> list[int]:
    return [sum(layer) for layer in zip(*ranks, strict=True)]


def facts(info: Mapping[str, Any], server: str) -> dict[str, Any]:
    """Return the facts about a server that must be the same on all servers of a comparison."""
    values = {name: info[name] for name in ENGINE_FACTS if info.get(name) is not None}
    for state in states_of(info, server)[:1]:
        values |= {
            name: getattr(state, name) for name in ("architecture", "checkpoint_pattern", "mode")
        }
        values["indexcache"] = state.version
    return values


def alike(servers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return the facts that differ, each with the servers that report each of its values."""
    differing: dict[str, dict[str, list[str]]] = {}
    for fact in sorted({fact for reported in servers.values() for fact in reported}):
        names: dict[str, list[str]] = {}
        for name, reported in servers.items():
            names.setdefault(str(reported.get(fact, "")), []).append(name)
        if len(names) > 1:
            differing[fact] = names
    return differing
