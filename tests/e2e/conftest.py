"""Real SGLang servers over HTTP; the shared ones are shared, for a start takes its seconds."""

from __future__ import annotations

import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.pattern import Pattern
from tests.fixtures.models import make_model
from tests.oracle import Oracle
from tests.preloaded import PreloadedServer

VOCAB = 512
"""Tokens that the small checkpoints know (``tests/conftest.py``)."""

torch.set_num_threads(1)  # the oracle is small; the cores are the servers'

# Two servers, or two ranks, run at once. With as many threads each as there are cores they would
# spend their time waiting for each other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = pytest.mark.skipif(
        torch.accelerator.is_available(), reason="these serve on the CPU platform: no GPU wanted"
    )
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(on_gpu)
            # What a refused start prints needs no machine of its own, as a server does.
            if item.path.name != "test_errors.py":
                item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def glm(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["glm-5"]


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with index keys of 192 entries, all of them rotated, which no GPU's pages hold."""
    folder = tmp_path_factory.mktemp("wide")
    fields = {"index_head_dim": 192, "qk_rope_head_dim": 192}
    make_model(folder, size="tiny", vocab_size=VOCAB, dtype="float32", fields=fields)
    return folder


Serve = Callable[..., Any]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """``with serve(model, "--flag", ...) as client``: a server for the block's duration."""
    logs = tmp_path_factory.mktemp("logs")
    count = iter(range(1000))

    @contextmanager
    def start(model: Path, *arguments: str, **environment: str) -> Iterator[Client]:
        command = ["--model-path", str(model), "--attention-backend", "indexcache", *arguments]
        command += ["--skip-server-warmup"]  # a test's first request warms it as well
        log = logs / f"{next(count)}.log"
        with PreloadedServer(command, log, late=environment) as server:
            client = server.wait_until_ready()
            client.server = server  # type: ignore[attr-defined]
            try:
                yield client
            except BaseException:
                print(server.log_tail(60))
                raise
            finally:
                server.stop(grace=0)  # the polite way takes seconds

    return start


@pytest.fixture(scope="session")
def live(glm: Path, serve: Serve) -> Iterator[Client]:
    """A server in live mode that several modules share; each sets the pattern that it wants."""
    arguments = ["--indexcache-mode", "live", "--dtype", "float32", "--max-total-tokens", "16384"]
    arguments += ["--chunked-prefill-size", "128", "--page-size", "64", "--enable-metrics"]
    with serve(glm, *arguments) as client:
        yield client


def prompt(length: int, seed: int) -> list[int]:
    """Return a reproducible random prompt of token ids, without the special tokens."""
    generator = random.Random(f"{length}/{seed}")
    return [generator.randrange(10, VOCAB) for _ in range(length)]


ROUNDING = 1e-6
"""Relative gap of index scores below which float32 rounding can decide a selection."""


def decided_prompt(oracle: Oracle, length: int, *patterns: Pattern, seed: int = 0) -> list[int]:
    """Return a prompt in which no selection hangs on rounding, under any of ``patterns``."""
    for candidate in range(seed, seed + 60):
        ids = prompt(length, candidate)
        if all(oracle.answer(ids, pattern).margin > ROUNDING for pattern in patterns):
            return ids
    raise AssertionError(f"every prompt of {length} tokens has a near-tie")


def is_greedy(
    oracle: Oracle, ids: list[int], tokens: list[int], pattern: Pattern, tie: float = ROUNDING
) -> bool:
    """Hold an answer against the oracle's greedy tokens; False if a near-tie decided any.

    Raises:
        AssertionError: it is another, and no tie is why.
    """
    expected, gap = oracle.greedy_behind(ids, tokens, pattern)
    assert gap < tie or tokens == expected
    return gap >= tie


FLOAT32_ROUNDING = 1e-6
"""Relative, of what is quantised: sums in another order differ by as much."""


def steady_prompt(oracle: Oracle, length: int, pattern: Pattern) -> tuple[list[int], torch.Tensor]:
    """A decided prompt in which no selection hangs on a step of e4m3 either, and its answer."""
    for seed in range(0, 600, 20):
        ids = decided_prompt(oracle, length, pattern, seed=seed)
        expected = oracle.answer(ids, pattern).logprobs
        with _noise(oracle):
            nudged = [oracle.answer(ids, pattern).logprobs for _ in range(6)]
        if all(torch.allclose(logprobs, expected, rtol=0, atol=1e-4) for logprobs in nudged):
            return ids, expected
    raise AssertionError(f"every prompt of {length} tokens hangs on a step of e4m3")


@contextmanager
def _noise(oracle: Oracle) -> Iterator[None]:
    oracle.noise = FLOAT32_ROUNDING
    torch.manual_seed(0)
    yield
    oracle.noise = 0.0


def logprobs(client: Client, ids: list[int]) -> torch.Tensor:
    """Teacher-forced log-probabilities of every token but the first."""
    return batch_logprobs(client, [ids])[0]


def batch_logprobs(client: Client, prompts: list[list[int]], start: int = 0) -> list[torch.Tensor]:
    """Return the same for several prompts sent as one request, for the tokens behind ``start``."""
    replies = client.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=start,
    )
    return [
        torch.tensor([entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]])
        for reply in replies
    ]


def greedy(client: Client, ids: list[int], count: int, **sampling: Any) -> list[int]:
    """Return ``count`` greedy tokens."""
    greedily = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    reply = client.generate(input_ids=ids, sampling_params=greedily | sampling)
    return list(reply["output_ids"])


def check_metrics(client: Client) -> None:
    """The sums at ``/metrics`` over all ranks are what their layers counted.

    SGLang's schedulers export when they become idle, and every 30 seconds from then on.
    """
    states = client.states()
    counts: dict[str, float] = {
        "tokens": sum(sum(state.tokens.values()) for state in states),
        "pairs": sum(sum(state.pairs.values()) for state in states),
        "forwards": sum(state.forwards for state in states),
        "layer_runs": sum(sum(s.indexer_selections) + sum(s.index_reuses) for s in states),
        "switches": sum(state.switches for state in states),
        "rejections": sum(sum(state.rejections.values()) for state in states),
    }
    deadline = time.monotonic() + 60
    while (exported := _choose(counts, scraped(client))) != counts and time.monotonic() < deadline:
        time.sleep(1)
    assert exported == counts


def _choose(names: Iterable[str], values: dict[str, float]) -> dict[str, float]:
    return {name: values[name] for name in names}


def scraped(client: Client) -> dict[str, float]:
    """Return the sum of each of our counters over its series."""
    with urlopen(f"{client.url}/metrics") as answer:
        text = answer.read().decode()
    sums: dict[str, float] = defaultdict(float)
    for name, value in re.findall(r"^sglang_indexcache_(\w+)_total\{.*\} (\S+)$", text, re.M):
        sums[name] += float(value)
    return sums
