"""Servers that a benchmark measures, started by it or running already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from sglang_indexcache.errors import BenchError, ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import Server
from sglang_indexcache.lab.latency.results import Configuration, Model, ServerFacts

TIMEOUT = 3600.0
"""Timeout in seconds: a prefill of a full KV cache takes long to answer."""

_OUR_FLAGS = ("--model-path", "--model", "--attention-backend", "--indexcache-pattern", "--port")
_KEY_FLAGS = ("--api", "--admin")  # argparse accepts prefixes too


class StartedServers:
    """Servers that are started with ``sglang.launch_server`` for each visit, one at a time.

    Raises:
        BenchError: ``arguments`` has a flag that the benchmark itself sets.
    """

    started_here = True

    def __init__(self, model: str, arguments: Sequence[str], logs: Path) -> None:
        for flag in (argument.partition("=")[0] for argument in arguments):
            if flag in _OUR_FLAGS:
                raise BenchError(
                    f"leave {flag} to the benchmark: --model and --pattern say what is served"
                )
            if flag.startswith(_KEY_FLAGS):
                raise BenchError(
                    f"leave {flag} out: flags are kept with the results, and a server that "
                    "is started here needs no key"
                )
        self._command = ["--model-path", model, "--attention-backend", "indexcache", *arguments]
        self._logs = logs

    @contextmanager
    def visit(self, configuration: Configuration) -> Iterator[Client]:
        """Provide a ready server for ``configuration`` while the block runs.

        A failure's message includes the end of the server's log.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{configuration.name.replace('/', 'of')}.log"
        command = [*self._command, "--indexcache-pattern", configuration.value]
        with Server(command, log) as server:
            try:
                server.wait_until_ready(timeout=TIMEOUT)
                yield Client(server.client.url, timeout=TIMEOUT)
            except (BenchError, ServerError) as error:
                raise BenchError(f"{error}\nThe server's log ends:\n{server.log_tail()}") from error


class RunningServers:
    """Servers that run already, by configuration name.

    One server in live mode may stand for several configurations: each request names its pattern.
    """

    started_here = False

    def __init__(self, clients: Mapping[str, Client]) -> None:
        self._clients = clients

    def visit(self, configuration: Configuration) -> AbstractContextManager[Client]:
        """See :class:`StartedServers`."""
        return nullcontext(self._clients[configuration.name])


Servers = StartedServers | RunningServers


def open_servers(
    model: Path,
    served: Sequence[Configuration],
    clients: Sequence[Client],
    flags: Sequence[str],
    logs: Path,
) -> Servers:
    """Use the servers of ``clients``, or prepare to start servers with ``flags`` if there are none.

    Raises:
        BenchError: the number of clients is wrong, or flags are given for servers that run already.
    """
    if not clients:
        return StartedServers(str(model), flags, logs)
    names = [configuration.name for configuration in served]
    every = [*clients] * len(names) if len(clients) == 1 else clients
    if len(every) != len(names) or flags:
        raise BenchError(
            f"give one --url, or one for each of {', '.join(names)}, and no server flags: "
            "those servers run already"
        )
    return RunningServers(dict(zip(names, every, strict=True)))


def check_served(client: Client, configuration: Configuration, model: Model) -> None:
    """Refuse a server whose pattern or model differs from the request.

    In live mode its pattern is only for requests that name none, and does not matter.

    Raises:
        BenchError: a rank differs.
    """
    for rank, state in enumerate(client.states()):
        if state.architecture != model.architecture:
            raise BenchError(
                f"the server at {client.url} serves a {state.architecture}, but {model.name} is "
                f"a {model.architecture}. Give the --model that it serves."
            )
        if state.mode != "live" and state.pattern != configuration.pattern:
            raise BenchError(
                f"the server at {client.url} serves {state.pattern} on rank {rank}, not the "
                f"{configuration.pattern} of {configuration.name}. Nothing is reported."
            )


def server_facts(client: Client) -> ServerFacts:
    """Return the facts that a server reports about itself.

    Raises:
        BenchError: the server does not report its KV capacity.
    """
    info = client.server_info()
    ranks = info["internal_states"]
    try:
        capacity = min(int(rank["memory_usage"]["token_capacity"]) for rank in ranks)
    except (KeyError, TypeError) as error:
        raise BenchError(f"the server at {client.url} does not tell its KV capacity") from error
    ours = client.states()[0]
    return ServerFacts(
        device=info["device"],
        tp=info["tp_size"],
        dp=len(ranks),  # dp_size is 1 under dp_attention
        dp_attention=bool(info.get("enable_dp_attention")),
        chunked_prefill=info["chunked_prefill_size"],
        page=info["page_size"],
        capacity=capacity,
        index_k_bytes=ours.index_k_bytes_per_token,
        mode=ours.mode,
    )


def indexer_seconds(client: Client) -> tuple[float, float]:
    """Return a rank's mean seconds in indexers since the default was set: (prefill, decode).

    They are zero if the server does not count them: on a GPU, kernels run asynchronously.
    """
    ranks = [state.indexer_seconds for state in client.states()]
    return (
        sum(seconds["prefill"] for seconds in ranks) / len(ranks),
        sum(seconds["decode"] for seconds in ranks) / len(ranks),
    )
