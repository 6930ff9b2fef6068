"""Heal patterns on SmolLM2, the body frozen: Table 3 there, and whether healing adds to searching.

    python -m benchmarks.smollm2.healed runs/smollm2/built benchmarks/results/smollm2/searched.json

``indexcache heal`` trains three adapters on rows of the training book that end with passages of
themselves: the indexers of uniform 1/4 and of a searched 1/4, each for every layer that it serves
(L_multi), and those of all layers, each for its own layer only; of these any pattern can be made.
A short trial of the command's own chooses one learning rate for all. Then each pattern is
measured on held-out books without healing, and with either. What is interrupted goes on. Writes
smollm2/healed.json and its table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.records import markdown, read_arguments
from benchmarks.smollm2 import CACHE
from benchmarks.smollm2.books import HELD_OUT, TRAIN, Books, rows
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.measure import HEADER, Arm, Line, columns, measure
from benchmarks.smollm2.workers import each, one_thread
from sglang_indexcache.adapter import Adapter
from sglang_indexcache.lab.heal.heal import TRIAL_STEPS, HealOptions, heal
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json, write_whole

QUICK = {"steps": 2, "heal_length": 512, "rows": 2, "length": 1024}
SEARCH_USED = "one-pass:mixed"
OWN, MULTI = "own layer only", "L_multi"
LOSSES = ("", OWN, MULTI)
"""Losses by which a line may have been healed; none at first."""
ROOM = 16
"""Tokens by which a row is longer than its document: decoded and read again, some have more."""


def write_data(books: Books, count: int, length: int, path: Path) -> None:
    """Write rows of the training book with passages as documents that ``heal`` reads."""
    texts = [books.tokenizer.decode(row.ids) for row in rows(books, TRAIN, count, length)]
    write_whole(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def healed(options: HealOptions) -> tuple[Adapter, str]:
    """Heal, unless that is done; returns the adapter and all that was said."""
    console = Console(record=True, width=160)
    adapter = heal(options, console).adapter
    return adapter, console.export_text()


def table(lines: Sequence[Line]) -> str:
    """Tabulate each line beside all F, the same pattern as it is, and healed by the own loss."""
    base, *_ = lines
    by_loss = {(line["pattern"], line["healed"]): line for line in lines}
    cells = []
    for line in lines:
        count = line["pattern"].count("F")
        cells.append([line["name"], count, *columns(line, base)])
        for loss in LOSSES[:2]:
            earlier = LOSSES.index(loss) < LOSSES.index(line["healed"])
            before = by_loss[line["pattern"], loss] if earlier else line
            _, text, _, _, recall = columns(line, before)
            cells[-1] += [text, recall]
    over = (
        f"{what} over {other}" for other in ("as it is", OWN) for what in ("text loss", "recall")
    )
    return markdown(("", "F", *HEADER, *over), cells)


def main(argv: list[str] | None = None) -> None:
    """Heal, measure, write."""
    one_thread()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("searched", type=Path, help="record of the searches")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--steps", type=int, default=48, help="of one row each")
    parser.add_argument("--heal-length", type=int, default=1024, help="of a row that trains")
    parser.add_argument("--rows", type=int, default=8, help="held-out rows")
    parser.add_argument("--length", type=int, default=2048, help="of held-out rows")
    parser.add_argument("--topk", type=int, default=128)
    arguments = read_arguments(parser, "smollm2/healed", argv, QUICK)
    from transformers import AutoTokenizer

    digest = checkpoint_digest(arguments.model)
    books = Books(arguments.cache, AutoTokenizer.from_pretrained(arguments.model))
    size = f"{digest[:12]}-{arguments.steps}-{arguments.heal_length}"
    folder, data = arguments.cache / "healed" / size, arguments.cache / "healed" / f"{size}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if not data.exists():
        write_data(books, 2 * arguments.steps + 32, arguments.heal_length, data)

    def options(pattern: str, name: str, **changes: Any) -> HealOptions:
        return HealOptions(
            arguments.model, pattern, (str(data),), folder / name, held_out=2,
            length=arguments.heal_length + ROOM, dense_steps=arguments.steps, **changes,
        )  # fmt: skip

    searches = json.loads(arguments.searched.read_text())["searches"]
    found = next(entry for entry in searches if entry["name"] == SEARCH_USED)["patterns"]["1/4"]
    short = options("uniform:1/4", "trial")
    short = HealOptions(**{**vars(short), "length": 512, "dense_steps": TRIAL_STEPS})
    ((trial, said),) = each(healed, [short])
    said_file = folder / "trial.txt"
    if not said_file.exists():
        write_whole(said_file, said)
    rate = trial.record["options"]["lr"]
    jobs = [
        options(pattern, name, lr=rate, evaluate_every=16)
        for pattern, name in (("uniform:1/4", "uniform"), (found, "searched"), ("full", "own"))
    ]
    for adapter, _ in each(healed, jobs):
        print(f"{adapter.folder}: {adapter.record['evaluations']}", flush=True)
    uniform, searched, own = (Adapter.read(job.output) for job in jobs)
    chosen = rows(books, HELD_OUT, arguments.rows, arguments.length)
    lines: list[Line] = []
    for name, pattern, adapters in (
        ("all F", own.pattern, (None, own)),
        ("1/4 uniform", uniform.pattern, (None, own, uniform)),
        (f"1/4 {SEARCH_USED}", searched.pattern, (None, own, searched)),
    ):
        for loss, adapter in zip(LOSSES, adapters, strict=False):
            model, key = Lean(arguments.model), digest
            if adapter is not None:
                model.adopt(adapter.tensors())
                key = adapter.digest
            arm = Arm(f"{name}, {loss}" if loss else name, pattern, arguments.topk)
            (line,) = measure(model, [arm], chosen, arguments.cache, key, print)
            lines.append({**line, "healed": loss})
    record = {
        "what": "patterns on SmolLM2 healed on a frozen body: text loss and recall, held-out books",
        "command": arguments.command,
        "checkpoint": digest,
        "machine": machine(),
        "books": {"healed on": TRAIN, "measured on": HELD_OUT},
        "measured": {"length": arguments.length, "index_topk": arguments.topk},
        "intervals": "t, 95 %, over rows; differences are paired by row",
        "trial": [line for line in said_file.read_text().splitlines() if "learning rate" in line],
        "adapters": {used.folder.name: used.record for used in (trial, uniform, searched, own)},
        "lines": lines,
    }
    text = table(lines)
    write_json(arguments.output.with_suffix(".json"), record)
    page = f"Written by `{arguments.command}`.\n\n{text}\n"
    write_whole(arguments.output.with_suffix(".md"), page)
    print(text)


if __name__ == "__main__":
    main()
