"""The search on a real server: its losses are transformers', its answer serves as it said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_indexcache.client import Client
from sglang_indexcache.library import load_entry
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.evaluators.served import ServedEvaluator
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.session import run_search
from sglang_indexcache.search.sources import Data, Served
from sglang_indexcache.search.targets import parse_targets
from tests.e2e.conftest import Serve, prompt
from tests.e2e.test_parity import decided_prompt
from tests.oracle import Oracle

PATTERNS = ["FFFFFF", "FSFSFS", "FSSSFS", "FFSSFS"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's own pattern folder, as the server knows it."""
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
    data = Calibration(tuple(map(tuple, ids)), 2, "test")
    served, local = ServedEvaluator(live, data), TransformersEvaluator(glm, data)
    assert served.batch_tokens == local.batch_tokens == (400, 400)
    for text in PATTERNS:
        ours = served.loss(Pattern(text), [0, 1]).values
        theirs = local.loss(Pattern(text), [0, 1]).values
        assert ours == pytest.approx(theirs, abs=1e-3)
        assert live.states()[0]["pattern"] == "FFFFFF"  # what others get is as it was


def test_a_repeated_evaluation_uses_no_cache(live: Client) -> None:
    """The same sequences again, and sequences that share a prefix."""
    shared = prompt(128, 1)
    data = Calibration(tuple(tuple(shared + prompt(72, i)) for i in range(3)), 1, "test")
    served = ServedEvaluator(live, data)
    pattern = Pattern("FSFSFS")
    first = served.loss(pattern, [0, 1, 2]).values
    assert served.loss(pattern, [2, 0, 1]).values == pytest.approx(first[[2, 0, 1]], abs=1e-5)


def test_a_search_over_http(live: Client, glm: Path, library: Path) -> None:
    source = Served(glm, Data(context=160, batches=4), (live,))
    with source.open() as setup:
        rules = Constraints.make(setup.checkpoint.own)
        goals = parse_targets(["1/2", "2"], rules)
        search = run_search(setup, rules, goals, Options(), library, "e2e")
    assert search.is_complete
    entry = load_entry(library / "e2e-1of2.yaml")
    assert entry.full_layers == 3
    assert entry.method.details["checkpoint"] == setup.identity["checkpoint"]
    # What the search reported is what the server gives when the pattern is served by name.
    state = live.switch_pattern("e2e-1of2")[0]
    assert state["pattern"] == entry.pattern
    with source.open() as again:
        served = again.evaluator.loss(Pattern(entry.pattern), range(4))
    assert served.mean == pytest.approx(entry.quality[0].score, abs=1e-4)


def test_a_static_server_is_refused(glm: Path, live: Client) -> None:
    from sglang_indexcache.errors import SearchError

    class Static:
        def states(self) -> list[dict[str, object]]:
            return [{**live.states()[0], "mode": "static"}]

    with pytest.raises(SearchError, match="--indexcache-mode live"):
        ServedEvaluator(Static(), Calibration(((1, 2),), 1, "test"))  # type: ignore[arg-type]


def test_an_engine_in_this_process(glm: Path) -> None:
    """Without a server: the same losses, and the engine's own reason when it refuses."""
    script = f"""
from pathlib import Path
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.in_process import InProcessEngine
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.evaluators.served import ServedEvaluator
from sglang_indexcache.errors import ServerError
from tests.e2e.conftest import prompt

if __name__ == "__main__":  # the engine starts its scheduler by spawning
    data = Calibration((tuple(prompt(60, 1)), tuple(prompt(60, 2))), 1, "test")
    expected = TransformersEvaluator(Path({str(glm)!r}), data).loss(Pattern("FSFSFS"), [0, 1])
    with InProcessEngine(model_path={str(glm)!r}, dtype="float32") as engine:
        found = ServedEvaluator(engine, data).loss(Pattern("FSFSFS"), [0, 1])
        assert abs(found.values - expected.values).max() < 1e-3, (found, expected)
        assert engine.states()[0]["pattern"] == "FFFFFF"
        try:
            engine.switch_pattern("FF")
        except ServerError as error:
            assert "2 characters and the model has 6" in str(error)
        else:
            raise AssertionError("a wrong pattern was accepted")
    print("passed")
"""
    path = glm.parent / "engine_script.py"
    path.write_text(script)
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.stdout.endswith("passed\n"), result.stderr[-3000:]
