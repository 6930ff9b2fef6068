"""A run's folder after its command was killed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from sglang_indexcache.heal.run_folder import METRICS, Position, RunLog, read_metrics


def test_a_kill_while_the_log_is_rewound_loses_no_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = RunLog(tmp_path, True, Console(file=io.StringIO()))
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
