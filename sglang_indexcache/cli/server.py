"""``indexcache server``: what a server would do, what a running one does, and switching it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sglang_indexcache.cli.common import (
    SERVERS,
    AdminApiKey,
    ApiKey,
    Command,
    Json,
    Urls,
    connect,
    group,
    out,
    print_json,
)
from sglang_indexcache.errors import SettingsError
from sglang_indexcache.pattern import Pattern

if TYPE_CHECKING:
    from sglang_indexcache.serving.operating.doctor import Examination
    from sglang_indexcache.serving.operating.fleet import Fleet
    from sglang_indexcache.serving.protocol import RankState

app = group("Ask what a server would do, look at a running one, switch its pattern.")

HERE = "http://127.0.0.1:30000"
COLOURS = {True: "green", False: "red", None: "yellow"}
"""Colours of a line that says whether layers skip; None: nobody knows yet."""

# fmt: off
Url = Annotated[str, Option("--url", metavar="URL", rich_help_panel=SERVERS, help=
    "Base URL of the server.")]
Device = Annotated[str | None, Option("--device", metavar="NAME", help=
    "What to check for: cpu, h100, h200, b200, or cuda for the GPU of this machine. The default "
    "is this machine's GPU, and h200 without one.")]
Every = Annotated[float, Option("--every", min=0.1, metavar="SECONDS", help=
    "Look again after so many seconds.")]
NewPattern = Annotated[str, Argument(metavar="PATTERN", help="As --indexcache-pattern takes it.")]
# fmt: on


@app.command(
    "doctor",
    cls=Command,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: indexcache server doctor --model-path MODEL --tp 8 --indexcache-pattern 1/4",
)
def doctor_command(
    context: typer.Context,
    url: Urls = None,
    api_key: ApiKey = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Say what a server with these flags would do, without loading weights or needing a GPU.

    It takes every flag of `sglang serve`. With --url, repeated for every node, it asks servers that
    run instead: whether every rank has the plugin, and all of them the same plan.
    """
    if url:
        if context.args:
            raise SettingsError(f"--url is a question of its own; leave {context.args[0]} away")
        from sglang_indexcache.serving.operating.fleet import examine_servers

        examination: Fleet | Examination = examine_servers(connect(url, api_key))
    else:
        from sglang_indexcache.serving.operating.doctor import examine

        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            examination = examine(context.args, device)
    if as_json:
        print_json(examination.to_json())
    else:
        examination.tell(out)
    if examination.problems:
        raise typer.Exit(1)


@app.command("show", cls=Command, epilog=f"Example: indexcache server show --url {HERE}")
def live_show(url: Url = HERE, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show a running server's pattern, and whether its layers skip what the pattern says.

    The exit code is 1 if a layer runs its indexer that should not, or does not run one that should.
    """
    [client] = connect([url], api_key)
    print_states = _print_states_as_json if as_json else _print_states
    if not print_states(client.states()):
        raise typer.Exit(1)


@app.command("watch", cls=Command, epilog=f"Example: indexcache server watch --url {HERE}")
def live_watch(url: Url = HERE, api_key: ApiKey = None, every: Every = 2.0) -> None:
    """Watch what sharing does on a running server, until you press Ctrl-C.

    It shows which share of the indexers' work is skipped, the tokens and requests of each pattern,
    and how often each layer ran its indexer. It asks /server_info, so --enable-metrics, which has
    the same for Prometheus, is not needed.
    """
    from sglang_indexcache.serving.operating.watch import watch

    [client] = connect([url], api_key)
    with suppress(KeyboardInterrupt):
        watch(client, every, out)


@app.command(
    "set", cls=Command, epilog=f"Example: indexcache server set 'full < 32K <= 1/4' --url {HERE}"
)
def live_set(
    pattern: NewPattern, url: Url = HERE, api_key: ApiKey = None, admin_api_key: AdminApiKey = None
) -> None:
    """Replace the pattern of a server in live mode, for requests to come that name none.

    Those that are running or queued keep theirs. The prompt's length may decide, as in the example.
    """
    from sglang_indexcache.library.resolve import Library

    [client] = connect([url], api_key, admin_api_key)
    _print_states(client.switch_pattern(Library.default().to_send(pattern)))


def _print_states_as_json(states: Sequence[RankState]) -> bool:
    """Print what :func:`_print_states` does, as one document."""
    from sglang_indexcache.serving.operating.skipping import (
        describe_index_keys,
        describe_row_shares,
        judge,
    )

    verdicts = [judge(state) for state in states]
    fine = all(verdict.proven is not False for verdict in verdicts)
    copied = {"mode", "source", "adapter", "policy", "pattern", "requests"}
    ranks = [
        {
            "rank": rank,
            **state.model_dump(include=copied),
            "obeyed": verdict.proven,
            "indexers": verdict.text,
            "uncounted": verdict.uncounted,
            "index_k_bytes_per_token": state.index_k_bytes_per_token,
            "index_k": describe_index_keys(state),
            "row_split": describe_row_shares(state),
        }
        for rank, (state, verdict) in enumerate(zip(states, verdicts, strict=True))
    ]
    print_json({"fine": fine, "ranks": ranks})
    return fine


def _print_states(states: Sequence[RankState]) -> bool:
    """Print each rank's state; return whether none of them fails to skip what it should."""
    from sglang_indexcache.serving.operating.drawing import to_terminal
    from sglang_indexcache.serving.operating.skipping import (
        describe_index_keys,
        describe_row_shares,
        judge,
    )

    def show(line: str, style: str | None = None) -> None:
        out.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    verdicts = [judge(state) for state in states]
    for rank, (state, verdict) in enumerate(zip(states, verdicts, strict=True)):
        if len(states) > 1:
            show(f"data-parallel rank {rank}", "bold")
        show(f"{state.mode} mode, {state.source}", "bold")
        show(verdict.text, COLOURS[verdict.proven])
        if verdict.uncounted:
            show(verdict.uncounted)
        show(f"index-K: {describe_index_keys(state)}")
        if row_split := describe_row_shares(state):
            show(row_split)
        if state.adapter:
            show(f"adapter: {state.adapter}")
        if state.policy != state.pattern:
            show(f"by prompt length: {state.policy}; below, the layers of the shortest prompts")
        for pattern, count in sorted(state.requests.items()):
            show(f"unfinished requests under {pattern}: {count}")
        show("")
        out.print(to_terminal(Pattern(state.pattern)))
    return all(verdict.proven is not False for verdict in verdicts)
