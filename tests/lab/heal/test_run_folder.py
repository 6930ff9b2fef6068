"""A run's folder after its command was killed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from sglang_indexcache.errors import OutputError, TrainingError
from sglang_indexcache.lab.heal.run_folder import (
    METRICS,
    OPTIONS,
    STATE,
    HealRun,
    Position,
    RunLog,
    State,
    read_metrics,
)
from tests.full_disk import files_of_at_most


def run_in(folder: Path) -> HealRun:
    return HealRun(folder / "adapter", Console(file=io.StringIO(), width=500))


def refusal(run: HealRun) -> str:
    return run.log.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_two_commands_in_one_folder_are_refused(tmp_path: Path) -> None:
    with (
        run_in(tmp_path).claimed({"steps": 3}),
        pytest.raises(TrainingError, match="is in use by another healing"),
        run_in(tmp_path).claimed({"steps": 3}),
    ):
        pass
    with run_in(tmp_path).claimed({"steps": 3}):
        pass


def test_a_state_whose_options_are_gone_is_nobodys(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with run.claimed({"steps": 3}):
        run.save(State(Position(0, 1)))
    (run.folder / OPTIONS).unlink()
    with pytest.raises(TrainingError, match=r"a state and no options.json"), run.claimed({}):
        pass


@pytest.mark.parametrize("damage", [b"", b"half a zip", None])
def test_a_state_that_cannot_be_read_is_told(tmp_path: Path, damage: bytes | None) -> None:
    run = run_in(tmp_path)
    run.save(State(Position(0, 1)))
    path = run.folder / STATE
    if damage is None:
        torch.save({"position": (0, 1), "of another version": 1}, path)
    else:
        path.write_bytes(damage)
    with pytest.raises(TrainingError, match=r"state.pt is damaged, or another version's"):
        run.load()


def test_a_log_that_is_gone_is_told(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.save(State(Position(0, 1)))
    state = run.load()
    assert state is not None
    assert state.position == Position(0, 1)
    assert "metrics.jsonl is gone" in refusal(run)


def test_a_full_disk_keeps_the_state_and_half_a_line_of_the_log_is_mended(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    weights = torch.zeros(1000)
    run.save(State(Position(0, 1), {"w": weights}))
    run.log.record(stage=0, step=1)
    with files_of_at_most(1000):
        with pytest.raises(OutputError, match=r"cannot write \S*state.pt"):
            run.save(State(Position(0, 2), {"w": weights}))
        with pytest.raises(OutputError, match=r"cannot write \S*metrics.jsonl"):
            run.log.record(stage=0, step=2, losses=[0.5] * 999)
    assert len((run.folder / METRICS).read_bytes()) == 1000  # half a line
    assert not list(run.folder.glob(".*"))
    state = run.load()
    assert state is not None
    assert state.position == Position(0, 1)
    assert [line["step"] for line in read_metrics(run.folder)] == [1]


def test_a_kill_while_the_log_is_rewound_loses_no_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = RunLog(tmp_path, Console(file=io.StringIO()))
    for step in (1, 2, 3):
        log.record(stage=0, step=step)
    before = (tmp_path / METRICS).read_text()

    def killed(path: Path, text: str, **_: object) -> int:
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            log.rewind(Position(0, 2))
    assert (tmp_path / METRICS).read_text() == before
    log.rewind(Position(0, 2))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
