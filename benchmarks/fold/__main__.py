"""Measure what a folded indexer loses, beside sharing: picks missed, text loss, recall.

    python -m benchmarks.fold fit MODEL WORK [--books CACHE]
    python -m benchmarks.fold missed MODEL WORK [--books CACHE]
    python -m benchmarks.fold ask MODEL WORK [--books CACHE] [--rows 8] [--arms 5]
    python -m benchmarks.fold report - WORK [WORK ...] [--publish]

``fit`` keeps what every indexer multiplies on some text, and fits slopes to it; ``missed`` asks
other text how many of the exact picks are missed; ``ask`` runs the model under every configuration,
row by row. With ``--books`` MODEL is SmolLM2 as ``benchmarks.smollm2`` builds it, run and asked by
that package's fast forward and held-out books; without it, a checkpoint in transformers with the
small checkpoint's tasks. Float32, on a CPU with one thread; started again, each goes on where it
was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.fold.arms import PLAIN, SLOPES, Arm, arms, selecting
from benchmarks.fold.fits import FITS
from benchmarks.fold.missed import missed, ways
from benchmarks.fold.models import InLean, InTransformers, Model
from benchmarks.fold.report import report
from benchmarks.fold.texts import BooksAndCode, Code, Question, Texts
from benchmarks.records import read_arguments
from benchmarks.smollm2.workers import one_thread
from sglang_indexcache.errors import QualityError
from sglang_indexcache.fold import IndexRow
from sglang_indexcache.study.journal import Journal, claim
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import replacing, write_json

SAMPLED = 112
"""Queries of a text that are looked at, spread over its last seven eighths."""
FITTED = 2
"""Texts that a fit reads unless its name says otherwise."""


class Study:
    """One model's work folder.

    Args:
        folder: of the checkpoint.
        books: the cache of SmolLM2's books; None where the model is another.
        work: everything is kept here.
        topk: tokens that a query attends to.
        length: of every text, in tokens.
        device: that SmolLM2 runs on.
    """

    def __init__(
        self, folder: Path, books: Path | None, work: Path, topk: int, length: int, device: str
    ):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model: Model = InLean(folder, device) if books else InTransformers(folder)
        self.device = device if books else "cpu"
        self.texts: Texts = BooksAndCode(books, tokenizer) if books else Code(tokenizer)
        self.kind = self.texts.kinds[0]
        self.work, self.topk, self.length = work, topk, length
        self.facts = {
            "name": folder.name,
            "digest": checkpoint_digest(folder),
            "layers": self.model.layers,
            "heads": self.model.heads,
            "width": self.model.width,
            "text": self.kind,
        }
        work.mkdir(parents=True, exist_ok=True)
        claim(work / "model.json", self.facts, "study of folding", QualityError)
        if not (work / "machine.json").exists():  # the report may be written on another
            write_json(work / "machine.json", machine())

    # -- what the indexers multiply ---------------------------------------------------------------

    def inputs(self, part: str, kind: str, number: int) -> list[IndexRow]:
        """Return every layer's inputs on a text, ``part`` "fitting" or "asked"; computed once."""
        path = self.work / "inputs" / f"{part}-{kind}-{self.length}-{number:02}.pt"
        if not path.exists():
            text = self.texts.fitting if part == "fitting" else self.texts.asked
            queries = slice(self.length // 8, None, self.length * 7 // 8 // SAMPLED)
            inputs = self.model.inputs(text(kind, number, self.length), self.topk, queries)
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as part_of:
                torch.save([_cast(row, torch.bfloat16, "cpu") for row in inputs], part_of)
            print(path.name, flush=True)
        rows = torch.load(path, weights_only=False)
        return [_cast(row, torch.float32, self.device) for row in rows]

    def slopes(self, fit: str, kind: str, texts: int = FITTED) -> torch.Tensor:
        """Return ``[layers, H]`` of one fit over a kind's first so many texts; computed once."""
        if fit == PLAIN:
            return torch.ones(self.model.layers, self.model.heads, device=self.device)
        name = f"{fit}, {kind}, {texts} x {self.length}, k {self.topk}"
        path = self.work / "fits" / f"{name.replace(' ', '-')}.pt"
        if not path.exists():
            rows = [self.inputs("fitting", kind, number) for number in range(texts)]
            layers = zip(*rows, strict=True)
            slopes = torch.stack([FITS[fit](layer, self.topk) for layer in layers])
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as part:
                torch.save(slopes, part)
            print(path.name, flush=True)
        return torch.load(path).to(self.device)

    def fit(self) -> None:
        """Fit slopes in every way."""
        for name in FITS:
            self.slopes(name, self.kind)

    # -- picks ------------------------------------------------------------------------------------

    def missed(self, rows: int, other_kinds: bool) -> None:
        """Ask other text what is missed: by way, layer and factor.

        Args:
            others: ask other kinds of text too, and fit to them.
        """
        kinds = self.texts.kinds if other_kinds else (self.kind,)
        fits = {name: self.slopes(name, self.kind) for name in (PLAIN, *FITS)}
        fits[f"{SLOPES}, half of the text"] = self.slopes(SLOPES, self.kind, FITTED // 2)
        for kind in kinds[1:]:
            fits[f"{SLOPES} of {kind}"] = self.slopes(SLOPES, kind)
        scores = ways(fits, SLOPES)
        for number, kind in ((n, kind) for n in range(rows) for kind in kinds):
            path = self.work / "missed" / f"{kind}-{self.length}-{self.topk}-{number}.json"
            if not path.exists():
                by_score: dict[str, list[dict[str, float]]] = {name: [] for name in scores}
                for layer, row in enumerate(self.inputs("asked", kind, number)):
                    for name, shares in missed(row, layer, self.topk, scores).items():
                        by_score[name].append(shares)
                path.parent.mkdir(exist_ok=True)
                about = {"kind": kind, "tokens": self.length, "topk": self.topk, "row": number}
                write_json(path, {**about, "fit_tokens": FITTED * self.length, "missed": by_score})
                print("missed", path.name, flush=True)

    # -- the model's answers ----------------------------------------------------------------------

    def ask(self, rows: int, first: int, names: list[str]) -> None:
        """Run the first so many configurations, or those that are named, row by row."""
        every = arms(self.model.layers)
        chosen = [every[name] for name in names] or list(every.values())[:first]
        path = self.work / f"answers-{self.topk}-{self.length}.jsonl"
        identity = {**self.facts, "topk": self.topk, "length": self.length, "rows": rows}
        with Journal(path, identity, "study of folding", QualityError) as journal:
            answered = {(entry["arm"], entry["row"]) for entry in journal.entries}
            for row in range(rows):
                for arm in chosen:
                    if (arm.name, row) not in answered:
                        started = time.monotonic()
                        line = {"arm": arm.name, "row": row, **self._answers(arm, row, rows)}
                        journal.write(line)
                        print(f"{time.monotonic() - started:4.0f} s", line, flush=True)

    def _answers(self, arm: Arm, row: int, rows: int) -> dict[str, float]:
        measures: dict[str, float] = {}
        slopes = self.slopes(arm.fit if arm.folds else PLAIN, self.kind)
        for question in self.texts.questions(row, rows, self.length):
            select = selecting(arm, slopes, self.topk, question.boundary)
            measures |= dict(self._answer(question, self.model.states(question.ids, select)))
        return measures

    def _answer(self, question: Question, states: torch.Tensor) -> Iterator[tuple[str, float]]:
        """Return nats a token, and shares of answers that are the greedy choice, by measure."""
        for name, places in ((question.task, question.answers), ("text", question.text)):
            if len(places):
                loss, right = self.model.losses(states, question.ids, places)
                yield f"{name} loss", float(loss.mean())
                if name != "text":
                    yield f"{name} right", float(right.float().mean())


def _cast(row: IndexRow, dtype: torch.dtype, device: str) -> IndexRow:
    queries, keys = row.queries.to(device, dtype), row.keys.to(device, dtype)
    return IndexRow(queries, keys, row.weights.to(device), row.visible.to(device))


def main() -> None:
    """Run one step by its command line."""
    one_thread()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("fit", "missed", "ask", "report"))
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path, nargs="+")
    parser.add_argument("--books", type=Path, help="SmolLM2's cache: MODEL is SmolLM2")
    parser.add_argument("--device", default="cpu", help="with --books: cpu or cuda")
    parser.add_argument("--topk", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048, help="tokens of every text")
    parser.add_argument("--rows", type=int, default=8, help="of ask")
    parser.add_argument("--arms", type=int, default=99, help="only the first so many")
    parser.add_argument("--only", nargs="+", default=[], help="these configurations")
    parser.add_argument("--asked", type=int, default=2, help="texts of each kind, of missed")
    parser.add_argument("--one-kind", action="store_true", help="of text, of missed")
    arguments: Any = read_arguments(parser, "fold", quick={"rows": 1, "arms": 2, "asked": 1})
    if arguments.what == "report":
        report(arguments.work, arguments.output, arguments.command)
        return
    work, books = arguments.work[0], arguments.books
    sizes = arguments.topk, arguments.length
    study = Study(arguments.model, books, work, *sizes, arguments.device)
    if arguments.what == "fit":
        study.fit()
    elif arguments.what == "missed":
        study.missed(arguments.asked, not arguments.one_kind)
    else:
        study.ask(arguments.rows, arguments.arms, arguments.only)


if __name__ == "__main__":
    main()
