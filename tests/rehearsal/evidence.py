"""Evidence that a server was at the feature that it rehearses, and not only had its flag."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from sglang_indexcache.kernels import routes
from sglang_indexcache.kernels.routes import Routes
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.pattern import Pattern
from tests.rehearsal.questions import LENGTHS, PATTERNS, QUARTER, Judge, parameters, prompt

Evidence = Callable[[Client, Path], None]
STAGE = Path(__file__).parent / "stage"
CARD = "NVIDIA H100 80GB HBM3"
SHORTER = 150


def argument(name: str, value: Any) -> Evidence:
    """SGLang resolved an argument to ``value``."""

    def check(client: Client, _: Path) -> None:
        assert client.server_info()[name] == value

    return check


def adapter_served(client: Client, _: Path) -> None:
    """The server has one, without which its answers would be the checkpoint's."""
    assert all(state["adapter"] for state in _states(client))


def mixed_forwards(client: Client, _: Path) -> None:
    """Requests of several patterns were in one forward."""
    assert any(state["mixed_forwards"] for state in _states(client))


def switches(client: Client, _: Path) -> None:
    """A policy by prompt length is for who comes after it and names no pattern."""
    (short, low), (long, high) = (LENGTHS[1], "F" * len(QUARTER)), (LENGTHS[0], "FSSSSS")
    with ThreadPoolExecutor(1) as meanwhile:
        under_way = meanwhile.submit(_tokens, client, LENGTHS[2], None, 32)
        while not any(state["requests"] for state in _states(client)):
            assert not under_way.done(), "answered before the switch"
        client.switch_pattern(f"{low} < {(short + long) // 2} <= {high}")
        assert not under_way.done(), "answered before the switch"
        selection = [_tokens(client, length, None) for length in (short, long)]
        assert under_way.result() == _tokens(client, LENGTHS[2], QUARTER, 32)
    client.switch_pattern(QUARTER)
    assert selection == [_tokens(client, short, low), _tokens(client, long, high)]


def replays(mode: str) -> Evidence:
    """SGLang's metrics count replays of ``mode``."""

    def check(client: Client, _: Path) -> None:
        metrics = httpx.get(f"{client.url}/metrics").text
        passes = re.findall(rf'cuda_graph_passes_total{{.*mode="{mode}".*}} (\S+)', metrics)
        assert sum(map(float, passes)) > 0, metrics

    return check


def halves(client: Client, _: Path) -> None:
    """Some forward was split within a prompt, and some step of decoding between requests."""
    extend, decode = "1", "2"  # of SGLang's ForwardMode
    line = r"two_chunk=(\w+) tbo_split_seq_index=(\d+) .* forward_mode=(\d)"
    split = set(re.findall(line, client.log.read_text()))  # type: ignore[attr-defined]
    assert ("True", "0", extend) in split
    assert ("False", "1", decode) in split


def idle_ranks(client: Client, _: Path) -> None:
    """Each data-parallel rank answers alone, the others without a request, and all say the same."""
    client.flush_cache()
    before = _selections(client)
    answers = []
    for rank in range(len(before)):
        answers.append(_tokens(client, LENGTHS[0], None, routed_dp_rank=rank))
        after = _selections(client)
        assert [new > old for new, old in zip(after, before, strict=True)] == [
            index == rank for index in range(len(before))
        ]
        before = after
    assert len(answers) > 1
    assert all(answer == answers[0] for answer in answers)


def mixed_chunks(client: Client, model: Path) -> None:
    """Steps of an answer ran in forwards that prefill other prompts, under its own pattern.

    They count as prefill. SGLang mixes nothing with a request that wants log-probabilities, so the
    tokens are judged: how far they are behind the likeliest, which other patterns would not choose.
    """
    steps = 32
    prompts = [(LENGTHS[2], QUARTER), (LENGTHS[0], PATTERNS[1]), (LENGTHS[1], PATTERNS[3])]

    def decoded() -> int:
        tokens = _states(client)[0]["tokens"]
        return sum(count for name, count in tokens.items() if name.startswith("decode"))

    client.flush_cache()
    before = decoded()
    with ThreadPoolExecutor(len(prompts)) as meanwhile:
        under_way = [meanwhile.submit(_ask, client, *prompts[0], steps)]
        while not any(state["requests"] for state in _states(client)):
            assert not under_way[0].done()
        under_way += [
            meanwhile.submit(_ask, client, *asked_prompt, steps) for asked_prompt in prompts[1:]
        ]
        answers = [reply.result()["output_ids"] for reply in under_way]
    assert 0 < decoded() - before < len(prompts) * (steps - 1)
    judge = Judge(model, fp8_kv=client.server_info()["kv_cache_dtype"] == "fp8_e4m3")
    for (length, pattern), answer in zip(prompts, answers, strict=True):
        tokens = prompt(length) + answer
        behind = {wrong: judge.behind(steps, tokens, wrong) for wrong in PATTERNS}
        assert behind.pop(pattern) < min(behind.values()) / 2


def accepted_drafts(client: Client, _: Path) -> None:
    """The target agreed with some drafts, and not with all."""
    replies = [_ask(client, length, tokens=16) for length in LENGTHS]
    right, drafted = (
        sum(reply["meta_info"][f"spec_num_{name}_drafts"] for reply in replies)
        for name in ("correct", "proposed")
    )
    assert 0 < right < drafted


def kernels_of_ours(client: Client, _: Path) -> None:
    """The kernels of SGLang that ours stand for were never launched."""
    launched = re.findall(r"the stage's first (\S+)", client.log.read_text())  # type: ignore[attr-defined]
    theirs = (
        *("fp8_mqa_logits", "fp8_paged_mqa_logits", "fast_topk", "topk_transform"),
        *("flash_mla_sparse_fwd", "with_kvcache"),
    )
    assert launched
    assert not [name for name in launched if any(kernel in name for kernel in theirs)]


def kernels_by_rows(client: Client, _: Path) -> None:
    """Every kernel that the stage's record has best somewhere was taken, and every default."""
    _ask(client, SHORTER, None)  # shorter than any that was timed
    table = Routes(
        CARD, tuple(map(routes.shape_of, routes.read(STAGE / "measured.json")[CARD])), 70
    )
    operations = {shape.operation for shape in table.shapes}
    taken = {choice.partition(",")[0] for s in _states(client) for choice in s["kernel_choices"]}
    for operation in operations:
        for name in table.takes(operation):
            assert f"{operation.name}: {name}" in taken, (operation, name, taken)
    assert "select-prefill: engine" in taken


def split_rows(client: Client, _: Path) -> None:
    """Both ranks scored some rows of most prefills, and none of them all."""
    for state in _states(client):
        first, second = state["scored_rows"]
        assert 0 < min(first, second) <= max(first, second) < 0.9 * state["selected_rows"]
        assert first + second < 1.3 * state["selected_rows"]


def pages_from_the_host(client: Client, _: Path) -> None:
    """The card's pool cannot hold all prompts: what was evicted came back, the same to the bit."""

    def again(length: int) -> tuple[dict[str, int], Any]:
        """Ask again; return where the prefix lay, and the answer."""
        info = _ask(client, length, return_logprob=True)["meta_info"]
        return info["cached_tokens_details"], info["output_token_logprobs"]

    client.flush_cache()
    _ask(client, LENGTHS[0])
    before, expected = again(LENGTHS[0])
    for length in LENGTHS[1:]:
        _ask(client, length)
    after, fetched = again(LENGTHS[0])
    assert (before["host"], after["host"]) == (0, before["device"])
    assert expected == fetched


def returned_selections(client: Client, model: Path) -> None:
    """Decode steps tell what each layer used: S layers their F layer's list, F layers their own.

    The lists of F layers are those of transformers but for bfloat16's near-ties.
    """
    pattern, length, steps = Pattern(QUARTER), LENGTHS[0], 12
    client.flush_cache()
    reply = _ask(client, length, tokens=steps, return_indexer_topk=True)
    ids = prompt(length) + reply["output_ids"][:-1]
    evaluator = TransformersEvaluator(model, Calibration((tuple(ids),), "rehearsal"))
    buffer = np.frombuffer(b64decode(reply["meta_info"]["indexer_topk"]), dtype=np.int32)
    lists = buffer.reshape(len(ids), len(pattern), -1)[:, :, : evaluator.topk]
    expected = evaluator.run(pattern, tuple(ids)).indices
    for layer, source in enumerate(pattern.sources):
        assert (lists[:, layer] == lists[:, source]).all()
    for layer in pattern.full_layers:
        for query in range(length, len(ids)):
            selection = set(lists[query, layer].tolist())
            assert len(selection) == evaluator.topk
            assert len(selection & set(expected[layer][0, query].tolist())) > 0.9 * evaluator.topk


def _states(client: Client) -> list[dict[str, Any]]:
    """Return what IndexCache tells of each rank."""
    return [state["indexcache"] for state in client.server_info()["internal_states"]]


def _tokens(client: Client, length: int, pattern: str | None, tokens: int = 6, **body: Any) -> Any:
    """Return the tokens of an answer and their log-probabilities."""
    answer = _ask(client, length, pattern, tokens, return_logprob=True, **body)
    return answer["meta_info"]["output_token_logprobs"]


def _selections(client: Client) -> list[int]:
    """Count the indexers that each data-parallel rank has run."""
    by_rank = sorted(_states(client), key=lambda state: state["rank"])
    return [sum(state["indexer_selections"]) for state in by_rank]


def _ask(
    client: Client, length: int, pattern: str | None = None, tokens: int = 6, **body: Any
) -> dict[str, Any]:
    reply: dict[str, Any] = client.generate(
        input_ids=prompt(length), sampling_params=parameters(pattern, tokens), **body
    )
    return reply
