import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.calibration import Score
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.lab.search.recall import TEXT
from sglang_indexcache.lab.search.setup import Setup
from sglang_indexcache.pattern import Pattern
from tests.cli.test_search import TINY
from tests.fixtures.landscape import SyntheticEvaluator
from tests.lab.search.helpers import made_up


def test_a_server_of_another_model_is_refused() -> None:
    with pytest.raises(SearchError, match="these are two models"):
        made_up(SyntheticEvaluator(8)).identity(SyntheticEvaluator(9))


def test_any_folder_gives_patterns_a_name(tmp_path: Path) -> None:
    for folder, name in (
        ("my model", "my-model"),
        ("_GLM+lora@v2", "GLM-lora-v2"),
        ("日本", "model"),
    ):
        shutil.copytree(TINY, tmp_path / folder)
        setup = Setup.read(tmp_path / folder, context=256, batches=1, score=Score.ALL)
        assert setup.name == name


@pytest.mark.parametrize(("context", "length"), [(None, 512), (256, 256)])
def test_the_context_gives_queries_a_choice(context: int | None, length: int) -> None:
    """The checkpoint selects 64 tokens."""
    calibration = Setup.read(TINY, context=context, batches=1, score=Score.ALL).calibration
    assert {len(ids) for ids in calibration.sequences} == {length}
    [kinds] = calibration.kinds
    assert kinds.tolist() == [0] * 64 + [TEXT] * (length - 65)


def test_a_short_context_is_said_and_counted_from_where_it_matters() -> None:
    setup = Setup.read(TINY, context=200, batches=1, score=Score.ALL)
    assert "short for a model whose queries select 64" in dict(setup.rows)["advice"]
    everything = replace(setup.calibration, kinds=())
    evaluator = TransformersEvaluator(TINY, everything)
    all_full, shared = Pattern.full(12), Pattern("F" + 11 * "S")
    [mine] = evaluator.token_losses(all_full, [0])
    [theirs] = evaluator.token_losses(shared, [0])
    assert np.abs(theirs - mine)[:64].max() < 1e-5 < np.abs(theirs - mine)[64:].max()
    evaluator = TransformersEvaluator(TINY, setup.calibration)
    assert evaluator.loss(shared, [0]).mean() == pytest.approx(theirs[64:].mean())
    assert "more than 64 tokens" in setup.identity(evaluator)["counted"]
    assert "(--score recall)" in dict(setup.rows)["recall"]
    setup = Setup.read(TINY, context=200, batches=1, score=Score.LATE)
    evaluator = TransformersEvaluator(TINY, setup.calibration)
    assert evaluator.loss(shared, [0]).mean() == pytest.approx(theirs[99:].mean())
    assert "later half" in setup.identity(evaluator)["counted"]
    assert not {"advice", "recall"} & dict(Setup.read(TINY, context=256, batches=1).rows).keys()
