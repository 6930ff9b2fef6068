"""What the command groups share: how errors are told, and options that mean the same everywhere."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from sglang_indexcache.errors import IndexCacheError

out = Console()

EXTRAS = {
    "patterns": "search",
    "server": "serve",
    "search": "search",
    "bench": "search",
    "train": "train",
    "kernels": "serve",
    "demo": "all",
}
"""Which extra of the package brings what a command group needs."""

UrlOption = Annotated[str, typer.Option(help="Base URL of the server.")]


class Reporting(TyperGroup):
    """Turns our errors, and packages that are not installed, into one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except IndexCacheError as error:
            message = str(error)
        except ModuleNotFoundError as error:
            extra = EXTRAS.get(ctx.invoked_subcommand or "", "all")
            message = (
                f"this command needs {(error.name or str(error)).partition('.')[0]}, which is not "
                f"installed: pip install 'sglang-indexcache[{extra}]'"
            )
        typer.secho(f"indexcache: error: {message}", err=True, fg="red")
        raise typer.Exit(1)


def group(help: str) -> typer.Typer:
    """A command group."""
    return typer.Typer(help=help, no_args_is_help=True, pretty_exceptions_enable=False)


def name_and_value(text: str, option: str) -> tuple[str, str]:
    """The two halves of ``NAME=VALUE``.

    Raises:
        IndexCacheError: naming ``option``, unless ``text`` has that form.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise IndexCacheError(f"{option} wants NAME=VALUE, got {text!r}")
    return name, value


def json_or_text(value: str) -> Any:
    """``8``, ``true`` and ``[1]`` as JSON has them, anything else as it is."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
