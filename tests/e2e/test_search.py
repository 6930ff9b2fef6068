"""The search on a real server: its losses are transformers', its answer serves as it said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.pool import Pool
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators import ServedEvaluator
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.lab.search.methods import METHODS
from sglang_indexcache.lab.search.rules import Constraints, parse_targets
from sglang_indexcache.lab.search.run import Search
from sglang_indexcache.lab.search.session import run_search
from sglang_indexcache.lab.search.setup import Setup
from sglang_indexcache.library.files import load_entry
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.pattern import Pattern
from tests.e2e.conftest import Serve, prompt
from tests.e2e.test_parity import decided_prompt
from tests.oracle import Oracle

PATTERNS = ["FFFFFF", "FSFSFS", "FSSSFS", "FFSSFS"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the user's own pattern folder, as the server knows it."""
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def live(glm: Path, serve: Serve, library: Path) -> Iterator[Client]:
    arguments = ("--dtype", "float32", "--indexcache-mode", "live")
    with serve(glm, *arguments, SGLANG_INDEXCACHE_LIBRARY=str(library)) as client:
        yield client


def test_served_losses_are_transformers(live: Client, glm: Path) -> None:
    import torch

    oracle = Oracle(glm, torch.float32, first_of_ties=False)
    ids = [decided_prompt(oracle, 200 + i, Pattern("FSSSFS"))[:200] for i in range(4)]
    data = Calibration(tuple(map(tuple, ids)), "test")
    remote, local = ServedEvaluator(Pool([live]), data), TransformersEvaluator(glm, data)
    assert remote.batch_tokens == local.batch_tokens == (200,) * 4
    for text in PATTERNS:
        ours = remote.loss(Pattern(text), range(4))
        theirs = local.loss(Pattern(text), range(4))
        assert ours == pytest.approx(theirs, abs=1e-3)
        assert live.states()[0].pattern == "FFFFFF"  # what others get is as it was


def test_served_changes_are_transformers(live: Client, glm: Path) -> None:
    """The divergence over the likeliest tokens is no more than the whole, and most of it."""
    import torch

    oracle = Oracle(glm, torch.float32, first_of_ties=False)
    ids = [decided_prompt(oracle, 300 + i, Pattern("FSSSFS"))[:200] for i in range(2)]
    data = Calibration(tuple(map(tuple, ids)), "test")
    remote, local = ServedEvaluator(Pool([live]), data), TransformersEvaluator(glm, data)
    for text in ("FFFFFF", "FSSSFS"):
        for mine, its in zip(
            remote.changes(Pattern(text), [0, 1]), local.changes(Pattern(text), [0, 1]), strict=True
        ):
            assert mine.loss == pytest.approx(its.loss, abs=1e-3)
            assert (mine.kl <= its.kl + 1e-3).all()
            assert (mine.kept == its.kept).mean() > 0.95
            assert (mine.right == its.right).mean() > 0.95


def test_a_repeated_evaluation_uses_no_cache(live: Client) -> None:
    """The same sequences again, and sequences that share a prefix."""
    shared = prompt(128, 1)
    data = Calibration(tuple(tuple(shared + prompt(72, i)) for i in range(3)), "test")
    evaluator = ServedEvaluator(Pool([live]), data)
    pattern = Pattern("FSFSFS")
    first = evaluator.loss(pattern, [0, 1, 2])
    assert evaluator.loss(pattern, [2, 0, 1]) == pytest.approx(first[[2, 0, 1]], abs=1e-5)


def search_into(folder: Path, glm: Path, live: Client, **load: Any) -> Search:
    setup = replace(Setup.read(glm, context=160, batches=4), name="e2e")
    evaluator = ServedEvaluator(Pool([live], **load), setup.calibration)
    rules = Constraints.make(setup.checkpoint.own)
    goals = parse_targets(["1/2", "2"], rules)
    return run_search(setup, evaluator, goals, METHODS["greedy"], folder)


def test_a_search_over_http(live: Client, glm: Path, library: Path) -> None:
    search = search_into(library, glm, live)
    assert search.is_complete
    entry = load_entry(library / "e2e-1of2.yaml")
    assert entry.full_layers == 3
    # What the search reported is what the server gives under the pattern. Its name is new there,
    # for a server reads its library once; a file is sent by its letters.
    state = live.switch_pattern(
        str(Library.default().resolve(str(library / "e2e-1of2.yaml")).pattern)
    )[0]
    assert state.pattern == entry.pattern
    setup = Setup.read(glm, context=160, batches=4)
    assert entry.method.details["checkpoint"] == setup.digest
    evaluator = ServedEvaluator(Pool([live]), setup.calibration)
    losses = evaluator.loss(Pattern(entry.pattern), range(4))
    assert losses.mean() == pytest.approx(search.found[3].loss, abs=1e-4)
