"""A small model served on the card: its greedy tokens are those of stock SGLang.

Eager first, which is the least that must work, then CUDA graphs, then live mode with requests of
several patterns in a batch. The shipped checkpoint is widened to what DSA's kernels are compiled
for, and reads source code. What SGLang's start needs may be missing on a bare machine, so there are
several ways to serve; the first that works is kept. None uses FlashAttention 3, which cannot be
carried.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pytest
import torch

from sglang_indexcache.errors import ServerError
from sglang_indexcache.pattern import Pattern
from tests.gpu.conftest import IS_REHEARSAL

if TYPE_CHECKING:  # they need pydantic, which travels with SGLang
    from sglang_indexcache.lab.client.http import Client
    from sglang_indexcache.serving.protocol import RankState

pytestmark = pytest.mark.sglang
PATTERN, FULL, HALF = Pattern("FSSS" * 3), Pattern("F" * 12), Pattern("FS" * 6)
TOKENS, INDEX_K_BYTES = 24, 132
START_SECONDS = 900 if IS_REHEARSAL else 190
COMMON = (
    *("--max-total-tokens", "32768", "--context-length", "8192", "--max-running-requests", "8"),
    *("--chunked-prefill-size", "2048", "--grammar-backend", "none", "--skip-server-warmup"),
    *("--disable-radix-cache", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.4"),
)
ENVIRONMENT = {
    # The carried sgl_kernel is older than SGLang asks for; benchmarks/card/pack.py says why.
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    # Dense attention of short prompts is FlashAttention 3's.
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
}


@dataclass(frozen=True)
class Way:
    """One way to serve: flags, and variables beside :data:`ENVIRONMENT`."""

    flags: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def deterministic(self) -> Way:
        """Return the same with the top-k in torch, which SGLang has behind unfused scores alone.

        The default is not deterministic in a prefill: on an H100 stock repeated one or two of
        three answers.
        """
        flags = (*self.flags, "--dsa-topk-backend", "torch")
        return Way(flags, (*self.variables, ("SGLANG_DSA_FUSE_TOPK", "0")))


FP8 = Way(("--kv-cache-dtype", "fp8_e4m3"))
BFLOAT16 = Way(("--kv-cache-dtype", "bfloat16", "--dsa-decode-backend", "flashmla_sparse"))
WAYS = {
    "FP8 cache, top-k in torch": FP8.deterministic(),
    "FP8 cache, flashmla_kv": FP8,
    "bfloat16 cache, top-k in torch": BFLOAT16.deterministic(),
    "bfloat16 cache, flashmla_sparse": BFLOAT16,
}
Prompts: TypeAlias = Sequence[tuple[int, ...]]


class Asked(Protocol):
    """The part of a client that is used here."""

    def generate(self, **body: Any) -> Any: ...

    def states(self) -> list[RankState]: ...


@dataclass(frozen=True)
class Request:
    """A prompt, and the pattern that it names."""

    ids: tuple[int, ...]
    pattern: Pattern | None = None


def answer(client: Asked, request: Request) -> list[int]:
    """Greedy tokens; an answer must say the pattern that was asked for."""
    from sglang_indexcache.serving.client_rules import check_answered_under
    from sglang_indexcache.serving.protocol import named

    sampling: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    if request.pattern is not None:
        sampling |= named(str(request.pattern))
    reply = client.generate(input_ids=list(request.ids), sampling_params=sampling)
    if request.pattern is not None:
        check_answered_under(reply["meta_info"], str(request.pattern), "the server")
    assert len(reply["output_ids"]) == TOKENS
    return list(reply["output_ids"])


def same_tokens(ours: Asked, stock: Asked, prompts: Prompts) -> dict[str, Any]:
    """The same tokens as stock SGLang's wherever that agrees with itself."""
    expected, again, answers = (
        [answer(c, Request(p)) for p in prompts] for c in (stock, stock, ours)
    )
    stable = [
        n for n, (first, second) in enumerate(zip(expected, again, strict=True)) if first == second
    ]
    if not stable:
        pytest.skip("stock SGLang answers every prompt otherwise when it is asked again")
    for number in stable:
        equal = sum(a == b for a, b in zip(expected[number], answers[number], strict=True))
        assert equal == TOKENS, f"prompt {number}: {equal} of {TOKENS} tokens are stock's"
    return {"prompts compared": len(stable), "left out": len(expected) - len(stable)}


def compare_with_stock(ours: Asked, stock: Asked, prompts: Prompts) -> dict[str, Any]:
    """:func:`same_tokens`, from a server that keeps the index keys of F layers alone."""
    compared = same_tokens(ours, stock, prompts)
    (state, *_) = ours.states()
    assert state.pattern == str(PATTERN)
    assert state.index_k_bytes_per_token == INDEX_K_BYTES * len(PATTERN.full_layers)
    return compared


def ran_where_full(state: RankState, pattern: Pattern) -> None:
    """Indexers ran on F layers, and nowhere else; replays of graphs are not counted."""
    ran = [position for position, count in enumerate(state.indexer_selections) if count]
    assert ran == list(pattern.full_layers)


def forced(client: Asked, requests: Sequence[Request], at_once: bool) -> torch.Tensor:
    """Return ``[len(requests), TOKENS]``: log-probabilities of each prompt's last tokens.

    Greedy answers part for good at a first near tie; given tokens only differ by rounding.
    """
    ask = partial(_given, client)
    with ThreadPoolExecutor(len(requests) if at_once else 1) as pool:
        return torch.tensor(list(pool.map(ask, requests)))


def _given(client: Asked, request: Request) -> list[float]:
    from sglang_indexcache.serving.client_rules import check_answered_under
    from sglang_indexcache.serving.protocol import named

    sampling = {"max_new_tokens": 1, "temperature": 0.0, **named(str(request.pattern))}
    start = len(request.ids) - TOKENS - 1
    reply = client.generate(
        input_ids=list(request.ids),
        sampling_params=sampling,
        return_logprob=True,
        logprob_start_len=start,
    )
    check_answered_under(reply["meta_info"], str(request.pattern), "the server")
    pairs = reply["meta_info"]["input_token_logprobs"][-TOKENS:]
    return [float(logprob) for logprob, *_ in pairs]


def compare_mixed(live: Asked, prompts: Prompts) -> dict[str, Any]:
    """Requests of several patterns in a batch answer as near to alone as nine of one pattern do.

    Other rows in a batch change a kernel's rounding, whatever their pattern: so the nine of one
    pattern are the control. Another pattern's distance says that a mixed-up one would be seen.
    """
    kinds = (PATTERN, FULL, HALF)
    by_kind = [[Request(prompt, kind) for prompt in prompts] for kind in kinds]
    alone, again = (
        torch.stack([forced(live, requests, at_once=False) for requests in by_kind])
        for _ in range(2)
    )
    uniform = [forced(live, [*requests] * 3, at_once=True) for requests in by_kind]
    control = torch.stack(uniform).unflatten(1, (3, -1)) - alone[:, None]
    every = [request for requests in zip(*by_kind, strict=True) for request in requests]
    mixed = forced(live, every, at_once=True).unflatten(0, (len(prompts), -1)).transpose(0, 1)
    found = {
        "again": again - alone,
        "control": control,
        "mixed": mixed - alone,
        "other pattern": alone - alone.roll(1, 0),
    }
    means = {name: float(values.abs().mean()) for name, values in found.items()}
    if 0 < means["other pattern"] <= 4 * means["again"]:
        pytest.skip(f"an answer differs from itself as from another pattern's: {means}")
    assert means["other pattern"] > 4 * means["control"], f"nothing could be seen: {means}"
    assert means["mixed"] <= 2 * means["control"] + 1e-6, means
    return {name: round(value, 6) for name, value in means.items()}


# -- on the card ---------------------------------------------------------------------------------


def arguments(model: Path, kind: str, pattern: str) -> list[str]:
    """Return the command line of stock SGLang, or of ours in a mode."""
    types = json.dumps({"indexer_types": PATTERN.to_indexer_types()})
    backend = "dsa" if kind == "stock" else "indexcache"
    ours = ("--indexcache-pattern", pattern, "--indexcache-mode", kind)
    return [
        *("--model-path", str(model), "--attention-backend", backend, *COMMON),
        *(("--json-model-override-args", types) if kind == "stock" else ours),
    ]


@contextmanager
def serving(
    model: Path,
    folder: Path,
    remembered: dict[str, str],
    kinds: dict[str, tuple[str, ...]],
    pattern: str = str(PATTERN),
) -> Iterator[dict[str, Client]]:
    """Servers side by side, by kind and with its flags, in the first way in which all start.

    That stock starts and ours does not is a failure; that neither does, the machine's.
    """
    problems = {}
    for name in remembered.values() or WAYS:
        variant = WAYS[name]
        lines = {
            kind: [*arguments(model, kind.partition(" ")[0], pattern), *variant.flags, *flags]
            for kind, flags in kinds.items()
        }
        with started(lines, folder, variant.variables) as (clients, failed):
            if not failed:
                remembered["way"] = name
                yield clients
                return
            problems[name] = failed
    pytest.skip(f"no server of any kind starts here: {problems}")


@contextmanager
def started(
    lines: dict[str, list[str]], folder: Path, variables: Iterable[tuple[str, str]] = ()
) -> Iterator[tuple[dict[str, Client], dict[str, str]]]:
    """Servers side by side, by kind: those that start, and why the others do not."""
    from sglang_indexcache.lab.client.launch import Server

    environment = ENVIRONMENT | dict(variables)
    with ExitStack() as stack:
        servers = {}
        for kind, line in lines.items():
            log = folder / f"{kind}.log".replace(" ", "-")
            servers[kind] = stack.enter_context(Server(line, log, env=environment))
        clients, failed = {}, {}
        for kind, server in servers.items():
            try:
                clients[kind] = server.wait_until_ready(START_SECONDS)
            except ServerError as error:
                failed[kind] = str(error)[-1500:]
        ours = [kind for kind in failed if kind != "stock"]
        assert "stock" in failed or "stock" not in lines or not ours, failed
        yield clients, failed


def test_eager_tokens_are_stocks(
    model: Path,
    prompts: Prompts,
    tmp_path: Path,
    remembered: dict[str, str],
    evidence: dict[str, Any],
) -> None:
    eager = ("--disable-cuda-graph",)
    with serving(model, tmp_path, remembered, {"static": eager, "stock": eager}) as clients:
        evidence |= compare_with_stock(clients["static"], clients["stock"], prompts)
        ran_where_full(clients["static"].states()[0], PATTERN)


def test_tokens_in_graphs_are_stocks(
    model: Path,
    prompts: Prompts,
    tmp_path: Path,
    remembered: dict[str, str],
    evidence: dict[str, Any],
) -> None:
    with serving(model, tmp_path, remembered, {"static": (), "stock": ()}) as clients:
        evidence |= compare_with_stock(clients["static"], clients["stock"], prompts)


def test_live_requests_of_several_patterns_share_batches(
    model: Path,
    prompts: Prompts,
    tmp_path: Path,
    remembered: dict[str, str],
    evidence: dict[str, Any],
) -> None:
    with serving(model, tmp_path, remembered, {"live": ()}) as clients:
        evidence |= compare_mixed(clients["live"], prompts)


@pytest.mark.hopper
def test_a_server_with_our_kernels_answers_like_stock(
    model: Path,
    prompts: Prompts,
    tmp_path: Path,
    remembered: dict[str, str],
    evidence: dict[str, Any],
) -> None:
    """A prompt that fits into k has stock's first token; of longer ones the share is written.

    There our scores differ from the engine's in rounding, so that a near tie may be selected
    otherwise.
    """
    flags = ("--indexcache-kernels", "cuda")
    with serving(model, tmp_path, remembered, {"static": flags, "stock": ()}) as clients:
        expected, answers = (
            [answer(clients[kind], Request(prompt)) for prompt in prompts]
            for kind in ("stock", "static")
        )
        evidence["share of stock's tokens"] = [
            sum(a == b for a, b in zip(mine, theirs, strict=True)) / TOKENS
            for mine, theirs in zip(expected, answers, strict=True)
        ]
        assert answers[-1][0] == expected[-1][0]
