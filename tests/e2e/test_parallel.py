"""Several ranks on one machine: tensor, data-parallel attention and pipeline parallelism."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import Server
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.client_rules import check_obeyed
from tests.e2e.conftest import (
    Serve,
    batch_logprobs,
    check_metrics,
    decided_prompt,
    greedy,
    is_greedy,
    logprobs,
    prompt,
    scraped,
)
from tests.oracle import Oracle
from tests.signals import group_members

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
FOUR_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}
PATTERN = Pattern("FFSSFS")
SMALL_POOL = ("--dtype", "float32", "--max-total-tokens", "8192")


@pytest.fixture(scope="module")
def oracle(glm: Path) -> Oracle:
    return Oracle(glm, torch.float32)


def check(client: Client, oracle: Oracle, pattern: Pattern, lengths: tuple[int, ...]) -> None:
    """Prompts one by one, all at once, and greedy tokens, against the oracle."""
    prompts = [decided_prompt(oracle, length, pattern, seed=700) for length in lengths]
    expected = [oracle.answer(ids, pattern).logprobs for ids in prompts]
    for ids, answer in zip(prompts, expected, strict=True):
        torch.testing.assert_close(logprobs(client, ids), answer, rtol=0, atol=1e-3)
    client.flush_cache()
    for measured, answer in zip(batch_logprobs(client, prompts), expected, strict=True):
        torch.testing.assert_close(measured, answer, rtol=0, atol=1e-3)
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda ids: greedy(client, ids, 16), prompts))
    for ids, tokens in zip(prompts, replies, strict=True):
        is_greedy(oracle, ids, tokens, pattern)


@pytest.fixture(scope="class")
def dp_attention(glm: Path, serve: Serve) -> Iterator[Client]:
    arguments = ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--indexcache-mode", "live"]
    arguments += ["--enable-metrics"]
    with serve(glm, *SMALL_POOL, *arguments, **TWO_RANKS) as client:
        yield client


class TestDpAttention:
    """Class of tests whose server ends before others start: idle ranks keep each other busy."""

    @pytest.mark.parametrize("text", ["FFFFFF", "FFSSFS", "FSSSFS"])
    def test_agrees_with_the_oracle(self, dp_attention: Client, oracle: Oracle, text: str) -> None:
        """One prompt leaves the other rank idle; four of unequal lengths give unequal batches.

        An idle rank is padded only while the other decodes; of a prefill its layers see nothing.
        """
        for state in dp_attention.switch_pattern(text):
            assert state.pattern == text
        check(dp_attention, oracle, Pattern(text), (1, 300, 66, 129))
        greedy(dp_attention, prompt(20, 701), 4)
        assert sum(state.idle_forwards for state in dp_attention.states()) > 0

    def test_ranks_count_their_own_work(self, dp_attention: Client) -> None:
        before = dp_attention.switch_pattern(str(PATTERN))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: greedy(dp_attention, prompt(90, seed), 8), range(4)))
        after = dp_attention.states()
        assert len(after) == 2
        check_obeyed(before, after, [str(PATTERN)], "it", alone=True)
        rows = [[state.rows.get(str(PATTERN), 0) for state in states] for states in (before, after)]
        assert all(new > old for old, new in zip(*rows, strict=True))

    def test_scrapes_while_patterns_switch(self, dp_attention: Client) -> None:
        """None fails, no counter falls, and in the end one pattern is in effect."""
        scrapes, is_over = [scraped(dp_attention)], threading.Event()

        def scrape() -> None:
            while not is_over.is_set():
                scrapes.append(scraped(dp_attention))

        with ThreadPoolExecutor(5) as pool:
            scraping = pool.submit(scrape)
            for number in range(6):
                answers = [pool.submit(greedy, dp_attention, prompt(80, n), 4) for n in range(4)]
                dp_attention.switch_pattern(("FSSSFS", "FFFFFF", "FSFSFS")[number % 3])
                wait(answers)
            is_over.set()
        scraping.result()
        assert len(scrapes) > 6
        for earlier, later in pairwise(scrapes):
            assert all(later[name] >= count for name, count in earlier.items())
        check_metrics(dp_attention)
        with urlopen(f"{dp_attention.url}/metrics") as answer:
            info = re.findall(r'_info\{.*pattern="(\w+)".* 1\.0$', answer.read().decode(), re.M)
        assert set(info) == {"FSFSFS"}

    def test_switches_all_ranks_or_none(self, dp_attention: Client) -> None:
        dp_attention.switch_pattern("FSFSFS")
        with pytest.raises(ServerError, match="5 characters"):
            dp_attention.switch_pattern("FSSSS")
        assert [state.pattern for state in dp_attention.states()] == ["FSFSFS"] * 2
        greedy(dp_attention, prompt(50, 1), 2)
        check_metrics(dp_attention)

    def test_a_killed_rank_ends_the_server(self, dp_attention: Client) -> None:
        """It is killed while both decode. This test is the class's last: the server is gone."""
        server: Server = dp_attention.server  # type: ignore[attr-defined]
        chunks = dp_attention.stream(
            input_ids=[prompt(100, seed) for seed in range(2)],  # one a rank
            sampling_params={"max_new_tokens": 4000, "ignore_eos": True},
        )
        indices = set[int]()
        while len(indices) < 2:
            indices.add(next(chunks)["index"])
        _, victim = schedulers(server.pid)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(ServerError):
            deque(chunks, maxlen=0)
        server.wait(60)
        assert schedulers(server.pid) == []


def schedulers(group: int) -> list[int]:
    """Process ids of a server's ranks."""
    members = group_members(group)
    return sorted(p for p in members if b"scheduler" in Path(f"/proc/{p}/cmdline").read_bytes())


class TestAttentionInParallel:
    """Two ranks of data-parallel attention of two tensor-parallel ranks each.

    SGLang pads every prefill to an even number of rows, which all odd lengths here need.
    """

    LENGTHS = (301, 67, 1, 215, 93)
    ARGUMENTS = ("--tp", "4", "--dp", "2", "--enable-dp-attention", "--chunked-prefill-size", "256")

    @pytest.mark.parametrize(
        ("mode", "texts"),
        [("static", [str(PATTERN)]), ("live", ["FFSSFS", "FSSSFS", "FFFFFF", "FSFSSS"])],
    )
    def test_agrees_with_the_oracle(
        self, glm: Path, serve: Serve, oracle: Oracle, mode: str, texts: list[str]
    ) -> None:
        """Alone and all at once, each request under its own pattern."""
        patterns_of = [texts[number % len(texts)] for number in range(len(self.LENGTHS))]
        prompts = [
            decided_prompt(oracle, length, Pattern(text), seed=800)
            for length, text in zip(self.LENGTHS, patterns_of, strict=True)
        ]
        pattern = ["--indexcache-pattern", texts[0], "--indexcache-mode", mode]
        with serve(glm, *SMALL_POOL, *self.ARGUMENTS, *pattern, **FOUR_RANKS) as client:

            def ask(ids: list[int], text: str) -> list[int]:
                return greedy(client, ids, 4, custom_params={"indexcache_pattern": text})

            alone = list(map(ask, prompts, patterns_of))
            client.flush_cache()
            with ThreadPoolExecutor(len(prompts)) as pool:
                together = list(pool.map(ask, prompts, patterns_of))
            states = client.states()
        assert together == alone
        for ids, tokens, text in zip(prompts, together, patterns_of, strict=True):
            is_greedy(oracle, ids, tokens, Pattern(text))
        assert all(state.mixed_forwards > 0 for state in states) == (mode == "live")
        assert [state.rank for state in states] == [0, 1]
        assert [s.index_k_bytes_per_token for s in states] == [
            512 * (3 if mode == "static" else 6)
        ] * 2


def test_tensor_parallel(wide: Path, serve: Serve) -> None:
    """The server is in static mode, and has index keys of 192 entries."""
    arguments = ["--tp", "2", "--indexcache-pattern", str(PATTERN)]
    with serve(wide, *SMALL_POOL, *arguments, **TWO_RANKS) as client:
        check(client, Oracle(wide, torch.float32), PATTERN, (1, 300, 66))
        [state] = client.states()
        assert state.index_k_bytes_per_token == 3 * 192 * 4


def test_pipeline_whose_second_stage_starts_on_a_shared_layer(
    glm: Path, serve: Serve, oracle: Oracle
) -> None:
    assert not PATTERN.is_full(3)  # six layers, three a stage
    arguments = ["--pp-size", "2", "--indexcache-pattern", str(PATTERN)]
    with serve(glm, *SMALL_POOL, *arguments, **TWO_RANKS) as client:
        check(client, oracle, PATTERN, (1, 300, 66))


def test_pipeline_in_live_mode_wants_full_layers_at_stage_starts(
    glm: Path, serve: Serve, oracle: Oracle
) -> None:
    """Built with every indexer, SGLang ships no indices from stage to stage."""
    arguments = ["--pp-size", "2", "--indexcache-mode", "live"]
    with serve(glm, *SMALL_POOL, *arguments, **TWO_RANKS) as client:
        with pytest.raises(ServerError, match="pipeline stages start at layer 3, where"):
            client.switch_pattern(str(PATTERN))
        allowed = Pattern("FSSFSS")
        client.switch_pattern(str(allowed))
        check(client, oracle, allowed, (1, 300, 66))
