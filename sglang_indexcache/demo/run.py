"""The demo: two real servers, every indexer on and a quarter of them, asked in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sglang_indexcache.ask.launch import Server
from sglang_indexcache.ask.stream import stream
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.demo.findings import MIN_ROUNDS, Contender, DemoFindings
from sglang_indexcache.demo.material import DemoQuestion, Material
from sglang_indexcache.study.provenance import busy_cores, machine
from sglang_indexcache.support.files import write_json

PATTERNS = {"all F": "full", "1/4": "1/4"}
QUESTIONS = 32
ROUNDS = MIN_ROUNDS
PROMPT_TOKENS = 4096
NEW_TOKENS = 32
POOL_TOKENS = 16384
"""KV cache of each server: room for all questions at once."""
GRACE = 1.0
"""Seconds that a server has to end politely; there is nothing that it must save."""
INTRODUCTION = (
    "This serves one small DSA model (12 layers, trained by this project) twice on this machine's "
    'CPU: once with an indexer in every layer ("all F"), once with a quarter of them ("1/4", a '
    f"searched pattern). Both answer {QUESTIONS} questions, then both read the same {ROUNDS} long "
    "prompts in turns. It takes 3 to 5 minutes on two quiet cores. Ctrl-C stops both servers."
)


def run(folder: Path, console: Console) -> None:
    """Serve the shipped checkpoint under both patterns and print what that shows.

    Args:
        folder: for the servers' logs and ``demo.json``; made if missing.
        console: where to print.

    Raises:
        ServerError: a server did not start or went away, or an answer from which no time can be
            read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where = machine()
    console.print(INTRODUCTION, highlight=False)
    with ExitStack() as stack:
        servers = _start(folder, stack)
        for server in servers:
            command = " ".join(["python", *server.command[1:]])
            console.print(f"\n[dim]{command}[/dim]", highlight=False, soft_wrap=True)
        console.print()
        with step(console, "starting both servers"):
            material = Material(shipped_checkpoint())
            clients = [server.wait_until_ready() for server in servers]
        base, other = (Contender(*pair) for pair in zip(PATTERNS, clients, strict=True))
        asked = material.questions(QUESTIONS)
        ask([base, other], asked, console)
        busy = race([base, other], material.prompts(1 + ROUNDS, PROMPT_TOKENS), console)
        for one in (base, other):
            one.state = one.client.states()[0]
    findings = DemoFindings(base, other, asked, PROMPT_TOKENS, busy)
    record = folder / "demo.json"
    write_json(record, {"environment": where, **findings.record()})
    findings.tell(console)
    console.print(f"\nEvery sample is in {record}, the servers' logs beside it.", highlight=False)


def ask(contenders: Sequence[Contender], asked: Sequence[DemoQuestion], console: Console) -> None:
    """Let every server answer every question, each with one token."""
    with step(console, f"asking {len(asked)} questions") as say:
        for one in contenders:
            say(one.name)
            replies = one.client.generate(
                input_ids=[question.prompt for question in asked],
                sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            )
            one.said = [reply["text"] for reply in replies]
        say("both answered")


def race(
    contenders: Sequence[Contender], prompts: Sequence[list[int]], console: Console
) -> list[float | None]:
    """Time every server on every prompt but the first, which warms up; one server at a time.

    Each prompt is new to both, so no prefix cache helps. Who goes first changes from round to
    round, so a machine that gets slower or faster favours nobody.

    Returns:
        How many cores other programs kept busy before each round; None where that is unknown.
    """
    warm_up, *timed = prompts
    with step(console, "warming up") as say:
        for one in contenders:
            say(one.name)
            stream(one.client, [warm_up], NEW_TOKENS)
        say("both done")
    busy = []
    for number, prompt in enumerate(timed):
        with step(console, f"round {number + 1} of {len(timed)}") as say:
            busy.append(busy_cores())
            for one in contenders if number % 2 == 0 else reversed(contenders):
                say(f"{one.name} reads {len(prompt)} tokens and writes {NEW_TOKENS}")
                [answer] = stream(one.client, [prompt], NEW_TOKENS)
                one.prefill.append(answer.first_token)
                one.per_token.append(1 / answer.decode_rate)
            say(", ".join(f"{one.name} {_times(one)}" for one in contenders))
    return busy


@contextmanager
def step(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` and its seconds while the block runs, and keep a line of it afterwards.

    Yields:
        A function that adds what is going on to the text; the last addition stays.
    """
    started = time.monotonic()
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=2,  # no more: the cores are the servers'
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(text)
        yield lambda more: progress.update(task, description=f"{text}: {more}")
        text = progress.tasks[task].description
    console.print(f"{time.monotonic() - started:5.0f} s  {text}", markup=False, highlight=False)


def _times(one: Contender) -> str:
    return f"{one.prefill[-1]:.2f} s + {1000 * one.per_token[-1]:.0f} ms a token"


def _start(folder: Path, stack: ExitStack) -> list[Server]:
    """Start all at once, so that it costs one wait; ``stack`` stops them, whatever happens."""
    sockets = stack.enter_context(TemporaryDirectory())  # SGLang leaves its own where they are
    environment = {
        "TMPDIR": sockets,
        "CUDA_VISIBLE_DEVICES": "",  # the checkpoint is too narrow for a GPU's kernels
        "OMP_NUM_THREADS": "1",  # two would wait for each other wherever a core has other work
    }
    servers: list[Server] = []
    for pattern in PATTERNS.values():
        arguments = [
            *("--model-path", str(shipped_checkpoint())),
            *("--attention-backend", "indexcache", "--indexcache-pattern", pattern),
            *("--max-total-tokens", str(POOL_TOKENS)),
        ]
        log = folder / f"server-{pattern.replace('/', 'of')}.log"
        servers.append(Server(arguments, log, env=environment))
        stack.callback(servers[-1].stop, GRACE)
        servers[-1].start()
    return servers
