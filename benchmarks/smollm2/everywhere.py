"""Does a searched pattern hold on other people's text? Searches on many kinds, judged on all.

    python -m benchmarks.smollm2.everywhere runs/smollm2/built

The package's default search runs on one kind of text at a time (and on several together), as a
user's would. What it finds is then run on rows of kinds of text and tasks that it never saw, beside
Algorithm 1's patterns, one pass as it was, similarity's and uniform ones, which the record of
:mod:`.searched` has. Every row is run under all F, too: recall and loss are compared with it row by
row, and the divergence of the next token's distribution is from it.

Writes everywhere.json below smollm2/, and its tables; an interrupted study goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.records import RESULTS, estimate, markdown, read_arguments
from benchmarks.smollm2 import model_parser
from benchmarks.smollm2.books import HELD_OUT, SEARCH, Books, Row, rows
from benchmarks.smollm2.domains import DOMAINS, TASKS, Texts
from benchmarks.smollm2.evaluator import LeanEvaluator
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.measure import named
from benchmarks.smollm2.workers import one_thread
from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.runs.journal import Journal
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.lab.search.ledger import Ledger, open_journal
from sglang_indexcache.lab.search.methods import METHODS
from sglang_indexcache.lab.search.recall import KEYS, PASSAGES, TEXT, hidden_facts, with_recall
from sglang_indexcache.lab.search.rules import Constraints, parse_targets
from sglang_indexcache.lab.search.run import Found, Search
from sglang_indexcache.lab.stats.bounds import half_width
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.writing import write_json, write_whole
from sglang_indexcache.pattern import Pattern

RATIOS = ("1/2", "1/4", "1/8")
CORPORA = ("documentation", "novel", "essay", "play", "C", "French", "dialogues", "Python", "mixed")
"""Searched texts: whole books of documentation, a domain's first half, or some domains'."""
MIXED = ("novel", "C", "French", "quotes")
QUICK = {"corpora": ["novel"], "kinds": ["play"], "tasks": ["codes"], "rows": 1, "length": 1024}
RECORDED = {"greedy:mixed": "Algorithm 1", "one-pass:mixed": "one pass as it was",
            "similarity:mixed": "similarity"}  # fmt: skip
"""Searches of the record of :mod:`.searched`, and their names here."""


def calibration(name: str, texts: Texts, books: Books, count: int, length: int) -> list[Row]:
    """Return rows to search on, with passages and facts as the package mixes them in."""
    if name == "documentation":
        cuts = books.cuts(SEARCH, count, length)
    elif name == "mixed":
        of_each = -(-count // len(MIXED))
        by_kind = [texts.cuts(kind, of_each, length, measured=False) for kind in MIXED]
        cuts = [cut for places in zip(*by_kind, strict=True) for cut in places][:count]
    else:
        cuts = texts.cuts(name, count, length, measured=False)
    return [_row(cut, texts) for cut in cuts]


def _row(cut: torch.Tensor, texts: Texts) -> Row:
    ids = tuple(cut.tolist())
    mixed, kinds = with_recall(ids, hidden_facts(str(ids), texts.encode))
    places = [torch.from_numpy(np.flatnonzero(kinds == kind)) for kind in (TEXT, PASSAGES, KEYS)]
    return Row(torch.tensor(mixed), *places)


def search(evaluator: LeanEvaluator, cache: Path) -> dict[str, Any]:
    """Run the package's default search, and return what it found and said; kept in ``cache``."""
    if cache.exists():
        outcome: dict[str, Any] = json.loads(cache.read_text())
        return outcome
    rules = Constraints.make(Pattern.full(evaluator.num_layers))
    cache.parent.mkdir(parents=True, exist_ok=True)
    identity = {"evaluator": evaluator.kind, "rows": [row.digest for row in evaluator.rows]}
    with open_journal(cache.with_suffix(".jsonl"), identity) as journal:
        ledger, targets = Ledger(evaluator, journal), parse_targets(list(RATIOS), rules)
        run = Search(ledger, targets, METHODS["proposals"])
        for event in run.run():
            if isinstance(event, Found) and event.is_compared:
                print(f"{cache.stem}: {event.mark.label} {event.pattern.full_layers}", flush=True)
    safe = run.safe
    outcome = {
        "patterns": {result.mark.label: str(result.pattern) for result in run.found.values()},
        "own": {r.mark.label: r.judged.numbers() for r in run.found.values() if r.judged},
        "sure": {
            result.mark.label: [layer for layer, sure in result.layers.items() if sure.is_sure]
            for result in run.found.values()
        },
        "smallest_that_keeps_recall": safe.mark.label if safe else None,
        "of_greedy": run.search_tokens / run.exhaustive,
    }
    write_json(cache, outcome)
    return outcome


def arms(
    recorded: Path, searches: dict[str, dict[str, Any]], layers: int, ratios: Sequence[str]
) -> dict[str, str]:
    """Return the patterns to judge by their names, ``all F`` first, then ratio by ratio."""
    arms = {"all F": "F" * layers}
    entries = json.loads(recorded.read_text())["searches"]
    for ratio, blind in named(ratios, layers).items():
        for corpus, outcome in searches.items():
            arms[f"{ratio} default, on {corpus}"] = outcome["patterns"][ratio]
        for entry in entries:
            if name := RECORDED.get(entry["name"]):
                arms[f"{ratio} {name}"] = entry["patterns"][ratio]
        arms[f"{ratio} uniform"] = str(blind)
    for corpus, outcome in searches.items():
        if (safe := outcome["smallest_that_keeps_recall"]) not in (*ratios, None):
            arms[f"{safe} default, on {corpus}"] = outcome["patterns"][safe]
    return arms


def judge(
    model: Lean, groups: dict[str, list[Row]], patterns: Sequence[str], path: Path, digest: str
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return by group and pattern what each row shows; what the journal has is not run again."""
    identity = {"checkpoint": digest, "dtype": str(model.dtype), "topk": model.topk}
    with Journal(path, identity, "study of this checkpoint", QualityError) as journal:
        entries = {(entry["row"], entry["pattern"]): entry["judged"] for entry in journal.entries}
        judged: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for group, of_group in groups.items():
            judged[group] = {pattern: [] for pattern in patterns}
            for number, row in enumerate(of_group):
                evaluator = LeanEvaluator(model, [row], "mixed")
                for pattern in sorted(patterns, reverse=True):  # alike beginnings are run once
                    key = row.digest, pattern
                    if key not in entries:
                        [judged_row] = evaluator.judge(Pattern(pattern), [0])
                        entries[key] = judged_row.numbers()
                        journal.write({"row": key[0], "pattern": pattern, "judged": entries[key]})
                    judged[group][pattern].append(entries[key])
                print(f"{group}: row {number + 1} of {len(of_group)}", flush=True)
    return judged


# -- tables ------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """Tabulate every arm beside all F: books, other kinds of text, and tasks."""
    kinds, tasks = ([g for g in record["judged"] if g in named] for named in (DOMAINS, TASKS))
    columns = {"books": ["books"], "other text": kinds, "tasks": tasks}
    text, header = ["books", *kinds], (
        *("", "F", "KL: text", "recalled", "likeliest kept: text", "recalled", "text loss"),
        *(f"recall: {name}" for name in columns),
    )  # fmt: skip
    lines = []
    for name, pattern in record["arms"].items():
        of_text, everything = (
            beside(record, pattern, groups) for groups in (text, [*text, *tasks])
        )
        cells = [
            *(_mean(of_text, "kl", "text"), _mean(everything, "kl", "passages")),
            *(_share(of_text, "kept", "text"), _share(everything, "kept", "passages")),
            change(of_text, "losses", "text", 1),
            *(_recall(record, name, groups) for groups in columns.values()),
        ]
        if name == "all F":
            cells[:5] = [""] * 5
        lines.append((name, pattern.count("F"), *cells))
    return markdown(header, lines)


def in_short(*records: dict[str, Any]) -> str:
    """Tabulate 1/4 and 1/8 of each record: divergence, and recall beside all F and Algorithm 1."""
    lines = []
    for record in records:
        kinds, tasks = ([g for g in record["judged"] if g in named] for named in (DOMAINS, TASKS))
        by_method: dict[str, dict[str, list[str]]] = {}
        for name, pattern in record["arms"].items():
            ratio, _, method = name.partition(" ")
            if ratio in RATIOS[1:] and method != "uniform":
                every = list(record["judged"])
                by_method.setdefault(method, {})[ratio] = [
                    _mean(beside(record, pattern, every), "kl", "passages"),
                    *(_recall(record, name, groups) for groups in (["books", *kinds], tasks)),
                    _against_algorithm_1(record, name, ratio),
                ]
        methods: dict[tuple[str, ...], list[str]] = {}  # of several texts that gave the same
        for method, cells in by_method.items():
            row = tuple(cell for ratio in RATIOS[1:] for cell in cells[ratio])
            methods.setdefault(row, []).append(method)
        for row, names in methods.items():
            name = ", ".join([names[0], *(each.removeprefix("default, on ") for each in names[1:])])
            lines.append((record["index_heads"], name, *row))
    columns = ("KL", "recall, text", "tasks", "beside Algorithm 1")
    header = ("heads", "", *(f"{ratio}: {name}" for ratio in RATIOS[1:] for name in columns))
    return markdown(header, lines)


def _against_algorithm_1(record: dict[str, Any], name: str, ratio: str) -> str:
    """Return the points of recall by which an arm differs from Algorithm 1's, on all rows."""
    best, pattern = f"{ratio} Algorithm 1", record["arms"][name]
    if name == best:
        return ""
    if pattern == record["arms"][best]:
        return "the same"
    return change(beside(record, pattern, list(record["judged"]), best), "right", "passages", 100)


def details(record: dict[str, Any]) -> str:
    """Tabulate recall by every kind of text and task: all F's level, and points against it."""
    header = ("", *record["judged"])
    lines = [
        (name, *(_recall(record, name, [group]) for group in record["judged"]))
        for name in record["arms"]
    ]
    return markdown(header, lines)


def _recall(record: dict[str, Any], name: str, groups: Sequence[str]) -> str:
    """Return the share of recalled tokens that are right: all F's, or the change against it."""
    pairs = beside(record, record["arms"][name], groups)
    if name == "all F":
        return _share(pairs, "right", "passages")
    return change(pairs, "right", "passages", 100)


Pairs = list[tuple[dict[str, Any], dict[str, Any]]]


def beside(
    record: dict[str, Any], pattern: str, groups: Sequence[str], arm: str = "all F"
) -> Pairs:
    """Return what rows show under a pattern, each beside the same row under an arm's."""
    other = record["arms"][arm]
    return [
        pair
        for group in groups
        for pair in zip(
            record["judged"][group][pattern], record["judged"][group][other], strict=True
        )
    ]


def _mean(pairs: Pairs, field: str, kind: str) -> str:
    values = [row[field][kind] for row, _ in pairs]
    return estimate(float(np.mean(values)), half_width(values), sign="")


def _share(pairs: Pairs, field: str, kind: str) -> str:
    return f"{100 * np.mean([row[field][kind] for row, _ in pairs]):.1f} %"


def change(pairs: Pairs, field: str, kind: str, scale: float) -> str:
    """Estimate the mean paired difference of a field, and its 95 % interval."""
    values = [row[field][kind] - full[field][kind] for row, full in pairs]
    return estimate(float(np.mean(values)), half_width(values), scale)


def searches_table(record: dict[str, Any]) -> str:
    """Tabulate what the default search found on each kind of text, and what it said."""
    rows = [
        (
            corpus,
            *(" ".join(map(str, Pattern(outcome["patterns"][r]).full_layers)) for r in RATIOS[1:]),
            outcome["smallest_that_keeps_recall"] or "none",
            f"{100 * outcome['of_greedy']:.1f} %",
        )
        for corpus, outcome in record["searches"].items()
    ]
    header = ("searched on", "F layers at 1/4", "at 1/8", "fewest that keep recall", "tokens")
    return markdown(header, rows)


def study_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = model_parser(__doc__)
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--kinds", nargs="*", choices=list(DOMAINS), default=list(DOMAINS))
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--ratios", nargs="+", choices=RATIOS, default=list(RATIOS))
    parser.add_argument("--batches", type=int, default=16, help="rows that are searched on")
    parser.add_argument("--search-length", type=int, default=1024)
    parser.add_argument("--search-topk", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="of each kind of text and task")
    parser.add_argument("--books", type=int, default=4, help="rows of the held-out books")
    parser.add_argument("--length", type=int, default=2048, help="of those rows")
    parser.add_argument("--topk", type=int, default=128)
    parser.add_argument("--recorded", type=Path, default=RESULTS / "smollm2" / "searched.json",
                        help="of the same checkpoint's kind")  # fmt: skip
    parser.add_argument("--searched-only", action="store_true", help="end before the judging")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Search, judge, write."""
    one_thread()
    arguments = read_arguments(study_parser(), "smollm2/everywhere", argv, QUICK)
    from transformers import AutoTokenizer

    model = Lean.of_study(arguments)
    tokenizer, digest = (
        AutoTokenizer.from_pretrained(arguments.model),
        checkpoint_digest(arguments.model),
    )
    texts, books = Texts(arguments.cache, tokenizer), Books(arguments.cache, tokenizer)
    model.topk = arguments.search_topk
    searches = {}
    results = arguments.cache / "everywhere" / digest[:12]
    for corpus in arguments.corpora:
        chosen = calibration(corpus, texts, books, arguments.batches, arguments.search_length)
        size = f"{arguments.batches}-{arguments.search_length}-{model.topk}-{arguments.dtype}"
        searches[corpus] = search(
            LeanEvaluator(model, chosen, "mixed"), results / f"{corpus}-{size}.json"
        )
    if arguments.searched_only:
        return
    model.topk = arguments.topk
    count, length = arguments.rows, arguments.length
    groups = {"books": rows(books, HELD_OUT, arguments.books, length)}
    groups |= {task: texts.task_rows(task, count, length) for task in arguments.tasks}
    groups |= {kind: texts.rows(kind, count, length) for kind in arguments.kinds}
    patterns = arms(arguments.recorded, searches, model.layers, arguments.ratios)
    distinct = list(dict.fromkeys(patterns.values()))
    record = {
        "what": "the default search on many kinds of text, judged on others and on tasks",
        "command": arguments.command,
        "checkpoint": digest,
        "machine": machine(),
        "dtype": arguments.dtype,
        "index_heads": model.index_heads,
        "searched": {"length": arguments.search_length, "index_topk": arguments.search_topk,
                     "rows": arguments.batches},
        "measured": {"length": length, "index_topk": model.topk},
        "intervals": "t, 95 %, over rows; differences are paired by row",
        "searches": searches,
        "arms": patterns,
        "judged": judge(model, groups, distinct, results / f"judged-{model.topk}.jsonl", digest),
    }  # fmt: skip
    write_json(arguments.output.with_suffix(".json"), record)
    tables = f"{searches_table(record)}\n\n{table(record)}\n\n{details(record)}"
    page = f"Written by `{record['command']}`.\n\n{tables}\n"
    write_whole(arguments.output.with_suffix(".md"), page)
    print(tables)


if __name__ == "__main__":
    main()
