"""Let ``indexcache eval`` judge patterns of a built model on passages of whole books held out.

    python -m benchmarks.smollm2.verdicts runs/smollm2/built 1/4=FSFF... 1/8=FSSS... --lengths 2Ki

The published tasks are too hard for a model of this size, so the command is given rows of its own:
behind a text, eight times the beginning of one of its passages, to be continued word for word. The
command itself asks, judges and reports. Behind its URL stands ``benchmarks.smollm2.answers``, which
takes a fraction of a server's time on this model. Interrupted, the same line goes on. Writes a
folder for each length (``eval.json``, ``report.html``) and smollm2/verdicts/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.paper import indexcache
from benchmarks.records import estimate, markdown, read_arguments
from benchmarks.smollm2 import CACHE
from benchmarks.smollm2.answers import Answers, serving
from benchmarks.smollm2.books import HELD_OUT, Books
from sglang_indexcache.library import Slopes
from sglang_indexcache.support.files import write_whole
from sglang_indexcache.support.lengths import parse_length

QUICK = {"lengths": ["1Ki"], "contexts": 8}
QUESTIONS, CUE, ANSWER = 8, 16, 4
"""Passages asked for behind a text; tokens that begin one, and that continue it."""
WRITTEN = ("eval.json", "report.html")


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


def judge(arguments: argparse.Namespace, books: Books, url: str, length: str) -> dict[str, Any]:
    """Run the command for one length; return what it wrote."""
    folder = arguments.cache / "verdicts" / length
    folder.mkdir(parents=True, exist_ok=True)
    rows = questions(books, arguments.contexts, parse_length(length))
    file = folder / "passages.jsonl"
    write_whole(file, "".join(f"{json.dumps(row)}\n" for row in rows))
    patterns = [text.split("=", 1)[1] for text in arguments.patterns]
    indexcache(
        *("eval", "run", *patterns, "--model", arguments.model, "--url", url, "--yes"),
        *("--rows", f"prompts={file}", "--length", length, "--margin", str(arguments.margin)),
        *("--contexts", str(arguments.contexts), "--output", folder),
    )
    target = arguments.output / length
    target.mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:
        shutil.copy(folder / name, target / name)
    evaluation: dict[str, Any] = json.loads((folder / "eval.json").read_text())
    return evaluation


def table(evaluations: Mapping[str, dict[str, Any]], names: Mapping[str, str]) -> str:
    """Tabulate the verdicts of each length, patterns by their names."""
    rows = []
    for length, evaluation in evaluations.items():
        for verdict in evaluation["verdicts"]:
            low, high = verdict["interval"] or (0.0, 0.0)
            change = estimate((low + high) / 2, (high - low) / 2, 100) if high > low else ""
            words = verdict["headline"].partition(": ")[2]
            name = names.get(verdict["pattern"], verdict["pattern"])
            rows.append((length, name, verdict["contexts"], change, words))
    return markdown(("tokens", "pattern", "contexts", "points, 90 %", "verdict"), rows)


def main(argv: list[str] | None = None) -> None:
    """Judge, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("patterns", nargs="+", metavar="NAME=PATTERN")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--slopes", type=Path, help="file by which patterns fold: NAME=folded@FILE")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--lengths", nargs="+", default=["2Ki", "4Ki"])
    parser.add_argument("--contexts", type=int, default=64, help="texts of each length")
    parser.add_argument("--margin", type=float, default=5.0, help="in points")
    arguments = read_arguments(parser, "smollm2/verdicts", argv, QUICK)
    from transformers import AutoTokenizer

    books = Books(arguments.cache, AutoTokenizer.from_pretrained(arguments.model))
    slopes = None if arguments.slopes is None else Slopes.read(arguments.slopes)
    with serving(Answers(arguments.model, arguments.device, slopes)) as url:
        evaluations = {length: judge(arguments, books, url, length) for length in arguments.lengths}
    names = {pattern: name for name, _, pattern in (t.partition("=") for t in arguments.patterns)}
    text = f"Written by `{arguments.command}`.\n\n{table(evaluations, names)}\n"
    write_whole(arguments.output / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
