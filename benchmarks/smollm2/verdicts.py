"""Let ``indexcache eval`` judge patterns of a built model on passages of whole books held out.

    python -m benchmarks.smollm2.verdicts runs/smollm2/built 1/4=FSFF... 1/8=FSSS... --lengths 2Ki

What eval generates is too hard for a model of this size (``--task-contexts 4`` measures how much),
so it is given rows of its own: behind a text, eight times the beginning of one of its passages, to
be continued word for word. The command itself asks, judges and reports. Behind its URL stands
``benchmarks.smollm2.answers``, which takes a fraction of a server's time on this model.
Interrupted, the same line goes on. Writes a folder for each length (``eval.json``,
``report.html``, the journal), tasks.json, and smollm2/verdicts/README.md and commands.json, which
tell of every length that was judged there.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.paper import indexcache
from benchmarks.records import markdown, read_arguments
from benchmarks.smollm2 import model_parser
from benchmarks.smollm2.answers import Answers, serving
from benchmarks.smollm2.books import HELD_OUT, Books
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.evaluate.corpus import Corpus
from sglang_indexcache.lab.evaluate.evaluation import NAME as JOURNAL
from sglang_indexcache.lab.evaluate.evaluation_plan import Planned, arms_of, context_name
from sglang_indexcache.lab.evaluate.servers import Servers
from sglang_indexcache.lab.evaluate.tasks import TASKS
from sglang_indexcache.lab.evaluate.tasks.context import QUESTIONS as ASKED_BEHIND
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.lengths import parse_length
from sglang_indexcache.library.resolve import name_and_pattern
from sglang_indexcache.library.writing import write_json, write_whole

QUICK = {"lengths": ["1Ki"], "contexts": 8}
QUESTIONS, CUE, ANSWER = 8, 16, 4
"""Passages asked for behind a text; tokens that begin one, and that continue it."""
TASK_TOKENS = 1024
"""Tokens of a generated context: the shortest in which every task has room."""
WRITTEN = ("eval.json", "report.html")
COMMANDS = "commands.json"
"""File of the line that judged each length."""


def questions(books: Books, contexts: int, length: int) -> Iterator[dict[str, str]]:
    """Yield the rows behind each text: passages from all over it, each begun again.

    The answer begins with a word, so that it has the same tokens behind the cue as in the text.
    """
    decode = books.tokenizer.decode
    # Words that are cut at an end may have other tokens, and a line lies between text and cue.
    room = length - CUE - ANSWER - 16
    for seed, cut in enumerate(books.cuts(HELD_OUT, contexts, room)):
        chance, part = random.Random(seed), (room - CUE - ANSWER - 32) // QUESTIONS
        for number in range(QUESTIONS):
            start = number * part + chance.randrange(part)
            words = (at for at in range(start + CUE, room) if decode(cut[at]).startswith(" "))
            middle = next(words, start + CUE)
            cue, answer = cut[middle - CUE : middle], cut[middle : middle + ANSWER]
            prompt = f"{decode(cut)}\n\n{decode(cue)}"
            yield {"prompt": prompt, "answer": decode(answer)}


def right_by_task(model: Path, url: str, contexts: int) -> dict[str, float]:
    """Return the share of questions of each generated task that all F answer right."""
    from transformers import AutoTokenizer

    reference = arms_of(model, "full", (), "")[0]
    servers = Servers([reference], {"": Client(url)})
    corpus, shares = Corpus(AutoTokenizer.from_pretrained(model), ASKED_BEHIND), {}
    for task in TASKS:
        right = []
        for seed in range(contexts):
            planned = Planned(context_name(task, TASK_TOKENS, seed), task, TASK_TOKENS, 1, False)
            [(answers, _)] = servers.ask(corpus.make(planned), [(reference, 0)])
            right += [answer.right for answer in answers]
        shares[task] = sum(right) / len(right)
        print(f"{task}: {shares[task]:.0%} of {len(right)} right", flush=True)
    return shares


def judge(arguments: argparse.Namespace, books: Books, url: str, length: str) -> None:
    """Run the command for one length, and keep what it wrote."""
    asked = (checkpoint_digest(arguments.model), arguments.dtype, arguments.patterns)
    settings = json.dumps((*asked, arguments.contexts, arguments.margin)).encode()
    name = f"{length}-{hashlib.sha256(settings).hexdigest()[:8]}"  # an eval folder is of one run
    folder = arguments.cache / "verdicts" / name
    folder.mkdir(parents=True, exist_ok=True)
    rows = questions(books, arguments.contexts, parse_length(length))
    file = folder / "passages.jsonl"
    write_whole(file, "".join(f"{json.dumps(row)}\n" for row in rows))
    indexcache(
        *("eval", "run", *arguments.patterns, "--model", arguments.model, "--url", url, "--yes"),
        *("--rows", f"prompts={file}", "--length", length, "--margin", str(arguments.margin)),
        *("--contexts", str(arguments.contexts), "--output", folder),
    )
    target = arguments.output / length
    target.mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:
        shutil.copy(folder / name, target / name)
    packed = gzip.compress((folder / JOURNAL).read_bytes(), mtime=0)
    (target / f"{JOURNAL}.gz").write_bytes(packed)
    commands = arguments.output / COMMANDS
    before = json.loads(commands.read_text()) if commands.exists() else {}
    write_json(commands, before | {length: arguments.command})


def table(folder: Path, names: Mapping[str, str]) -> str:
    """Tabulate the verdicts of each length that a folder has, patterns by their names."""
    rows = []
    lengths = [file.parent.name for file in folder.glob("*/eval.json")]
    for length in sorted(lengths, key=parse_length):
        for verdict in json.loads((folder / length / "eval.json").read_text())["verdicts"]:
            middle, interval = "", ""  # where the task cannot see a loss
            if verdict["interval"] is not None:
                middle = f"{100 * verdict['difference']:+.1f}"
                interval = " to ".join(f"{100 * end:+.1f}" for end in verdict["interval"])
            words = verdict["headline"].partition(": ")[2]
            name = names.get(verdict["pattern"], verdict["pattern"])
            for letters, given in names.items():
                words = words.replace(letters, given)
            rows.append((length, name, verdict["contexts"], middle, interval, words))
    header = ("tokens", "pattern", "contexts", "points", "90 % interval", "verdict")
    return markdown(header, rows)


def main(argv: list[str] | None = None) -> None:
    """Judge, write."""
    parser = model_parser(__doc__)
    parser.add_argument("patterns", nargs="*", metavar="NAME=PATTERN")
    parser.add_argument("--lengths", nargs="+", default=["2Ki", "4Ki"])
    parser.add_argument("--contexts", type=int, default=64, help="texts of each length")
    parser.add_argument("--task-contexts", type=int, default=0, help="of each generated task")
    parser.add_argument("--margin", type=float, default=5.0, help="in points")
    arguments = read_arguments(parser, "smollm2/verdicts", argv, QUICK)
    from transformers import AutoTokenizer

    books = Books(arguments.cache, AutoTokenizer.from_pretrained(arguments.model))
    text = f"Written by `{arguments.command}`; the line of each length is in `{COMMANDS}`.\n\n"
    dtype = getattr(torch, arguments.dtype)
    with serving(Answers(arguments.model, arguments.device, dtype)) as url:
        if count := arguments.task_contexts:
            shares = right_by_task(arguments.model, url, count)
            facts = {"command": arguments.command, "machine": machine(), "contexts": count}
            write_json(arguments.output / "tasks.json", facts | {"right": shares})
            shown = [(task, f"{share:.0%}") for task, share in shares.items()]
            text += markdown(("generated task", "right, all F"), shown) + "\n\n"
        for length in arguments.lengths if arguments.patterns else ():
            judge(arguments, books, url, length)
    pairs = map(name_and_pattern, arguments.patterns)
    # The runs that are published here are older than eval's names.
    names = {name_and_pattern(pattern)[0]: name for name, pattern in pairs}
    text += f"{table(arguments.output, names)}\n"
    write_whole(arguments.output / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
