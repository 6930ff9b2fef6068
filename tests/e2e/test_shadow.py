"""Shadow of a server of the small checkpoint: it says transformers' overlap, and moves no answer.

And the alert that is built on it: traffic of another kind than the pattern file's text fires it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import Overlaps
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.demo.run import Material
from sglang_indexcache.library import beyond_chance, load_entry, mean_known, set_overlap
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.overlap import OverlapCounter, by_layer, found_overlap
from tests.e2e.conftest import Serve, check_metrics, logprobs, scraped
from tests.promtool import alert, check_rules

PATTERN = Pattern("FSSSFSSSFSSS")
FLAGS = ("--dtype", "float32", "--max-total-tokens", "16384", "--indexcache-pattern")
CHUNKS = ("--chunked-prefill-size", "64", "--disable-radix-cache", "--enable-metrics")
"""A forward for every 64 rows, of which 16 are looked at."""
SHADOW = ("--indexcache-shadow", "1")
LIVE = ("--indexcache-mode", "live")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model() -> Path:
    return shipped_checkpoint()


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    return [list(question.prompt) for question in Material(model).questions(6, length=480)]


@pytest.fixture(scope="module")
def expected_overlap(model: Path, prompts: list[list[int]]) -> OverlapCounter:
    """Measure these prompts as ``search overlap`` does, in runs of the pattern."""
    sequences = tuple(map(tuple, prompts))
    evaluator = TransformersEvaluator(model, Calibration(sequences, 1, "test"))
    counter = OverlapCounter(len(PATTERN), evaluator.topk)
    for ids in sequences:
        counter.add(evaluator.selected(ids, PATTERN))
    return counter


def answers(client: Client, prompts: list[list[int]]) -> list[Any]:
    """Ask for each token's log-probability of every prompt, and 12 greedy tokens with theirs."""
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    replies = [
        client.generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
        for ids in prompts
    ]
    return [
        (logprobs(client, ids).tolist(), reply["meta_info"]["output_token_logprobs"])
        for ids, reply in zip(prompts, replies, strict=True)
    ]


@pytest.fixture(scope="module")
def plain(model: Path, serve: Serve, prompts: list[list[int]]) -> list[Any]:
    """Return the answers of a server without a shadow."""
    with serve(model, *FLAGS, str(PATTERN), *CHUNKS, *LIVE) as client:
        answered = answers(client, prompts)
        assert client.states()[0].overlap == Overlaps()
        return answered


class Texts:
    """Texts of two kinds: tables of numbers, and prose.

    Args:
        model: whose tokens.
    """

    def __init__(self, model: Path) -> None:
        self._tokens = AutoTokenizer.from_pretrained(model)

    def tables(self, count: int, length: int, seed: str) -> list[list[int]]:
        """Comma-separated values, all different ones."""
        draw = random.Random(seed)
        rows = [",".join(f"{draw.uniform(0, 1000):.3f}" for _ in range(8)) for _ in range(1000)]
        return self._cut("\n".join(rows), count, length)

    def prose(self, count: int, length: int) -> list[list[int]]:
        """Cut this project's licence into pieces that overlap."""
        return self._cut((REPOSITORY / "LICENSE").read_text(), count, length)

    def _cut(self, text: str, count: int, length: int) -> list[list[int]]:
        ids = self._tokens(text)["input_ids"]
        step = (len(ids) - length) // count
        return [ids[place * step : place * step + length] for place in range(count)]


@pytest.fixture(scope="module")
def texts(model: Path) -> Texts:
    return Texts(model)


@pytest.fixture(scope="module")
def pattern_file(model: Path, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the file of a search on tables, with their overlap as ``search overlap`` adds it."""
    shipped = (REPOSITORY / "patterns" / "tiny-dsa-1of4.yaml").read_text()
    path = tmp_path_factory.mktemp("patterns") / "on-tables.yaml"
    path.write_text(shipped.replace("\npattern: FFFSSSSSSSSS\n", f"\npattern: {PATTERN}\n"))
    assert load_entry(path).parsed == PATTERN
    sequences = tuple(map(tuple, texts.tables(6, 480, "reference")))
    evaluator = TransformersEvaluator(model, Calibration(sequences, 1, "test"))
    topk = evaluator.topk
    set_overlap(path, found_overlap(evaluator.selected, PATTERN, sequences, topk, "tables"))
    return path


@pytest.fixture(scope="module", params=["live", "static"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def watched(model: Path, serve: Serve, pattern_file: Path, mode: str) -> Iterator[Client]:
    arguments = (*FLAGS, str(pattern_file), *CHUNKS, *SHADOW, "--indexcache-mode", mode)
    with serve(model, *arguments) as client:
        yield client


def test_overlap_is_that_of_transformers_and_answers_keep_their_bits(
    watched: Client,
    prompts: list[list[int]],
    expected_overlap: OverlapCounter,
    plain: list[Any],
    mode: str,
) -> None:
    assert answers(watched, prompts) == plain
    overlap_state = watched.states()[0].overlap
    check_metrics(watched)
    expected = by_layer(expected_overlap.matrix(), PATTERN)
    layers = [
        layer for layer in range(1, len(PATTERN)) if PATTERN.is_full(layer) == (mode == "static")
    ]
    assert sorted(overlap_state.layers) == layers
    for layer in layers:
        rows, overlap, _, recall = overlap_state.layers[layer]
        assert rows > 1000
        share = expected[layer]
        assert share is not None
        # What follows from chance at most: as if each row's share were 0 or 1, and four of the
        # rows were one, as 16 of 64 are looked at.
        error = 2 * np.sqrt(share * (1 - share) / (rows / 4))
        print(f"layer {layer}: {overlap / rows:.4f} against {share:.4f} +- {error:.4f}")
        assert overlap / rows == pytest.approx(share, abs=error)
        if mode == "live":
            assert overlap / rows < recall / rows <= 1


@pytest.mark.parametrize("mode", ["live"], indirect=True)
def test_traffic_of_another_kind_fires_the_rule(
    watched: Client, texts: Texts, tmp_path: Path
) -> None:
    """Traffic of the same kind does not, be it twice as long, when lists have much less in common.

    What the server counted between two scrapes is told to Prometheus' own unit test as an hour's.
    """
    mean_overlap = mean_known(watched.states()[0].overlap.reference)
    assert mean_overlap is not None
    scrapes = [exported(watched)]
    for traffic in (
        texts.tables(8, 480, "traffic"),
        texts.tables(4, 960, "longer"),
        texts.prose(8, 480),
    ):
        watched.generate(input_ids=traffic, sampling_params={"max_new_tokens": 1})
        scrapes.append(exported(watched))
    series, plain_overlaps, shares = {}, [], []
    for kind, (before, after) in zip(("same", "longer", "prose"), pairwise(scrapes), strict=True):
        risen = {name: after[name] - before[name] for name in after}
        overlap, chance = (risen[name] / risen["overlap_rows"] for name in NAMES[1:3])
        plain_overlaps.append(overlap)
        shares.append(beyond_chance(overlap, chance) / mean_overlap)
        of = f'{{model_name="m", instance="{kind}"}}'
        series[f"sglang_indexcache_overlap_found{of}"] = f"{mean_overlap}x90"
        for name, step in risen.items():
            series[f"sglang_indexcache_{name}_total{of}"] = f"{before[name]}+{step / 60}x90"
    print(f"of {mean_overlap:.3f} beyond chance {shares}, overlaps {plain_overlaps}")
    unchanged, longer, prose = shares
    assert prose < 0.8 < min(unchanged, longer)
    assert unchanged == pytest.approx(1, abs=0.05)
    assert plain_overlaps[1] < 0.85 * plain_overlaps[0]  # which says nothing of the kind
    if shutil.which("promtool"):
        fires = {"model_name": "m", "instance": "prose", "severity": "warning"}
        check_rules(tmp_path, series, [alert("IndexCacheOverlapDrifts", 90, fires)])


NAMES = ("overlap_rows", "overlap", "overlap_chance", "overlap_forwards", "switches")


def exported(client: Client) -> dict[str, float]:
    """Read ``/metrics`` once all that was counted is there."""
    check_metrics(client)
    values = scraped(client)
    return {name: values[name] for name in NAMES}
