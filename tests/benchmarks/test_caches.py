"""Files that studies make once and keep: several at once, one that fails, one that is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import random_model
from benchmarks.paper import table_3
from benchmarks.random_model import make_model
from benchmarks.smollm2.books import Books
from benchmarks.smollm2.domains import Texts
from benchmarks.smollm2.packages import fetch
from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.runs.identity import locked

SLOW = "import time; file = open('text', 'w'); time.sleep(0.2); file.write('whole')"
STUDY = """
import sys, time
from pathlib import Path
from benchmarks.smollm2.workers import each, one_thread
from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.runs.identity import locked

one_thread()
with locked(Path(sys.argv[1]), "study", QualityError):
    for _ in each(lambda _: print("working", flush=True) or time.sleep(60), range(2)):
        pass
"""


def test_two_studies_that_want_the_same_file_both_get_it(tmp_path: Path) -> None:
    def read(_: int) -> str:
        return fetch([sys.executable, "-c", SLOW], tmp_path / "cache" / "name==1").read_text()

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(read, range(3))] == ["whole"] * 3
    assert [path.name for path in (tmp_path / "cache").glob("[!.]*")] == ["name==1"]


@pytest.mark.parametrize("failing", ["raise SystemExit(1)", SLOW + "; raise KeyboardInterrupt"])
def test_nothing_is_taken_from_a_download_that_fails(failing: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot download name==1: see"):
        fetch([sys.executable, "-c", failing], tmp_path / "name==1")
    assert not [*tmp_path.glob("[!.]*")]
    assert fetch([sys.executable, "-c", SLOW], tmp_path / "name==1").read_text() == "whole"


def test_tokens_that_were_half_written_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(text: str, **_: Any) -> Namespace:
        return Namespace(input_ids=[ord(letter) for letter in text])

    def killed(_: torch.Tensor, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Books, "text", lambda *_: "words")
    monkeypatch.setattr(Texts, "text", lambda *_: "words")
    with monkeypatch.context() as at_once:
        at_once.setattr(torch, "save", killed)
        for study in (lambda: Books(tmp_path, tokens).tokens("mypy"),
                      lambda: Texts(tmp_path, tokens).tokens("play", measured=True)):  # fmt: skip
            with pytest.raises(KeyboardInterrupt):
                study()
    assert Books(tmp_path, tokens).tokens("mypy").tolist() == [*b"words"]
    assert Texts(tmp_path, tokens).tokens("play", measured=True).tolist() == [*b"rds"]


def test_workers_of_a_killed_study_end_and_its_files_are_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUDY, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as study:
        assert study.stdout is not None
        assert study.stdout.readline() == b"working\n"
        study.kill()
    for _ in range(100):
        with suppress(QualityError), locked(tmp_path / "lock", "study", QualityError):
            return
        time.sleep(0.1)
    pytest.fail("workers of the killed study live on, and hold what it had open")


def test_a_checkpoint_has_a_config_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def make(seed: int) -> None:
        make_model(tmp_path, size="tiny", vocab_size=300, seed=seed)

    with monkeypatch.context() as early:
        early.setattr(random_model.PreTrainedTokenizerFast, "save_pretrained", stopped)
        with pytest.raises(KeyboardInterrupt):
            make(0)
    assert not (tmp_path / "config.json").exists()
    make(0)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as late:
        late.setattr(random_model, "write_whole", stopped)
        with pytest.raises(KeyboardInterrupt):
            make(1)
    assert not (tmp_path / "config.json").exists()
    make(0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written


def test_a_whole_table_3_takes_nothing_that_a_quick_one_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = list[tuple[Path, list[int]]]()

    class Untrained:
        def __init__(self, recipe: table_3.Recipe, folder: Path) -> None:
            self.recipe, self.folder = recipe, folder

        def run(self) -> None:
            trained.append((self.folder, [stage.steps for stage in self.recipe.stages]))
            (self.folder / "checkpoint").mkdir()
            (self.folder / "checkpoint" / "config.json").write_text("{}")

    scores = {"tasks": {task: {"per_row": [0.0]} for task in (table_3.TEXT, *table_3.RETRIEVAL)}}
    monkeypatch.setattr(table_3, "Trainer", Untrained)
    monkeypatch.setattr(table_3, "evaluated", lambda *_: scores)
    row = table_3.rows("1/2", "1/4")[1]
    for options in (["--quick"], [], ["--steps", "2"], []):
        table_3.run_row(row, 0, table_3.parse([*options, "--work", str(tmp_path)]))
    (quick, steps), (published, more) = trained
    assert quick != published
    assert steps == [2] * len(more) < more
