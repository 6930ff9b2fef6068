"""The ``indexcache`` command: one module a command group, none of them heavy to import."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_indexcache import __version__
from sglang_indexcache.cli import bench, eval, heal, kernels, patterns, search, server
from sglang_indexcache.cli.common import Reporting
from sglang_indexcache.library.writing import shipped

app = typer.Typer(
    cls=Reporting,
    help="IndexCache for SGLang: let most DSA layers reuse the indices of an earlier layer.",
    epilog=f"Guides: {shipped('docs')}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _group in (patterns, server, search, eval, bench, heal, kernels):
    app.add_typer(_group.app, name=_group.__name__.rpartition(".")[2])


def _show_version(show: bool) -> None:
    if show:
        typer.echo(f"sglang-indexcache {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of the command itself."""
