"""``indexcache server set``: whose files are read."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.client import Client
from sglang_indexcache.library import Library


@pytest.mark.parametrize("value", ["uniform:1/4", "glm-5-1of4"])
def test_what_is_no_file_is_the_servers_to_resolve(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(Client, "switch_pattern", lambda _, value: sent.append(value) or [])
    assert CliRunner().invoke(app, ["server", "set", value]).exit_code == 0
    assert sent == [value]


def test_a_file_is_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(Client, "switch_pattern", lambda _, value: sent.append(value) or [])
    entry = Library.default().get("glm-5-1of4")
    file = Library.default().folders[0] / "glm-5-1of4.yaml"
    assert CliRunner().invoke(app, ["server", "set", str(file)]).exit_code == 0
    assert sent == [entry.pattern]
