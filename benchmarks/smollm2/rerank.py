"""S layers that rank their F layer's best 2k again by their own indexer: what do they gain?

    python -m benchmarks.smollm2.rerank runs/smollm2/built

An F layer selects k tokens for itself, and hands on its 2k best. Each S layer behind it scores
those 2k with its own indexer, and takes the k best of them. The patterns are those of
:mod:`.everywhere`, at 1/4 and 1/8; every row is run under all F, under each pattern as it is, and
under each pattern so ranked. A study only: no server does this.

Writes rerank.json below smollm2/; an interrupted study goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.records import RESULTS, estimate, markdown, read_arguments
from benchmarks.smollm2 import model_parser
from benchmarks.smollm2.books import HELD_OUT, Books, rows
from benchmarks.smollm2.domains import DOMAINS, TASKS, Texts
from benchmarks.smollm2.everywhere import judge
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.workers import one_thread
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.lab.stats.bounds import half_width
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.writing import write_json

RATIOS = ("1/4", "1/8")
METHODS = ("Algorithm 1", "default")
LONG, LIST = 131_072, 2_048
"""Tokens of a prompt, and of a list, at which dot products are counted."""
QUICK = {"books": 2, "kinds": [], "tasks": []}
Judged = list[dict[str, Any]]


class Reranking(Lean):
    """The lean forward in which every layer takes its own k best of ``depth`` times k candidates.

    The candidates are the F layer's best before it, so an F layer selects what it always does.
    """

    depth = 2

    def selected(self, number: int, read: torch.Tensor) -> list[torch.Tensor]:
        """Return a mask ``[rows, S]`` for each block: what an F layer hands on."""
        own, self.topk = self.topk, self.depth * self.topk
        try:
            return super().selected(number, read)
        finally:
            self.topk = own

    def taken(
        self, number: int, read: torch.Tensor, masks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return a mask for each block: the candidates that this layer itself scores highest."""
        queries, keys, weights = self.index_inputs(number, read)
        lists = []
        for block, candidates in zip(self.row_blocks(len(read)), masks, strict=True):
            if block.stop <= self.topk:
                lists.append(candidates)
                continue
            # Early queries have fewer candidates: what fills their rows is not allowed.
            places = candidates.byte().topk(min(self.depth * self.topk, block.stop)).indices
            hits = (queries[block] @ keys[places].mT).relu_().float()
            scores = (weights[block].unsqueeze(1) @ hits).squeeze(1)
            scores.masked_fill_(~candidates.gather(-1, places), float("-inf"))
            picked = places.gather(-1, scores.topk(self.topk).indices)
            lists.append(torch.zeros_like(candidates).scatter_(-1, picked, True) & candidates)
        return lists


def chosen(arms: dict[str, str], ratios: Sequence[str] = RATIOS) -> dict[str, str]:
    """Return the patterns to ask, each once, all F first; of the default search the first ones."""
    named = {"all F": arms["all F"]}
    for ratio in ratios:
        for method in METHODS:
            first = next(name for name in arms if name.startswith(f"{ratio} {method}"))
            if arms[first] not in named.values():
                named[first] = arms[first]
    return named


def dot_products(pattern: str, candidates: int) -> dict[str, float]:
    """Return the share of all F's index dot products that are left, S layers paying candidates.

    ``last``: of the token after ``LONG`` others, as a decode step has it; ``prompt``: of all.
    """
    full, shared = (pattern.count(letter) / len(pattern) for letter in "FS")
    seen = np.arange(1, LONG + 1)
    of_prompt = np.minimum(seen, candidates).sum() / seen.sum()
    return {"last": full + shared * candidates / LONG, "prompt": float(full + shared * of_prompt)}


def table(*records: dict[str, Any]) -> str:
    """Tabulate each pattern as it is and ranked again, against all F and against each other."""
    lines = []
    for record in records:
        for name, pattern in list(record["arms"].items())[1:]:
            for way, others in (("as it is", "all F"), ("again", "all F"), ("change", "as it is")):
                source = "again" if way == "change" else way
                left = record["dot_products"][name][source]
                cells = _cells(record, pattern, source, others)
                work = ("", "") if way == "change" else tuple(f"{left[k]:.3f}" for k in left)
                lines.append((record["index_heads"], name, pattern.count("F"), way, *cells, *work))
    header = ("heads", "", "F", "S layers", "recall, text", "tasks", "text loss", "KL, recalled",
              "dot products: decode", "prompt")  # fmt: skip
    return markdown(header, lines)


def _cells(record: dict[str, Any], pattern: str, way: str, others: str) -> list[str]:
    """Return the changes that a way of running a pattern makes to all F or to another way."""
    text = [group for group in record["judged"]["as it is"] if group not in TASKS]
    tasks = [group for group in record["judged"]["as it is"] if group in TASKS]

    def change(groups: Sequence[str], field: str, kind: str, scale: float) -> str:
        mine, its = (
            _values(record, groups, each, of, field, kind)
            for each, of in (
                (way, pattern),
                ("as it is", record["arms"]["all F"] if others == "all F" else pattern),
            )
        )
        over = [a - b for a, b in zip(mine, its, strict=True)]
        return estimate(float(np.mean(over)), half_width(over), scale) if over else ""

    return [
        *(change(groups, "right", "passages", 100) for groups in (text, tasks)),
        change(text, "losses", "text", 1),
        change([*text, *tasks], "kl", "passages", 1),
    ]


def _values(
    record: dict[str, Any], groups: Sequence[str], way: str, pattern: str, field: str, kind: str
) -> list[float]:
    judged: dict[str, dict[str, Judged]] = record["judged"][way]
    return [row[field][kind] for group in groups for row in judged[group][pattern]]


def main(argv: list[str] | None = None) -> None:
    """Judge, write."""
    one_thread()
    parser = model_parser(__doc__)
    parser.add_argument("--books", type=int, default=4, help="rows of the held-out books")
    parser.add_argument("--kinds", nargs="*", choices=list(DOMAINS), default=list(DOMAINS))
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--ratios", nargs="+", choices=RATIOS, default=list(RATIOS))
    parser.add_argument("--length", type=int, default=1024, help="of every row")
    parser.add_argument("--topk", type=int, default=64)
    parser.add_argument("--recorded", type=Path, default=RESULTS / "smollm2" / "everywhere.json",
                        help="has the patterns, of the same checkpoint's kind")  # fmt: skip
    arguments = read_arguments(parser, "smollm2/rerank", argv, QUICK)
    from transformers import AutoTokenizer

    tokenizer, digest = (
        AutoTokenizer.from_pretrained(arguments.model),
        checkpoint_digest(arguments.model),
    )
    texts, books = Texts(arguments.cache, tokenizer), Books(arguments.cache, tokenizer)
    groups = {"books": rows(books, HELD_OUT, arguments.books, arguments.length)}
    groups |= {task: texts.task_rows(task, 1, arguments.length) for task in arguments.tasks}
    groups |= {kind: texts.rows(kind, 1, arguments.length) for kind in arguments.kinds}
    arms = chosen(json.loads(arguments.recorded.read_text())["arms"], arguments.ratios)
    results, judged = arguments.cache / "everywhere" / digest[:12], {}
    # What stands in the journal of ``everywhere`` is not run again.
    ways = {"as it is": (Lean, "judged"), "again": (Reranking, f"again-{Reranking.depth}")}
    for way, (forward, name) in ways.items():
        model = forward.of_study(arguments)
        model.topk = arguments.topk
        journal = results / f"{name}-{model.topk}.jsonl"
        results.mkdir(parents=True, exist_ok=True)
        # All F is in both the same, but for equal scores.
        asked = list(arms.values())[way == "again" :]
        judged[way] = judge(model, groups, asked, journal, digest)
    candidates = Reranking.depth * LIST
    record = {
        "what": "S layers that rank their F layer's best 2k again, beside those that take its list",
        "command": arguments.command,
        "checkpoint": digest,
        "machine": machine(),
        "dtype": arguments.dtype,
        "index_heads": model.index_heads,
        "measured": {"length": arguments.length, "index_topk": model.topk},
        "intervals": "t, 95 %, over rows; differences are paired by row",
        "candidates": Reranking.depth,
        "dot_products_at": {"tokens": LONG, "index_topk": LIST},
        "arms": arms,
        "dot_products": {
            name: {"as it is": dot_products(pattern, 0), "again": dot_products(pattern, candidates)}
            for name, pattern in arms.items()
        },
        "judged": judged,
    }
    write_json(arguments.output.with_suffix(".json"), record)
    print(table(record))


if __name__ == "__main__":
    main()
