"""``indexcache server``: what a server would do, what a running one does, and switching it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_indexcache.cli.common import (
    AdminApiKeyOption,
    ApiKeyOption,
    UrlOption,
    UrlsOption,
    connect,
    group,
    out,
)
from sglang_indexcache.errors import SettingsError
from sglang_indexcache.pattern import Pattern

if TYPE_CHECKING:
    from sglang_indexcache.ask.protocol import RankState

app = group("Ask what a server would do, look at a running one, switch its pattern.")


@app.command("doctor", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor_command(
    context: typer.Context,
    url: UrlsOption = None,
    api_key: ApiKeyOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What to check for: cpu, h100, h200, b200, or cuda for the GPU of this machine. "
            "The default is this machine's GPU, and h200 without one.",
        ),
    ] = None,
) -> None:
    """Say what a server started with these flags would do, without loading weights.

    It takes the flags of `python -m sglang.launch_server`, for example: indexcache server doctor
    --model-path MODEL --indexcache-pattern 1/4. Where SGLang is not installed, it reads the
    checkpoint's config and checks the pattern alone. With --url, repeated for every node, it asks
    servers that run instead: whether every rank has the plugin, and all of them the same plan.
    """
    if url:
        from sglang_indexcache.serving.fleet import examine_servers

        if context.args:
            raise SettingsError(f"--url asks servers that run; leave {context.args[0]} away")
        fine = examine_servers(connect(url, api_key), out)
    else:
        from sglang_indexcache.serving.doctor import examine

        fine = examine(context.args, out, device)
    if not fine:
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
def live_show(
    url: UrlOption = "http://127.0.0.1:30000",
    api_key: ApiKeyOption = None,
) -> None:
    """Show a running server's pattern and what its layers did so far."""
    [client] = connect([url], api_key)
    _print_states(client.states())


@app.command("set")
def live_set(
    pattern: Annotated[
        str,
        typer.Argument(help="As --indexcache-pattern takes it; or adapter, if the server has one."),
    ],
    url: UrlOption = "http://127.0.0.1:30000",
    api_key: ApiKeyOption = None,
    admin_api_key: AdminApiKeyOption = None,
) -> None:
    """Replace the pattern of a server in live mode, for requests to come that name none.

    Those that are running or queued keep theirs. Prompt length may decide: 'full < 32K <= 1/4'.
    """
    from sglang_indexcache.library import Library, names_a_file

    if names_a_file(pattern):  # this machine's: a server reads none
        pattern = str(Library.default().resolve(pattern).pattern)
    [client] = connect([url], api_key, admin_api_key)
    _print_states(client.switch_pattern(pattern))


def _print_states(states: Sequence[RankState]) -> None:
    from sglang_indexcache.support.drawing import to_terminal

    for rank, state in enumerate(states):
        if len(states) > 1:
            out.print(f"data-parallel rank {rank}", style="bold")
        out.print(to_terminal(Pattern(state.pattern), f"{state.mode} mode, {state.source}"))
        if state.adapter:
            indexers = "its indexers" if state.adapter_in_effect else "not in effect"
            out.print(f"adapter: {state.adapter} ({indexers})")
        if state.policy != state.pattern:
            out.print(f"by prompt length: {state.policy}")
        for pattern, count in sorted(state.requests.items()):
            out.print(f"requests under {pattern}: {count}")
        out.print(f"forwards since the last switch: {state.forwards}")
        out.print(f"index-K bytes per token: {state.index_k_bytes_per_token}")
