"""Measure what a folded indexer loses, beside sharing: picks missed, text loss, recall.

    python -m benchmarks.fold fit MODEL WORK [--texts FOLDER]
    python -m benchmarks.fold missed MODEL WORK [--texts FOLDER]
    python -m benchmarks.fold ask MODEL WORK [--texts FOLDER] [--rows 16] [--arms 17]
    python -m benchmarks.fold report - WORK [WORK ...] [--publish]

``fit`` reads text once and keeps the sums that slopes follow from; ``missed`` asks other text how
many of the exact picks are missed; ``ask`` runs the model under every configuration, row by row.
All in transformers, float32, on a CPU. Started again, each goes on where it was; ``--minutes``
ends one early. FOLDER has a ``prose.txt`` and perhaps others; without it the text is Python code.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fold.arms import Arm, arms, indexers, under
from benchmarks.fold.fits import TextSums, fits_from, least_squares_from, slopes_from, sums_of
from benchmarks.fold.missed import missed, schemes
from benchmarks.fold.report import report
from benchmarks.fold.texts import Question, Texts
from benchmarks.records import read_arguments
from sglang_indexcache.errors import QualityError
from sglang_indexcache.study.journal import Journal
from sglang_indexcache.study.provenance import checkpoint_digest
from sglang_indexcache.support.files import write_json

FIT_LENGTH, FIT_SHORT = 1024, 256
LONG = 4096


class Study:
    """One model's work folder.

    Args:
        model: the folder of the checkpoint.
        work: everything is kept here.
        texts: a folder of text files, or None.
        minutes: after which no forward begins.
    """

    def __init__(self, model: Path, work: Path, texts: Path | None, minutes: float) -> None:
        self.work, self.until = work, time.monotonic() + 60 * minutes
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.texts = Texts(AutoTokenizer.from_pretrained(model), texts)
        self.main_kind = "prose" if "prose" in self.texts.kinds else "code"
        work.mkdir(parents=True, exist_ok=True)
        self.facts = {
            "name": model.name,
            "digest": checkpoint_digest(model),
            "layers": len(indexers(self.model)),
            "heads": indexers(self.model)[0].n_heads,
            "width": indexers(self.model)[0].head_dim,
            "text": self.main_kind,
        }
        write_json(work / "model.json", self.facts)

    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.until

    # -- fits ---------------------------------------------------------------------------------

    def fit(self, main_texts: int, other_texts: int) -> None:
        """Read texts for fitting, those that are not yet read."""
        jobs = [(self.main_kind, number, FIT_LENGTH) for number in range(main_texts)]
        jobs.insert(1, (self.main_kind, 0, FIT_SHORT))
        others = [kind for kind in self.texts.kinds if kind != self.main_kind]
        jobs += [(kind, n, FIT_LENGTH) for kind in others for n in range(other_texts)]
        for kind, number, length in jobs:
            path = self._fit_path(kind, number, length)
            if not path.exists() and not self.late():
                ids = self.texts.fitting(kind, number, length)[None]
                path.parent.mkdir(exist_ok=True)
                torch.save(sums_of(self.model, ids), path)
                print("fit", path.name, flush=True)

    def fitted(self, kind: str, length: int = FIT_LENGTH) -> list[TextSums]:
        """Load the sums of the texts of a kind that were read."""
        found = sorted((self.work / "fit").glob(f"{kind}-{length}-*.pt"))
        return [torch.load(path, weights_only=False) for path in found]

    def _fit_path(self, kind: str, number: int, length: int) -> Path:
        return self.work / "fit" / f"{kind}-{length}-{number:02}.pt"

    # -- picks --------------------------------------------------------------------------------

    def missed(self, topk: int, length: int, rows: int, long_rows: int) -> None:
        """Ask other text what is missed: by way, layer and factor."""
        main = self.fitted(self.main_kind)
        name = f"slopes, {self.main_kind}"
        fits = {"plain": fits_from(self.model, main)["plain"]}
        fits["slopes, 256 tokens"] = slopes_from(self.fitted(self.main_kind, FIT_SHORT))
        for count in (1, 4, 16):
            if count <= len(main):
                fits[f"slopes, {count * FIT_LENGTH} tokens"] = slopes_from(main[:count])
        fits[name] = slopes_from(main)
        fits["least squares, 1024 tokens"] = least_squares_from(main[:1])
        fits["least squares"] = least_squares_from(main)
        for kind in self.texts.kinds:
            if kind != self.main_kind and (texts := self.fitted(kind)):
                fits[f"slopes, {kind}"] = slopes_from(texts)
        ways = schemes(fits, name)
        jobs = [(k, n, length) for n in range(rows) for k in self.texts.kinds]
        jobs += [(self.main_kind, number, LONG) for number in range(long_rows)]
        for kind, number, tokens in jobs:
            path = self.work / "missed" / f"{kind}-{tokens}-{topk}-{number}.json"
            if not path.exists() and not self.late():
                queries = slice(tokens // 2, None, 4) if tokens < LONG else slice(3072, None, 16)
                ids = self.texts.asked(kind, number, tokens)[None]
                found = missed(self.model, ids, queries, topk, ways)
                path.parent.mkdir(exist_ok=True)
                about = {"kind": kind, "tokens": tokens, "topk": topk, "row": number}
                write_json(path, {**about, "fit_tokens": len(main) * FIT_LENGTH, "missed": found})
                print("missed", path.name, flush=True)

    # -- the model's answers ------------------------------------------------------------------

    def ask(self, topk: int, rows: int, first_arms: int, tasks: int) -> None:
        """Run every configuration on every row, row by row.

        Args:
            tasks: tokens of a document of the small checkpoint's tasks; 0 asks passages instead.
        """
        fits = fits_from(self.model, self.fitted(self.main_kind))
        fit_texts = sorted(path.name for path in (self.work / "fit").iterdir())
        identity = {**self.facts, "topk": topk, "tasks": tasks, "fitted to": fit_texts}
        every = list(arms(len(indexers(self.model))).values())[:first_arms]
        path = self.work / f"answers-{topk}.jsonl"
        with Journal(path, identity, "study of folding", QualityError) as journal:
            done = {(entry["arm"], entry["row"]) for entry in journal.entries}
            for row in range(rows):
                for arm in every:
                    if (arm.name, row) in done or self.late():
                        continue
                    measures: dict[str, float] = {}
                    for task, question in self._questions(row, tasks):
                        measures |= self._answer(arm, fits, topk, task, question)
                    line = {"arm": arm.name, "row": row, **measures}
                    journal.write(line)
                    print(line, flush=True)

    def _questions(self, row: int, tasks: int) -> Iterator[tuple[str, Question]]:
        if not tasks:
            yield "recall", self.texts.passage(self.main_kind, row)
            return
        yield "recall", self.texts.task("recall", row, tasks)
        yield "needles", self.texts.task("needles", row, tasks)
        yield "", self.texts.plain(self.main_kind, row, tasks)

    @torch.no_grad()
    def _answer(
        self, arm: Arm, fits: dict[str, torch.Tensor], topk: int, task: str, question: Question
    ) -> dict[str, float]:
        """Nats a token, and shares of answers that are the greedy choice, by measure."""
        with under(self.model, arm, fits, topk, question.boundary):
            hidden = self.model.model(question.ids[None], use_cache=False).last_hidden_state[0]
        found: dict[str, float] = {}
        for name, places in ((task, question.answers), ("text", question.text)):
            if len(places):
                logits = self.model.lm_head(hidden[places - 1]).float()
                wanted = question.ids[places]
                loss = torch.nn.functional.cross_entropy(logits, wanted)
                found[f"{name} loss"] = float(loss)
                if name != "text":
                    found[f"{name} right"] = float((logits.argmax(-1) == wanted).float().mean())
        return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("fit", "missed", "ask", "report"))
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path, nargs="+")
    parser.add_argument("--texts", type=Path, help="a folder of KIND.txt")
    parser.add_argument("--topk", type=int, default=128, help="of ask")
    parser.add_argument("--missed-topk", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024, help="of the texts of missed")
    parser.add_argument("--rows", type=int, default=16, help="of ask")
    parser.add_argument("--arms", type=int, default=99, help="only the first so many")
    parser.add_argument("--tasks", type=int, default=0, help="tokens of the small model's tasks")
    parser.add_argument("--fit-texts", type=int, default=16, help="of 1,024 tokens")
    parser.add_argument("--long-rows", type=int, default=1, help="of 4,096 tokens, of missed")
    parser.add_argument("--minutes", type=float, default=600)
    arguments: Any = read_arguments(parser, "fold", quick={"rows": 1, "fit_texts": 1})
    if arguments.what == "report":
        report(arguments.work, arguments.output, arguments.command)
        return
    study = Study(arguments.model, arguments.work[0], arguments.texts, arguments.minutes)
    if arguments.what == "fit":
        study.fit(arguments.fit_texts, min(4, arguments.fit_texts))
    elif arguments.what == "missed":
        study.missed(arguments.missed_topk, arguments.length, 2, arguments.long_rows)
    else:
        study.ask(arguments.topk, arguments.rows, arguments.arms, arguments.tasks)


if __name__ == "__main__":
    main()
