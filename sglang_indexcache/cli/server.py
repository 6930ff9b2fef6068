"""``indexcache server``: what a server would do, what a running one does, and switching it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_indexcache.cli.common import UrlOption, group, out
from sglang_indexcache.pattern import Pattern

app = group("Ask what a server would do, look at a running one, switch its pattern.")


@app.command("doctor", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor_command(context: typer.Context) -> None:
    """Say what a server started with these flags would do, without loading weights.

    It takes the flags of `python -m sglang.launch_server`, for example: indexcache server doctor
    --model-path MODEL --indexcache-pattern 1/4. Where SGLang is not installed, it reads the
    checkpoint's config and checks the pattern alone.
    """
    from sglang_indexcache.serving.doctor import examine

    if not examine(context.args, out):
        raise typer.Exit(1)


@app.command("seams")
def seams_command(
    sglang: Annotated[
        Path | None,
        typer.Option(help="A wheel, or a folder that holds sglang/; else the installed one."),
    ] = None,
) -> None:
    """Say whether an SGLang is one that IndexCache can extend, and show what moved in it.

    It only reads: nothing is installed, and no SGLang is imported.
    """
    from sglang_indexcache.serving.engine_version import show

    if not show(sglang, out):
        raise typer.Exit(1)


@app.command("show")
def live_show(url: UrlOption = "http://127.0.0.1:30000") -> None:
    """Show a running server's pattern and what its layers did so far."""
    from sglang_indexcache.client import Client

    _print_states(Client(url).states())


@app.command("set")
def live_set(
    pattern: Annotated[str, typer.Argument(help="As --indexcache-pattern takes it.")],
    url: UrlOption = "http://127.0.0.1:30000",
) -> None:
    """Replace the pattern of a server that runs in live mode."""
    from sglang_indexcache.client import Client

    _print_states(Client(url).switch_pattern(pattern))


def _print_states(states: list[dict[str, Any]]) -> None:
    from sglang_indexcache.support.drawing import to_terminal

    for rank, state in enumerate(states):
        if len(states) > 1:
            out.print(f"data-parallel rank {rank}", style="bold")
        out.print(
            to_terminal(Pattern(state["pattern"]), f"{state['mode']} mode, {state['source']}")
        )
        out.print(f"forwards since the last switch: {state['forwards']}")
        out.print(f"index-K bytes per token: {state['index_k_bytes_per_token']}")
