"""Ranks that split an indexer's rows answer what ranks that each score all rows do.

They do to the bit wherever a prompt is in a forward by itself; the shares of batches are held to
the bit in ``tests/serving/cpu/test_select.py`` and by the rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.data.words import haystack
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.cpu.select import ROW_BLOCK
from sglang_indexcache.serving.protocol import RankState, named
from sglang_indexcache.serving.row_split import ON_CPU, RowSplit
from tests.cli.test_search import TINY
from tests.e2e.conftest import Serve, prompt
from tests.e2e.test_parallel import FOUR_RANKS
from tests.oracle import Oracle

TOPK, CHUNK = 64, 512
PATTERNS = ("F" * 12, "FSSS" * 3, "FSFSFFSFSSSF", "FSSSSSSSSSSS")
ARGUMENTS = (
    *("--dtype", "float32", "--max-total-tokens", "8192"),
    *("--chunked-prefill-size", str(CHUNK), "--indexcache-mode", "live"),
)
RANKS = {
    "four ranks": ("--tp", "4"),
    "two ranks a replica": ("--tp", "4", "--dp", "2", "--enable-dp-attention"),
}


def ask(client: Client, prompts: list[list[int]], patterns: list[str], **more: Any) -> list[Any]:
    """Return tokens and log-probabilities, of prompts too, to prompts of one request.

    All go to one replica: who arrives where decides with whom a prompt shares a forward, and sums
    of float32 are rounded by a forward's rows.
    """
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 6}
    replies = client.generate(
        input_ids=prompts,
        sampling_params=[sampling | named(pattern) for pattern in patterns],
        return_logprob=True,
        logprob_start_len=0,
        **({"routed_dp_rank": 0} if client.dp_size > 1 else {}),  # type: ignore[attr-defined]
        **more,
    )
    return [
        [reply["meta_info"][f"{side}_token_logprobs"] for side in ("input", "output")]
        for reply in replies
    ]


def alone(client: Client) -> Any:
    """Prompts from one token on, in one chunk and in several."""
    lengths = (1, 65, CHUNK + 1, 1201)
    return [
        ask(client, [prompt(length, 5)], [PATTERNS[n % len(PATTERNS)]])
        for n, length in enumerate(lengths)
    ]


def needle_prompts() -> list[list[int]]:
    """Return four long prompts, the fact that is asked for at the very start of each."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    facts = [("river", "stone"), ("window", "paper"), ("garden", "metal"), ("letter", "glass")]
    text = haystack()
    texts = [
        f"\n# {name} is {value}\n{text[n * 3000 : (n + 1) * 3000]}\n? {name} is"
        for n, (name, value) in enumerate(facts)
    ]
    prompts = [ids[:600] + ids[-500:] for ids in tokenizer(texts)["input_ids"]]
    assert [len(ids) for ids in prompts] == [1100] * len(facts)
    return prompts


def needles(client: Client) -> Any:
    """Four of them in flight."""
    return ask(client, needle_prompts(), [PATTERNS[0]] * 4)


def mixed(client: Client) -> Any:
    """Several patterns in a forward."""
    prompts = [prompt(length, 6) for length in (900, 411, 70, 630)]
    return ask(client, prompts, list(PATTERNS))


def behind_a_prefix(client: Client) -> Any:
    """A prompt whose beginning is cached, and again when all but its end is."""
    ids = prompt(1300, 7)
    return [ask(client, [ids[:length]], [PATTERNS[1]]) for length in (700, 1300, 1300)]


CASES: dict[str, Callable[[Client], Any]] = {
    case.__name__: case for case in (alone, needles, mixed, behind_a_prefix)
}


IN_FLIGHT = (needles.__name__, mixed.__name__)
"""Cases of which prompts share forwards as they arrive, which rounds sums of float32 otherwise."""
IN_A_REPLICA = (alone.__name__, *IN_FLIGHT)
"""Cases that two replicas are asked as well; a cached prefix is each replica's own."""


def check_alike(split: list[Any], whole: list[Any]) -> None:
    """Hold answers against each other: the same tokens, and log-probabilities to rounding."""
    for mine, theirs in zip(split, whole, strict=True):
        for ours, others in zip(mine, theirs, strict=True):
            assert [entry[1] for entry in ours] == [entry[1] for entry in others]
            measured, expected = (
                torch.tensor([entry[0] for entry in side if entry[0] is not None])
                for side in (ours, others)
            )
            torch.testing.assert_close(measured, expected, rtol=0, atol=1e-3)


def check_shares(client: Client) -> None:
    """Each rank scored its share of a prompt's rows, to within a block, and the others the rest."""
    length, full = 1500, len(Pattern(PATTERNS[1]).full_layers)
    client.flush_cache()
    before = client.states()
    ask(client, [prompt(length, 11)], [PATTERNS[1]])
    [(old, new)] = [
        states
        for states in zip(before, client.states(), strict=True)
        if states[1].forwards > states[0].forwards
    ]
    chunk, ranks = client.server_info()["chunked_prefill_size"], len(new.scored_rows)
    expected = [0] * ranks
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        split = RowSplit.balanced([end - start], [end], ranks, free=TOPK)
        pays = split.pays(TOPK, ON_CPU, TOPK)
        expected = [
            rows + (high - low if pays else end - start)
            for rows, (low, high) in zip(expected, pairwise(split.bounds), strict=True)
        ]
    scored = [b - a for a, b in zip(old.scored_rows, new.scored_rows, strict=True)]
    assert new.selected_rows - old.selected_rows == full * length
    for rows, share in zip(scored, expected, strict=True):
        assert abs(rows - full * share) <= full * ROW_BLOCK * (length // chunk + 1)


@pytest.mark.parametrize("name", RANKS)
def test_split_rows_are_the_same_to_the_bit(serve: Serve, name: str) -> None:
    ranks, answers, states = RANKS[name], dict[str, Any](), dict[str, list[RankState]]()
    cases = IN_A_REPLICA if "--dp" in ranks else tuple(CASES)
    for setting in ("off", "on"):
        flags = (*ARGUMENTS, *ranks, "--indexcache-split-rows", setting)
        with serve(TINY, *flags, **FOUR_RANKS) as client:
            client.dp_size = client.server_info()["dp_size"]
            answers[setting] = {case: CASES[case](client) for case in cases}
            states[setting] = client.states()
            if setting == "on":
                check_shares(client)
    for case in cases:
        if case in IN_FLIGHT:
            check_alike(answers["on"][case], answers["off"][case])
        else:
            assert answers["on"][case] == answers["off"][case], case
    oracle = Oracle(TINY, torch.float32)
    for ids, (read, _) in zip(needle_prompts(), answers["on"]["needles"], strict=True):
        expected = oracle.answer(ids, Pattern(PATTERNS[0])).logprobs
        measured = torch.tensor([entry[0] for entry in read[1:]])
        torch.testing.assert_close(measured, expected, rtol=0, atol=1e-3)
    assert all(state.scored_rows == () for state in states["off"])
    assert all(max(state.scored_rows) < 0.9 * state.selected_rows for state in states["on"])
