"""Tests of the ``indexcache`` command as a user types it."""

from pathlib import Path

from typer.testing import CliRunner

from sglang_indexcache.cli import app


def output_of(*arguments: str | Path, code: int = 0) -> str:
    """Run a command that ends by itself with this exit code; return its output, single blanks."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit | None)
    return " ".join(result.output.split())
