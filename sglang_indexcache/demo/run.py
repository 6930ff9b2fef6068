"""The demo: two real servers, every indexer on and a quarter of them, asked in turns.

A median is printed with the range of its rounds, and only if all of them say who is faster: a few
rounds on a machine that does other things as well give no normal distribution to reckon with.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoTokenizer

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.launch import Server
from sglang_indexcache.ask.protocol import RankState
from sglang_indexcache.ask.stream import stream
from sglang_indexcache.data.documents import machine_text
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.study.provenance import busy_cores, machine
from sglang_indexcache.support.files import write_json

PATTERNS = {"all F": "full", "1/4": "1/4"}
QUESTIONS = 32
ROUNDS = 6
"""Servers of equal speed give six ratios on one side of 1 in 1 of 32 demos; three, in 1 of 4."""
PROMPT_TOKENS = 4096
NEW_TOKENS = 32
QUESTION_TOKENS = 256
"""Length of each question's document: four times what a layer selects."""
FACTS = 6
"""Notes in a document, of which one is asked for."""
TEXT_CHARACTERS = 1_000_000
HELD_OUT_EVERY = 10
"""The shipped model was trained on Python's own sources, without each tenth file in name order."""
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

    Raises:
        ServerError: a server did not start or went away, or an answer from which no time can be
            read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = machine()
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
        base, sharing = (Contender(*pair) for pair in zip(PATTERNS, clients, strict=True))
        questions = material.questions(QUESTIONS)
        ask([base, sharing], questions, console)
        busy = race([base, sharing], material.prompts(1 + ROUNDS, PROMPT_TOKENS), console)
        for contender in (base, sharing):
            contender.state = contender.client.states()[0]
    findings = DemoFindings(base, sharing, questions, PROMPT_TOKENS, busy)
    record = folder / "demo.json"
    write_json(record, {"environment": environment, **findings.record()})
    findings.tell(console)
    console.print(f"\nEvery sample is in {record}, the servers' logs beside it.", highlight=False)


def ask(
    contenders: Sequence[Contender], questions: Sequence[DemoQuestion], console: Console
) -> None:
    """Let every server answer every question, each with one token."""
    with step(console, f"asking {len(questions)} questions") as say:
        for contender in contenders:
            say(contender.name)
            replies = contender.client.generate(
                input_ids=[question.prompt for question in questions],
                sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            )
            contender.answers = [reply["text"] for reply in replies]
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
        for contender in contenders:
            say(contender.name)
            stream(contender.client, [warm_up], NEW_TOKENS)
        say("both done")
    busy = []
    for number, prompt in enumerate(timed):
        with step(console, f"round {number + 1} of {len(timed)}") as say:
            busy.append(busy_cores())
            for contender in contenders if number % 2 == 0 else reversed(contenders):
                say(f"{contender.name} reads {len(prompt)} tokens and writes {NEW_TOKENS}")
                [answer] = stream(contender.client, [prompt], NEW_TOKENS)
                contender.prefill.append(answer.first_token)
                contender.per_token.append(1 / answer.decode_rate)
            say(", ".join(f"{contender.name} {_times(contender)}" for contender in contenders))
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


def _times(contender: Contender) -> str:
    return f"{contender.prefill[-1]:.2f} s + {1000 * contender.per_token[-1]:.0f} ms a token"


def _start(folder: Path, stack: ExitStack) -> list[Server]:
    """Start all servers at once, to wait only once; ``stack`` stops them, whatever happens."""
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


@dataclass(frozen=True)
class DemoQuestion:
    """Token ids of source code with notes in it that ask for one of them; the one-token answer."""

    prompt: list[int]
    answer: str


class Material:
    """The Python standard library's source code, in the tokens of a model."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = tokenizer = AutoTokenizer.from_pretrained(model)
        files = tokenizer(list(machine_text(TEXT_CHARACTERS)))["input_ids"]
        self._held_out = list(chain(*files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]))
        self._text = list(chain(*files))
        pieces = tokenizer.get_vocab()
        # A byte-level BPE writes the leading space as U+0120. Training, too, asked for every other
        # word and answered with the rest, and encoded these pieces apart.
        words = sorted(i for piece, i in pieces.items() if re.fullmatch("\u0120[A-Za-z]+", piece))
        self._names, self._values = words[0::2], words[1::2]
        parts = tokenizer(["\n#", "\n?", " is", "\n"], add_special_tokens=False)["input_ids"]
        self._note, self._ask, self._be, self._end = parts

    def questions(self, count: int, length: int = QUESTION_TOKENS) -> list[DemoQuestion]:
        """Make ``count`` different questions about files that training never saw; fixed seeds."""
        return [self._question(random.Random(f"demo/{n}"), length) for n in range(count)]

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Make ``count`` prompts of ``length`` tokens, none of which begins like another."""
        step = (len(self._text) - length) // count
        return [self._text[n * step : n * step + length] for n in range(count)]

    def _question(self, rng: random.Random, length: int) -> DemoQuestion:
        names, values = rng.sample(self._names, FACTS), rng.sample(self._values, FACTS)
        notes = [
            [*self._note, name, *self._be, value, *self._end]
            for name, value in zip(names, values, strict=True)
        ]
        target = rng.randrange(FACTS)
        ending = [*self._ask, names[target], *self._be]
        room = length - len(ending) - sum(map(len, notes))
        start = rng.randrange(len(self._held_out) - room)
        prompt = self._held_out[start : start + room]
        places = sorted(rng.randrange(room) for _ in notes)
        for place, note in reversed(list(zip(places, notes, strict=True))):
            prompt[place:place] = note
        return DemoQuestion(prompt + ending, self._tokenizer.decode(values[target]))


QUIET_CORES = 0.3
"""Cores' worth of foreign work that a measurement hardly feels."""
UNSHOWN = "no difference shown"


def times_faster(base: Sequence[float], other: Sequence[float]) -> str:
    """Say how many times as fast ``other`` was: median and range, or that the rounds disagree.

    Both are seconds of each round, above zero.
    """
    ratios = [slow / fast for slow, fast in zip(base, other, strict=True)]
    low, high = min(ratios), max(ratios)
    between = f"{low:.2f}x to {high:.2f}x"
    if len(ratios) < ROUNDS or low <= 1 <= high:
        return f"{UNSHOWN} ({between})"
    return f"{median(ratios):.2f}x ({between})"


@dataclass
class Contender:
    """One server, its answers and its times.

    Attributes:
        answers: its answer to each question.
        prefill: seconds from the prompt to the first token, one a round.
        per_token: seconds for each token after the first, one a round.
        state: what IndexCache on the server reports.
    """

    name: str
    client: Client
    answers: list[str] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    state: RankState | None = None


@dataclass
class DemoFindings:
    """Everything that one demo saw of the server with every indexer and the one that shares.

    ``busy`` is how many cores other programs kept busy before each round; None where unknown.
    """

    base: Contender
    other: Contender
    questions: Sequence[DemoQuestion]
    prompt_tokens: int
    busy: list[float | None]

    def __post_init__(self) -> None:
        self.contenders = base, other = self.base, self.other
        self.prefill = times_faster(base.prefill, other.prefill)
        self.decode = times_faster(base.per_token, other.per_token)

    def record(self) -> dict[str, Any]:
        """Return every sample as JSON, for ``demo.json``."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "servers": [
                {
                    "name": contender.name,
                    "said": contender.answers,
                    "prefill": contender.prefill,
                    "per_token": contender.per_token,
                    "state": contender.state and contender.state.to_json(),
                }
                for contender in self.contenders
            ],
            "answers": [question.answer for question in self.questions],
            "busy_cores": self.busy,
            "prefill": self.prefill,
            "decode": self.decode,
        }

    def tell(self, console: Console) -> None:
        """Print the figures, and what they mean."""
        for block in (self._table(), self._summary()):
            console.print(block, highlight=False)

    def _table(self) -> Table:
        title = f"\nPrompts of {self.prompt_tokens} tokens on this machine's CPU"
        table = Table(title=title, box=SIMPLE_HEAD)
        table.add_column("median and range")
        for contender in self.contenders:
            table.add_column(contender.name, justify="right")
        table.add_column("times as fast")
        states = [contender.state for contender in self.contenders if contender.state is not None]
        table.add_row("pattern", *(state.pattern for state in states))
        table.add_row("layers with indexer", *(str(state.full_layers) for state in states))
        table.add_row("layers that reuse", *(str(state.shared_layers) for state in states))
        per_token = (str(state.index_k_bytes_per_token) for state in states)
        table.add_row("index-K bytes/token", *per_token)
        prefills = (_spread(contender.prefill, 1, ".2f") for contender in self.contenders)
        table.add_row("prefill, s", *prefills, self.prefill)
        decodes = (_spread(contender.per_token, 1000, ".1f") for contender in self.contenders)
        table.add_row("decode, ms/token", *decodes, self.decode)
        return table

    def _summary(self) -> str:
        answers = [question.answer for question in self.questions]
        base, other = (
            [a == b for a, b in zip(server.answers, answers, strict=True)]
            for server in self.contenders
        )
        agreeing = sum(a == b for a, b in zip(self.base.answers, self.other.answers, strict=True))
        summary = (
            f"Both gave the same answer to {agreeing} of {len(self.questions)} questions; "
            f"{self.base.name} was right {sum(base)} times, {self.other.name} {sum(other)} times. "
            "So few can only show a large difference: `indexcache eval run` asks as many as it "
            "takes. "
            f"{self.other.name} against {self.base.name}, median of {len(self.busy)} rounds: "
            f"prefill {self.prefill}, decode {self.decode}."
        )
        if (busiest := max((cores or 0.0 for cores in self.busy), default=0.0)) > QUIET_CORES:
            summary += (
                f" Other programs kept up to {busiest:.1f} of {os.cpu_count()} cores busy, so "
                "try again when the machine is quiet."
            )
        return summary + (
            " A small model on a CPU says nothing about a GPU's speed.\n\nNext, for your own "
            "model: indexcache server doctor --model-path MODEL --indexcache-pattern 1/4"
        )


def _spread(values: Sequence[float], unit: float, form: str) -> str:
    amounts = [unit * value for value in values]
    return f"{median(amounts):{form}}\n{min(amounts):{form}} to {max(amounts):{form}}"
