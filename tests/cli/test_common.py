"""Rules of all commands: output folders are tried first, and no error is a stack of frames."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.cli.common import Reporting, connect, writable
from sglang_indexcache.errors import OutputError, SettingsError
from sglang_indexcache.lab.runs import identity
from tests.cli.test_help import COMMANDS

WITH_OUTPUT = [
    name for name, command in COMMANDS.items() if any(p.name == "output" for p in command.params)
]


def unwritable(tmp_path: Path, kind: str) -> Path:
    """Return a place where no folder can be made, also for root."""
    file = tmp_path / "file"
    file.write_text("")
    return {"a file": file, "below a file": file / "sub", "no place": Path("/proc/nope")}[kind]


@pytest.mark.parametrize("kind", ["a file", "below a file", "no place"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, kind: str) -> None:
    folder = unwritable(tmp_path, kind)
    with pytest.raises(OutputError, match=f"cannot write to the folder {folder}"):
        writable(folder)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(identity, "NamedTemporaryFile", full)
    with pytest.raises(OutputError, match="No space left on device"):
        writable(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_trying_leaves_nothing_behind(tmp_path: Path) -> None:
    assert writable(tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "kept").write_text("")
    writable(tmp_path / "old")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["kept"]
    assert writable(None) is None


def test_trying_removes_no_folder_that_another_process_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(**options: Any) -> Any:
        (tmp_path / "new" / "folder").mkdir(parents=True, exist_ok=True)
        return NamedTemporaryFile(**options)

    monkeypatch.setattr(identity, "NamedTemporaryFile", meanwhile)
    writable(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize("name", WITH_OUTPUT)
def test_every_command_tries_its_output_first(name: str, tmp_path: Path) -> None:
    """Whatever else is given: nothing here names a model, a pattern or a server that exists."""
    folder = unwritable(tmp_path, "below a file")
    arguments = [*name.split(), "--output", str(folder)]
    for parameter in COMMANDS[name].params:
        if parameter.required and parameter.name != "output":
            flag = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
            arguments += [*flag, "nothing"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert "cannot write to the folder" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "rows.txt"), "rows.txt: No"),
        (OSError("a sentence of its own"), "a sentence of its own"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(error: OSError, sentence: str) -> None:
    failing = typer.Typer(cls=Reporting, pretty_exceptions_enable=False)

    @failing.callback()
    def group() -> None:
        """Stand for a group with one command."""

    @failing.command("fail")
    def fail() -> None:
        raise error

    result = CliRunner().invoke(failing, ["fail"])
    assert result.exit_code == 1
    assert result.output.startswith(f"indexcache: error: {sentence}")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("127.0.0.1:42003", "Did you mean http://127.0.0.1:42003?"),
        ("localhost:30000/v1", "Did you mean http://localhost:30000?"),
        ("http://host:1/v1/", "Did you mean http://host:1?"),
        ("https://host/proxy/v1", "Did you mean https://host/proxy?"),
        ("http://", "--url wants the address of a server"),
        ("ftp://host", "--url wants the address of a server"),
    ],
)
def test_an_address_that_is_none(url: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        connect([url], None)


def test_addresses_of_servers() -> None:
    urls = ["http://127.0.0.1:30000", "https://host/proxy/", "http://[::1]:30000"]
    assert [client.url for client in connect(urls, None)] == [url.rstrip("/") for url in urls]
