"""Count wrong claims of no loss where prompts share documents: each counted alone, or recognised.

    python -m benchmarks.quality_documents [--evaluations 4000] [--contexts 720] [--seed 0]

Questions about one document fail together. So a file's prompts are grouped by the text that they
are about, and each text counts once. The files here are made of the Python standard library:
contexts of 600 to 1,000 words with eight questions behind each, in which a document comes
several times,

* behind different openings, and else to the letter;
* with its parts in another order, behind different openings;
* as a third of the text, beside two thirds that no other context has: less than what is recognised.

`select_rows`, which chooses what `indexcache eval run --rows` asks, says what it takes for one
text. Evaluations are then simulated in which a document loses all answers wherever it stands, one
document in a hundred, which is the margin; and in which nothing is lost. An engine flips 2 % of
answers. "Before" counts every context alone, as was done while only common beginnings were seen.

Writes quality/documents.json.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from benchmarks.quality_statistics import HeldBack, batches, flipped, judge
from benchmarks.records import read_arguments
from sglang_indexcache.data.documents import MACHINE, Text, read_documents
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.lab.evaluate.corpus import select_rows
from sglang_indexcache.lab.evaluate.plan import EvaluationPlan
from sglang_indexcache.lab.evaluate.tasks.context import QUESTIONS
from sglang_indexcache.stats.pairs import Floats
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json

NAME = "quality/documents"
QUICK = {"evaluations": 200, "contexts": 160}
SHARED_BY = (2, 4, 8)
"""Contexts of each document."""
KINDS = ("behind other openings", "parts in another order", "a third of the text")
WORDS, SHORT, THIRD, PARTS = 1000, 600, 200, 4
"""Words of a context; of one where that many are not to be had; and of what is shared there."""
FLIPS, MARGIN = 0.02, 0.01
LENGTH, SELECTS_ALL = 8192, 64

Places = npt.NDArray[np.int64]


def documents(length: int) -> Iterator[list[str]]:
    """Yield stretches of so many words of the standard library, none of them twice."""
    for document in read_documents(MACHINE):
        assert isinstance(document, Text)
        words = document.text.split()
        for start in range(0, len(words) - length + 1, length):
            yield words[start : start + length]


def words_of(kind: str, shared_by: int) -> int:
    """Return the number of words of a context."""
    return SHORT if kind == KINDS[2] or shared_by == 1 else WORDS


def contexts(kind: str, shared_by: int, count: int, seed: int) -> list[str]:
    """Make contexts of which each document is in ``shared_by``, one after another."""
    chance, texts, length = random.Random(seed), [], words_of(kind, shared_by)
    source = documents(length - THIRD if kind == KINDS[2] else length)
    for number in range(count):
        if number % shared_by == 0:
            shared = next(source)
        words = shared
        if kind == KINDS[1]:
            size = length // PARTS
            parts = [shared[start : start + size] for start in range(0, length, size)]
            words = [word for part in chance.sample(parts, PARTS) for word in part]
        elif kind == KINDS[2]:
            filler = next(source)
            place = chance.randrange(len(filler))
            words = filler[:place] + shared[:THIRD] + filler[place:]
        opening = " ".join(str(chance.randrange(10**6)) for _ in range(20))
        texts.append(f"Request {number:04}, reference {opening}.\n{' '.join(words)}")
    return texts


def recognise(texts: list[str], shared_by: int) -> tuple[int, Places]:
    """Return the number of texts that are recognised, and the document of each that is asked."""
    plan = EvaluationPlan((), (LENGTH,), len(texts), QUESTIONS, SELECTS_ALL, MARGIN)
    tokenizer = AutoTokenizer.from_pretrained(shipped_checkpoint())
    with TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for text in texts:
                for question in range(QUESTIONS):
                    row = {"prompt": f"{text}\nQuestion {question}?", "answer": " yes"}
                    file.write(json.dumps(row) + "\n")
        selection, _, _ = select_rows(plan, {"prompts": path}, tokenizer, LENGTH)
    [cell] = selection.taken
    assert set(cell.questions or (1,)) == {QUESTIONS}
    rows = np.array(cell.rows, dtype=np.int64) - 1
    return cell.available, rows // QUESTIONS // shared_by


def claims(places: Places, evaluations: int, seed: int) -> dict[str, float]:
    """Return how often "no loss" is claimed at a loss of the margin, and of none.

    Args:
        places: the document of each context, in the order of asking.
        evaluations: simulated.
        seed: of the answers.
    """

    def drawn(chance: np.random.Generator, world: HeldBack, count: int, times: float) -> Floats:
        collapsed = chance.random((count, places.max() + 1)) < times * world.margin
        return np.where(collapsed[:, places], -1.0, flipped(chance, world, count, FLIPS))

    world = HeldBack((len(places),), MARGIN, drawn)
    chance, design, shares = np.random.default_rng(seed), world.design, {}
    for times, label in ((1.0, "no_loss_at_margin"), (0.0, "no_loss_at_none")):
        safe = 0
        for size in batches(evaluations):
            differences = world.evaluations(chance, size, times)
            rows = judge(differences, design, lambda look: design.contexts * look // design.looks)
            safe += int(rows.safe.sum())
        shares[label] = safe / evaluations
    return shares


def world(kind: str, shared_by: int, count: int, evaluations: int, seed: int) -> dict[str, Any]:
    """Return what is recognised in one kind of file, and the claims before and now."""
    recognised, places = recognise(contexts(kind, shared_by, count, seed), shared_by)
    alone = np.random.default_rng(seed).permutation(np.arange(count) // shared_by)
    return {
        "kind": kind,
        "shared_by": shared_by,
        "words": words_of(kind, shared_by),
        "contexts": count,
        "documents": -(-count // shared_by),
        "texts_recognised": recognised,
        "before": claims(alone, evaluations, seed + 1),
        "now": claims(places, evaluations, seed + 2),
    }


def main() -> None:
    """Run the study and write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=4000, help="per world")
    parser.add_argument("--contexts", type=int, default=720, help="of each file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = read_arguments(parser, NAME, quick=QUICK)
    cases = [(KINDS[0], 1), *((kind, shared_by) for kind in KINDS for shared_by in SHARED_BY)]
    rows = []
    for number, case in enumerate(cases):
        seed = arguments.seed + 10 * number
        rows.append(world(*case, arguments.contexts, arguments.evaluations, seed))
        print(rows[-1], flush=True)
    write_json(
        arguments.output.with_suffix(".json"),
        {
            "command": arguments.command,
            "evaluations": arguments.evaluations,
            "seed": arguments.seed,
            "machine": machine(),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
