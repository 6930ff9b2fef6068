"""``indexcache server``: examine flags, show running servers, and switch their patterns."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Annotated

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

app = group("Ask what a server would do, look at a running one, switch its pattern.")

HERE = "http://127.0.0.1:30000"
# fmt: off
Url = Annotated[str, Option("--url", metavar="URL", rich_help_panel=SERVERS, help=
    "Base URL of the server.")]
Device = Annotated[str | None, Option("--device", metavar="NAME", help=
    "What to check for: cpu, h100, h200, b200, or cuda for the GPU of this machine. The default "
    "is this machine's GPU, and h200 without one.")]
NewPattern = Annotated[str, Argument(metavar="PATTERN", help="As --indexcache-pattern takes it.")]
# fmt: on


@app.command(
    "doctor",
    cls=Command,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: indexcache server doctor --model-path MODEL --tp 8 --indexcache-pattern 1/4",
)
def doctor_command(context: typer.Context, device: Device = None, as_json: Json = False) -> None:
    """Say what a server with these flags would do, without loading weights or needing a GPU.

    It takes every flag of `sglang serve`. What servers that run do, `indexcache server show` says.
    """
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
def live_show(urls: Urls = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show the patterns of running servers, and whether their layers skip what these say.

    With --url, repeated for every node, it also says whether every rank has the plugin, and all of
    them the same plan. The exit code is 1 if not, or if a layer runs its indexer that should not,
    or does not run one that should.
    """
    from sglang_indexcache.serving.operating.show import ask_servers

    servers = ask_servers(connect(urls or [HERE], api_key))
    if as_json:
        print_json(servers.to_json())
    else:
        servers.tell(out)
    if not servers.fine:
        raise typer.Exit(1)


@app.command(
    "set", cls=Command, epilog=f"Example: indexcache server set 'full < 32K <= 1/4' --url {HERE}"
)
def live_set(
    pattern: NewPattern, url: Url = HERE, api_key: ApiKey = None, admin_api_key: AdminApiKey = None
) -> None:
    """Replace the pattern of a server in live mode, for requests to come that name none.

    Those that are running or queued keep theirs. The prompt's length may decide, as in the example.
    """
    from sglang_indexcache.library.resolve import Library, names_a_file
    from sglang_indexcache.serving.operating.show import Rank

    [client] = connect([url], api_key, admin_api_key)
    if names_a_file(pattern):  # a server cannot read local files
        pattern = str(Library.default().resolve(pattern).pattern)
    states = client.switch_pattern(pattern)
    for state in states:
        if len(states) > 1:
            out.print(f"data-parallel rank {state.rank}", style="bold", highlight=False)
        Rank(client.url, state).tell(out)
