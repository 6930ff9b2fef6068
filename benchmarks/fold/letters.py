"""Search letters on SmolLM2 in one pass, and measure them beside patterns of F and S.

    python -m benchmarks.fold.letters runs/smollm2/built --books runs/smollm2 [--price 0.25]

A budget is what a pattern may cost in F layers, where an L layer costs ``--price``. For each budget
one pass over a few rows of one book chooses among F and S, and among F, L and S: by what the worst
head of a layer keeps of its attention on another layer's list, exact or folded. What was chosen is
asked on held-out books beside all F. L layers fold plainly. Writes fold/letters.json and its table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.fold.arms import Arm, Blocks, marked, selecting
from benchmarks.fold.models import InLean
from benchmarks.records import markdown, read_arguments
from benchmarks.smollm2.books import HELD_OUT, SEARCH, Books, Row, rows
from benchmarks.smollm2.evaluator import mass_on_lists
from benchmarks.smollm2.measure import HEADER, Line, columns
from benchmarks.smollm2.workers import each, one_thread
from sglang_indexcache.errors import QualityError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.evaluators.hf import lost_by_worst_head
from sglang_indexcache.search.methods.pairwise import most_similar
from sglang_indexcache.search.rules import Constraints, Folding
from sglang_indexcache.study.journal import Journal
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json, write_whole

QUICK = {"rows": 1, "search_rows": 1, "budgets": [4]}


@torch.no_grad()
def mass(model: InLean, row: Row, topk: int) -> Floats:
    """Return ``[N, 2 N, heads]``: the share of attention on plainly folded lists, then on exact.

    Counted at the text's places and the repeated ones.
    """
    plain, arm = torch.ones(model.heads, device=model.device), Arm("", "", "full")
    lists: dict[str, list[list[torch.Tensor]]] = {"L": [], "F": []}
    reads: list[torch.Tensor] = []

    def select(_layer: int, blocks: Blocks) -> list[torch.Tensor]:
        for of_letter in lists.values():
            of_letter.append([])
        for block in blocks():
            for letter, of_letter in lists.items():
                selected = marked(block, topk, plain, arm, letter) & block.visible
                of_letter[-1].append(selected[0])
        return [selected[None] for selected in lists["F"][-1]]

    model.states(row.ids, select, keep=lambda _number, read: reads.append(read))
    places = torch.cat([row.text, row.recall])
    return mass_on_lists(model, reads, [*lists["L"], *lists["F"]], places)


def chosen(mass_kept: Floats, budgets: Iterable[int], price: Fraction) -> list[tuple[str, Pattern]]:
    """Return all F, and for each budget what is chosen among F and S, and among F, L and S.

    Args:
        kept: ``[N, 2 N]``, as :func:`lost_by_worst_head` makes it.
    """
    layers = len(mass_kept)
    full = Pattern.full(layers)
    shared = Constraints.make(full)
    folding = Constraints.make(full, (), Folding(price, frozenset(range(layers))))
    choices = [("all F", full)]
    for budget in budgets:
        choices.append((f"{budget}, F and S", most_similar(mass_kept[:, layers:], budget, shared)))
        choices.append((f"{budget}, F, L and S", most_similar(mass_kept, budget, folding)))
    return choices


def ask(model: InLean, row: Row, pattern: Pattern, topk: int) -> dict[str, float]:
    """Run one row under one pattern; the fields are those of ``benchmarks.smollm2.measure``."""
    plain = torch.ones(model.layers, model.heads, device=model.device)
    arm = Arm("", pattern.layers, "both")
    states = model.states(row.ids, selecting(arm, plain, topk, len(row.ids)))
    text, _ = model.losses(states, row.ids, row.text)
    recall, right = model.losses(states, row.ids, row.recall)
    return {
        "loss": float(text.mean()),
        "recall_loss": float(recall.mean()),
        "recall": float(right.float().mean()),
    }


def cost(pattern: Pattern, price: Fraction) -> str:
    """Return what a pattern costs in F layers."""
    return f"{float(pattern.layers.count('F') + price * pattern.layers.count('L')):g}"


def main() -> None:
    """Search, measure, write."""
    one_thread()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--books", type=Path, required=True, help="SmolLM2's cache")
    parser.add_argument("--price", type=Fraction, default=Fraction(1, 4), help="of an L layer")
    parser.add_argument("--budgets", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--search-rows", type=int, default=4)
    parser.add_argument("--search-length", type=int, default=1024)
    parser.add_argument("--search-topk", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8, help="held-out rows")
    parser.add_argument("--length", type=int, default=2048, help="of held-out rows")
    parser.add_argument("--topk", type=int, default=128)
    arguments = read_arguments(parser, "fold/letters", quick=QUICK)
    model = InLean(arguments.model)
    books = Books(arguments.books, AutoTokenizer.from_pretrained(arguments.model))
    searched_on = rows(books, SEARCH, arguments.search_rows, arguments.search_length)
    matrices = each(lambda row: mass(model, row, arguments.search_topk), searched_on)
    mass_kept = np.mean([lost_by_worst_head(matrix) for matrix in matrices], axis=0)
    patterns = chosen(mass_kept, arguments.budgets, arguments.price)
    print(*(f"{name}: {pattern}" for name, pattern in patterns), sep="\n", flush=True)
    held_out = rows(books, HELD_OUT, arguments.rows, arguments.length)
    settings = {"topk": arguments.topk, "length": arguments.length, "rows": arguments.rows}
    identity = {"checkpoint": checkpoint_digest(arguments.model), **settings}

    def work(job: tuple[str, int]) -> dict[str, object]:
        layers, number = job
        answers = ask(model, held_out[number], Pattern(layers), arguments.topk)
        return {"pattern": layers, "row": number, **answers}

    path = (
        arguments.books / "letters" / f"{arguments.topk}-{arguments.length}-{arguments.rows}.jsonl"
    )
    with Journal(path, identity, "study of letters", QualityError) as journal:
        recorded = {(line["pattern"], line["row"]): line for line in journal.entries}
        every = {(p.layers, n): None for _, p in patterns for n in range(len(held_out))}
        for line in each(work, [job for job in every if job not in recorded]):
            journal.write(line)
            recorded[line["pattern"], line["row"]] = line
            print(line, flush=True)
    lines: list[Line] = [
        {
            "name": name,
            "pattern": pattern.layers,
            "cost": cost(pattern, arguments.price),
            "rows": [recorded[pattern.layers, number] for number in range(len(held_out))],
        }
        for name, pattern in patterns
    ]
    record = {
        "what": "letters of SmolLM2 by one pass, L folded plainly: text loss and recall, held out",
        "command": arguments.command,
        "machine": machine(),
        **identity,
        "price": float(arguments.price),
        "intervals": "t, 95 %, over rows; differences are paired by row",
        "lines": lines,
    }
    table = markdown(
        ("budget, letters", "pattern", "cost", *HEADER),
        ((x["name"], f"`{x['pattern']}`", x["cost"], *columns(x, lines[0])) for x in lines),
    )
    write_json(arguments.output.with_suffix(".json"), record)
    text = f"Written by `{arguments.command}`.\n\n{table}\n"
    write_whole(arguments.output.with_suffix(".md"), text)
    print(table)


if __name__ == "__main__":
    main()
