"""Seconds that an indexer takes of a rank's processor where two ranks split its rows.

    python -m benchmarks.row_split [--lengths 2048 4096 8000] [--rounds 5]

Two servers on the CPU platform serve the shipped model, every layer F, with ``--tp 2``: one splits
rows and one does not. They read the same prompts in turns, each prompt once. A round is one prompt
of each length on both; its figures are the processor seconds of the first rank's indexers, gather
included, and the seconds until the first token. Processor seconds do not count what other programs
take. Log-probabilities of both servers must be equal to the bit. Writes row_split.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.records import markdown, read_arguments
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import Server
from sglang_indexcache.lab.data.words import haystack
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.lab.runs.provenance import busy_cores, machine, versions
from sglang_indexcache.library.writing import write_json

QUICK = {"lengths": [2048, 4096], "rounds": 1}
MODEL = shipped_checkpoint()
RANKS = 2
SETTINGS = ("off", "on")
CLOCK = "prefill_processor"


def flags(setting: str) -> list[str]:
    """Return a server's command line."""
    return [
        *("--model-path", str(MODEL), "--attention-backend", "indexcache"),
        *("--indexcache-split-rows", setting, "--indexcache-pattern", "full"),
        *("--tp", str(RANKS), "--max-total-tokens", "16384", "--disable-radix-cache"),
    ]


def read(client: Client, ids: list[int]) -> tuple[dict[str, float], Any]:
    """Let a server read a prompt; return its seconds, and its last log-probabilities."""
    before = client.states()[0]
    start = time.perf_counter()
    reply = client.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=len(ids) - 64,
    )
    wall = time.perf_counter() - start
    after = client.states()[0]
    figures = {
        "indexer_seconds": after.indexer_seconds[CLOCK] - before.indexer_seconds[CLOCK],
        "first_token_seconds": wall,
    }
    if after.selected_rows:
        rows = after.selected_rows - before.selected_rows
        figures["scored"] = (after.scored_rows[0] - before.scored_rows[0]) / rows
    return figures, reply["meta_info"]["input_token_logprobs"]


def make_prompts(count: int, length: int) -> list[list[int]]:
    """Return prompts of plain sentences, none of which begins like another."""
    from transformers import AutoTokenizer

    text = haystack()[: 8 * count * length]
    [ids] = AutoTokenizer.from_pretrained(MODEL)([text])["input_ids"]
    return [ids[n * length : (n + 1) * length] for n in range(count)]


def measure(lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row of each length and round."""
    rows = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        servers = {s: Server(flags(s), logs / s) for s in SETTINGS}
        clients = {s: stack.enter_context(servers[s]).wait_until_ready() for s in SETTINGS}
        prompts = {n: make_prompts(rounds + 1, n) for n in lengths}
        for number in range(rounds + 1):
            for length in lengths:
                order = SETTINGS if number % 2 else SETTINGS[::-1]
                answers = {s: read(clients[s], prompts[length][number]) for s in order}
                if answers["off"][1] != answers["on"][1]:
                    raise AssertionError(f"a prompt of {length} tokens was read otherwise")
                if number:  # before that, torch's own warming up
                    rows.append(
                        {"round": number, "length": length}
                        | {s: answers[s][0] for s in SETTINGS}
                        | {"busy_cores": busy_cores()}
                    )
                    print(rows[-1], flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Tabulate medians by length."""
    lines = []
    for length in sorted({row["length"] for row in rows}):
        mine = [row for row in rows if row["length"] == length]
        shares = [row["on"]["indexer_seconds"] / row["off"]["indexer_seconds"] for row in mine]
        seconds = [median(row[s]["indexer_seconds"] for row in mine) for s in SETTINGS]
        lines.append(
            (
                f"{length:,}",
                *(f"{value:.2f}" for value in seconds),
                f"{median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})",
                f"{median(row['on']['scored'] for row in mine):.0%}",
            )
        )
    header = ("tokens", "unsplit, s", "split, s", "share of the unsplit", "rows scored")
    return markdown(header, lines)


def line(record: dict[str, Any]) -> str:
    """Write in words what share of the unsplit indexers' processor seconds is left, by length."""
    shares: dict[int, list[float]] = {}
    for row in record["rows"]:
        share = row["on"]["indexer_seconds"] / row["off"]["indexer_seconds"]
        shares.setdefault(row["length"], []).append(share)
    words = (f"{median(shares[length]):.2f} at {length:,} tokens" for length in sorted(shares))
    return f"over {RANKS} ranks of a CPU server a rank's indexers took {', '.join(words)}"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8000])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = read_arguments(parser, "row_split.json", quick=QUICK)
    busy = busy_cores()
    rows = measure(arguments.lengths, arguments.rounds)
    result = {
        "command": arguments.command,
        "what": "an indexer's rows split over two ranks of a CPU server, or not, in turns",
        "machine": machine() | {"threads_a_rank": max(1, len(os.sched_getaffinity(0)) // RANKS)},
        "versions": versions(),
        "busy_cores_before": busy,
        "flags": {setting: flags(setting)[2:] for setting in SETTINGS},
        "rows": rows,
    }
    write_json(arguments.output, result)
    print(table(rows))


if __name__ == "__main__":
    main()
