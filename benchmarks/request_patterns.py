"""What it costs a server of one pattern that requests could have several.

Two servers of the shipped checkpoint stay up, one in live mode and one in static mode, both with
every indexer on, so that they differ by nothing but whether a request may choose. Arms take turns,
request by request, and each turn is compared with that of the live server's own default in the same
round. One arm is that default again: how far it strays from 1 is what this machine cannot tell.

The row code is also timed alone, on a batch of one pattern, as a share of that batch's decode.

python -m benchmarks.request_patterns
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks.records import RUNS, read_arguments
from sglang_indexcache.ask.stream import stream
from sglang_indexcache.bench.latency import random_prompts, read_target
from sglang_indexcache.bench.results import Configuration, configurations
from sglang_indexcache.bench.servers import StartedServers
from sglang_indexcache.bench.tables import Grid
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.errors import BenchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json

PROMPT, REQUESTS, STEPS = 512, 64, 16
"""Tokens of the prefill; requests that decode together, each so many tokens."""
SHORT = 16
"""Tokens of the prompts of those that decode."""
FLAGS = (
    *("--max-total-tokens", "16384", "--disable-overlap-schedule"),
    *("--stream-interval", "1"),
)
BASE = "live, no name"
ARMS = {
    "live, no name, again": "the same once more",
    "live, named": "every request names the pattern that is the default anyway",
    "static": "a server that was started with this pattern and has no other",
}
"""What is compared with a live server whose requests name nothing."""
REPEATS = 2000
"""Of the row code alone."""


class ProcessorClock:
    """Processor seconds of the scheduler of a server on this machine, read by Linux's accounting.

    With one thread a rank this is what the wall clock would show if nothing else ran: the clock
    for a CPU that others use. On several ranks it is their mean.

    Args:
        group: process group of the server.

    Raises:
        BenchError: no scheduler is in it, or this is not Linux.
    """

    def __init__(self, group: int) -> None:
        members = (entry for entry in Path("/proc").glob("[0-9]*") if _group(entry) == group)
        found = [entry for entry in members if "scheduler" in _command(entry)]
        self._files = [entry / "schedstat" for entry in found]
        if not self._files or not all(file.exists() for file in self._files):
            raise BenchError("the processor clock needs Linux and servers that are started here")

    def __call__(self) -> float:
        """Seconds that the schedulers' main threads have run, the mean."""
        return (
            sum(int(file.read_text().split()[0]) for file in self._files) / 1e9 / len(self._files)
        )


def _group(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return None


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Turn:
    """Processor seconds of the scheduler.

    Attributes:
        prefill: of one prompt of :data:`PROMPT` tokens.
        decode: of :data:`REQUESTS` requests of :data:`STEPS` tokens each, their short prefill
            included.
    """

    prefill: float
    decode: float


def take_turn(
    servers: StartedServers, served: Configuration, name: str | None, vocab: int, seed: int
) -> Turn:
    """One prefill, then a batch that decodes."""
    with servers.visit(served) as client:
        clock = ProcessorClock(servers.visited.pid)
        client.flush_cache()
        [one] = stream(client, random_prompts(1, PROMPT, vocab, seed), 1, clock, name)
        client.flush_cache()
        prompts = random_prompts(REQUESTS, SHORT, vocab, seed, "decode")
        many = stream(client, prompts, STEPS, clock, name)
    return Turn(one.last_token, max(answer.last_token for answer in many))


def measure(done: int, rounds: int, journal: Path, logs: Path) -> None:
    """Add the turns of each round that is still to do to ``journal``; a first one only warms up."""
    target = read_target(shipped_checkpoint())
    [served] = configurations(["full"], target.checkpoint)
    with ExitStack() as stack:
        static, live = (
            stack.enter_context(
                StartedServers(
                    str(shipped_checkpoint()),
                    [*FLAGS, "--indexcache-mode", mode],
                    logs / mode,
                    {"OMP_NUM_THREADS": "1"},
                    side_by_side=True,
                )
            )
            for mode in ("static", "live")
        )
        for number in range(done, rounds + 1):
            order = [BASE, *ARMS]
            start = number % len(order)  # so that no arm always follows the same other
            turns = {}
            for arm in order[start:] + order[:start]:
                servers = static if arm == "static" else live
                name = served.pattern if arm == "live, named" else None
                turns[arm] = take_turn(servers, served, name, target.vocab_size, number)
            if number > done:
                line = json.dumps({arm: asdict(turn) for arm, turn in turns.items()})
                with journal.open("a") as file:
                    file.write(line + "\n")
            print(f"round {number} of {rounds}", flush=True)


def read(journal: Path) -> dict[str, list[Turn]]:
    """The turns of each arm, one a round."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    rounds = [json.loads(line) for line in lines]
    return {arm: [Turn(**turns[arm]) for turns in rounds] for arm in (BASE, *ARMS)}


def compared(turns: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    """Time over that of the live server's default in the same round: the median of the rounds.

    Its interval of 95 % lies between two of the rounds' ratios, by the binomial distribution:
    other work on the machine makes some of them very large.
    """
    from scipy.stats import binom

    base = turns[BASE]
    rows = []
    for arm in ARMS:
        for phase in ("prefill", "decode"):
            mine, theirs = ([getattr(turn, phase) for turn in x] for x in (turns[arm], base))
            ratios = sorted(a / b for a, b in zip(mine, theirs, strict=True))
            place = int(binom.ppf(0.025, len(ratios), 0.5)) - 1
            bounds = (ratios[place], median(ratios), ratios[-1 - place])
            low, ratio, high = (round(bound, 4) for bound in bounds)
            rows.append({"arm": arm, "phase": phase, "ratio": ratio, "low": low, "high": high})
    return rows


def row_code_seconds(requests: int) -> float:
    """What a decode step with ``requests`` requests of one pattern spends in row code, a median.

    From the scheduler's note on the batch to the last layer's question for its indices, which an
    index buffer without patterns of requests would be asked too.
    """
    import torch

    from sglang_indexcache.serving.active import ActivePattern
    from sglang_indexcache.serving.index_buffer import IndexBuffer
    from sglang_indexcache.serving.rows import RequestIds, patterns_of_rows
    from sglang_indexcache.serving.settings import collect, make_plan

    checkpoint = Checkpoint.read(shipped_checkpoint())
    said = collect({"indexcache_mode": "live"})
    active = ActivePattern(make_plan(said, checkpoint, {}))
    admitted = [
        SimpleNamespace(rid=str(i), indexcache_pattern=Pattern(str(active.pattern)))
        for i in range(requests)
    ]
    mode = SimpleNamespace(is_decode=lambda: True)
    batch: Any = SimpleNamespace(rids=None, forward_mode=mode, positions=torch.zeros(requests))
    buffer, selected = IndexBuffer(active), torch.zeros(requests, 64, dtype=torch.int32)
    seconds = []
    for _ in range(REPEATS):
        begun = time.thread_time()
        batch.rids = RequestIds(admitted)  # type: ignore[arg-type]
        buffer.begin(patterns_of_rows(batch, active))
        for layer in active.plan.layer_ids:
            if buffer.is_full(layer):
                buffer.select(layer, selected)
            buffer.read(layer, requests)
        seconds.append(time.thread_time() - begun)
    return median(seconds)


def table(found: dict[str, Any]) -> str:
    """The comparisons and the row code's share, in Markdown."""
    cells = {
        (row["arm"], row["phase"]): f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        for row in found["ratios"]
    }
    rows = tuple((arm, cells[arm, "prefill"], cells[arm, "decode"]) for arm in ARMS)
    title = (
        f"processor time over that of a live server whose requests name nothing; {found['rounds']} "
        "rounds, 95 % interval"
    )
    header = ("", f"prefill of {PROMPT:,} tokens", f"decode of {REQUESTS} requests")
    said = (
        "The first row compares the server with itself: what a machine that others use cannot tell "
        f"apart. The row code alone, timed on {REQUESTS} requests of one pattern, is "
        f"{found['row_code_share']:.2%} of their decode on this CPU, where the model has 12 layers."
    )
    return f"{Grid(title, header, rows).to_markdown()}\n{said}\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        *("--journal",),
        type=Path,
        default=RUNS / "request_patterns.jsonl",
        help="rounds so far; goes on there",
    )
    arguments = read_arguments(parser, "request_patterns.json", quick={"rounds": 2})
    arguments.journal.parent.mkdir(parents=True, exist_ok=True)
    where = machine()
    if (done := len(read(arguments.journal)[BASE])) < arguments.rounds:
        with tempfile.TemporaryDirectory() as logs:
            measure(done, arguments.rounds, arguments.journal, Path(logs))
    turns = read(arguments.journal)
    batch = median(turn.decode for turn in turns[BASE])
    share = STEPS * row_code_seconds(REQUESTS) / batch
    found = {
        "command": arguments.command,
        "environment": where,
        "model": "tiny-dsa, as shipped, every layer F",
        "arms": ARMS,
        "rounds": len(turns[BASE]),
        "ratios": compared(turns),
        "row_code_share": round(share, 5),
    }
    write_json(arguments.output, found)
    print(table(found))


if __name__ == "__main__":
    main()
