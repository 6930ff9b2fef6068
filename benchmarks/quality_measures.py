r"""How many documents does it take to see a loss: by answers, by their likelihood, by all tokens?

    python -m benchmarks.quality_measures --work runs/measures [--rounds 48] [--redraw]

The shipped small checkpoint behind one real server in live mode, every request naming its pattern:
notes (`evaluate/tasks/notes.py`) with all their questions and right answers behind them, asked in
one prefill under all F and under twelve patterns of differing harm. From the same forward come
three measures of a document: the share of right answers, the nats of an answer, and the nats of
every token that sees more than ``index_topk`` others. The last is what a language-model loss sees.

For each pattern and measure: the paired difference from all F with its standard error over
documents, and the documents with which a one-sided 5 % test sees it 8 times in 10. Then whether the
measures put the patterns into the same order, and how well each measure on few documents foretells
the order of right answers on the others.

Each document is on disk before it counts: a killed run goes on where it was, more ``--rounds``
extend it, and ``--redraw`` asks nothing. Writes quality/measures.json and .png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import track
from scipy.special import ndtri
from scipy.stats import rankdata
from transformers import AutoTokenizer

from benchmarks.records import RUNS, read_arguments
from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.launch import Server
from sglang_indexcache.ask.score import Prompt, TokenScores, score
from sglang_indexcache.bench.tables import Grid
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.chat import Tokenizer
from sglang_indexcache.evaluate.tasks.context import Context, make_context
from sglang_indexcache.evaluate.tasks.notes import notes
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.stats.pairs import Floats
from sglang_indexcache.study.journal import Journal
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json
from sglang_indexcache.support.text import machine_text

NAME = "quality/measures"
QUICK = {"rounds": 2}
LAYERS = 12
FULL = "all F"
LENGTHS = (128, 256, 512)
TASK = "notes"
HAYSTACK_CHARACTERS = 6_000_000
MEASURES = {"right": "right answers", "answers": "answer NLL", "tokens": "loss of all tokens"}
"""Each a mean over a document."""
RIGHT = "right"
COLOURS = {"right": "#333333", "answers": "#1f5fa8", "tokens": "#c9711a"}
FEW = (6, 12, 24, 48)
"""Documents from which the order of the patterns is foretold."""
RESAMPLES = 2000


def spearman(first: Floats, second: Floats) -> Floats:
    """Rank correlation along the last axis, ties sharing their mean rank; NaN for a constant."""
    ranks = [rankdata(values, axis=-1) for values in (first, second)]
    one, two = (rank - rank.mean(axis=-1, keepdims=True) for rank in ranks)
    scale = np.sqrt((one**2).sum(axis=-1) * (two**2).sum(axis=-1))
    with np.errstate(invalid="ignore"):
        correlation: Floats = (one * two).sum(axis=-1) / scale
    return correlation


def patterns() -> dict[str, Pattern]:
    """All F, searched, uniform, random, and near the searched ones; none of them twice."""
    found = {FULL: Pattern.full(LAYERS)}
    found |= {name: Pattern(text) for name, text in SEARCHED.items()}
    found |= {f"uniform 1/{ratio}": Pattern.uniform(LAYERS, ratio) for ratio in (2, 3, 4)}
    draw = random.Random("random patterns")
    for name, count in RANDOM.items():
        while name not in found:
            layers = [0, *draw.sample(range(1, LAYERS), count - 1)]
            if (pattern := Pattern.from_layers(LAYERS, layers)) not in found.values():
                found[name] = pattern
    for name, (start, seed) in NEAR.items():
        draw = random.Random(f"near {seed}")
        while name not in found:
            old = Pattern(SEARCHED[start])
            gone, new = draw.choice(old.full_layers[1:]), draw.choice(old.shared_layers)
            layers = [new if layer == gone else layer for layer in old.full_layers]
            if (pattern := Pattern.from_layers(LAYERS, layers)) not in found.values():
                found[name] = pattern
    return found


SEARCHED = {"searched 1/2": "FFFSFFSFSSSS", "searched 1/4": "FFFSSSSSSSSS"}
"""patterns/tiny-dsa-1of2.yaml and -1of4.yaml, as they were when this was measured."""
RANDOM = {
    f"random {mark}": count for mark, count in zip("abcdefg", (8, 8, 6, 6, 6, 4, 3), strict=True)
}
"""F layers of the random patterns."""
NEAR = {
    "near 1/2, a": ("searched 1/2", 0),
    "near 1/2, b": ("searched 1/2", 1),
    "near 1/4, a": ("searched 1/4", 2),
    "near 1/4, b": ("searched 1/4", 3),
}
"""A searched pattern with one F layer moved: what a search has to choose between."""


@dataclass(frozen=True)
class Document:
    """A context with all its questions and right answers, as one sequence.

    Attributes:
        name: unique.
        length: the cell that it belongs to.
        ids: the tokens.
        answers: where the right answers' tokens lie.
    """

    name: str
    length: int
    ids: list[int]
    answers: list[int]


def document(context: Context) -> Document:
    """What is asked of every pattern at once."""
    ids: list[int] = list(context.ids)
    answers: list[int] = []
    for question in context.questions:
        ids += question.ids
        answers += range(len(ids), len(ids) + len(question.answer))
        ids += question.answer
    return Document(context.name, context.length, ids, answers)


def documents(rounds: int, tokenizer: Tokenizer, haystack: str) -> Iterator[Document]:
    """One of each length a round, always the same ones."""
    for seed in range(rounds):
        for length in LENGTHS:
            yield document(make_context(TASK, notes, tokenizer, length, seed, haystack=haystack))


def measured(found: TokenScores, asked: Document, topk: int) -> dict[str, Any]:
    """What one pattern makes of a document: a list of right answers, and two of nats.

    Args:
        found: of every token but the first.
        asked: the document.
        topk: tokens that a query selects; those before are left out of the mean of all.
    """
    nats = [0.0, *(-own for own in found.logprobs)]
    best = [0.0, *(top[0][1] for top in found.tops)]
    return {
        "right": [int(-nats[place] >= best[place]) for place in asked.answers],
        "answers": [round(nats[place], 6) for place in asked.answers],
        "tokens": round(sum(nats[topk:]) / len(nats[topk:]), 6),
    }


def ask(client: Client, asked: Document, arms: Mapping[str, Pattern], topk: int) -> dict[str, Any]:
    """One document under every pattern, in the same batch."""
    prompts = [
        Prompt(asked.ids, str(pattern), name, len(asked.ids) - 1) for name, pattern in arms.items()
    ]
    found = score(client, prompts, top=1)
    return {name: measured(one, asked, topk) for name, one in zip(arms, found, strict=True)}


def collect(work: Path, rounds: int, *, only_read: bool) -> list[dict[str, Any]]:
    """Every document's line of the journal, in the order of asking; asks what is missing."""
    checkpoint = shipped_checkpoint()
    arms = patterns()
    haystack = "\n".join(machine_text(HAYSTACK_CHARACTERS))
    topk = int(json.loads((checkpoint / "config.json").read_text())["index_topk"])
    identity = {
        "checkpoint": checkpoint_digest(checkpoint),
        "haystack": hashlib.sha256(haystack.encode()).hexdigest()[:16],
        "patterns": {name: str(pattern) for name, pattern in arms.items()},
    }
    with closing(Journal(work / "journal.jsonl", identity, "study", QualityError)) as journal:
        known = {line["document"]: line for line in journal.entries}
        if only_read:
            return list(known.values())
        every = list(documents(rounds, AutoTokenizer.from_pretrained(checkpoint), haystack))
        left = [one for one in every if one.name not in known]
        if left:
            flags = ["--attention-backend", "indexcache", "--indexcache-mode", "live"]
            flags += ["--model-path", str(checkpoint), "--dtype", "float32"]
            with Server(flags, work / "server.log") as server:
                client = server.wait_until_ready()
                for one in track(left, "asking"):
                    line = {"document": one.name, "length": one.length}
                    line["arms"] = ask(client, one, arms, topk)
                    journal.write(line)
                    known[one.name] = line
        return [known[one.name] for one in every]


# -- statistics -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Every measure of every document as a difference from all F; a loss is positive.

    Attributes:
        patterns: the names, without all F.
        lengths: int64 [documents].
        values: by measure, float64 [patterns, documents].
    """

    patterns: tuple[str, ...]
    lengths: npt.NDArray[np.int64]
    values: Mapping[str, Floats]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Table:
        """The journal's lines as differences."""
        names = tuple(name for name in lines[0]["arms"] if name != FULL)
        values = {}
        for measure in MEASURES:
            every = {
                name: np.array([np.mean(line["arms"][name][measure]) for line in lines])
                for name in (FULL, *names)
            }
            sign = -1 if measure == RIGHT else 1
            values[measure] = np.array([sign * (every[name] - every[FULL]) for name in names])
        return cls(names, np.array([line["length"] for line in lines]), values)

    def deviation(self, measure: str) -> Floats:
        """float64 [patterns]: standard deviation of a document's difference, within lengths."""
        found = np.zeros(len(self.patterns))
        for length in np.unique(self.lengths):
            here = self.values[measure][:, self.lengths == length]
            found += here.var(axis=1, ddof=1) * here.shape[1]
        deviation: Floats = np.sqrt(found / len(self.lengths))
        return deviation


def needed(mean: float, deviation: float, documents: int) -> int | None:
    """Documents with which a one-sided 5 % test sees a loss 8 times in 10.

    By the normal approximation, with the mean and deviation that were found; None where this study
    did not see it, because then nobody knows the mean.
    """
    if mean < ndtri(0.95) * deviation / documents**0.5:
        return None
    drift = float(ndtri(0.95) + ndtri(0.8))
    return math.ceil((drift * deviation / mean) ** 2)


def resampled(table: Table, count: int, draws: int = RESAMPLES) -> npt.NDArray[np.int64]:
    """int64 [draws, documents]: ``count`` documents, with equal shares of every length."""
    draw = np.random.default_rng(0)
    parts = []
    for length in np.unique(table.lengths):
        here = np.flatnonzero(table.lengths == length)
        parts.append(draw.choice(here, (draws, count // len(LENGTHS))))
    return np.concatenate(parts, axis=1)


def agreement(table: Table, first: str, second: str) -> dict[str, float]:
    """Spearman's rho of two measures' orders of the patterns, with a 95 % interval over documents.

    The same documents are drawn for both, by percentiles of a bootstrap.
    """
    chosen = resampled(table, len(table.lengths))
    one, two = (table.values[name] for name in (first, second))
    drawn = spearman(one[:, chosen].mean(axis=2).T, two[:, chosen].mean(axis=2).T)
    low, high = np.percentile(drawn, [2.5, 97.5])
    rho = float(spearman(one.mean(axis=1), two.mean(axis=1)))
    return {"rho": rho, "low": float(low), "high": float(high)}


def foretold(table: Table, measure: str, count: int, draws: int = RESAMPLES) -> dict[str, float]:
    """How well a measure on ``count`` documents tells the order of right answers on all others.

    Mean of Spearman's rho over random choices, and what 90 % of them lie between. With the other
    documents, no measure profits from the luck of its own.
    """
    draw = np.random.default_rng(1)
    found = []
    for _ in range(draws):
        few = np.concatenate(
            [
                draw.choice(np.flatnonzero(table.lengths == length), count // len(LENGTHS), False)
                for length in LENGTHS
            ]
        )
        others = np.setdiff1d(np.arange(len(table.lengths)), few)
        found.append(
            spearman(
                table.values[measure][:, few].mean(axis=1),
                table.values[RIGHT][:, others].mean(axis=1),
            )
        )
    low, high = np.nanpercentile(found, [5, 95])
    return {"rho": float(np.nanmean(found)), "low": float(low), "high": float(high)}


def analysed(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that is said of the documents."""
    table = Table.of(lines)
    means = {name: table.values[name].mean(axis=1) for name in MEASURES}
    deviations = {name: table.deviation(name) for name in MEASURES}
    rows = []
    for place, name in enumerate(table.patterns):
        row: dict[str, Any] = {"name": name, "pattern": str(patterns()[name])}
        for measure in MEASURES:
            mean, deviation = means[measure][place], deviations[measure][place]
            row[measure] = {
                "difference": float(mean),
                "error": float(deviation / len(table.lengths) ** 0.5),
                "deviation": float(deviation),
                "needed": needed(float(mean), float(deviation), len(table.lengths)),
            }
        rows.append(row)
    pairs = ((RIGHT, "answers"), (RIGHT, "tokens"), ("answers", "tokens"))
    full = [line["arms"][FULL] for line in lines]
    return {
        "documents": len(lines),
        "answers": sum(len(line[RIGHT]) for line in full),
        "full": {name: float(np.mean([np.mean(one[name]) for one in full])) for name in MEASURES},
        "patterns": rows,
        "agreement": {f"{one}-{two}": agreement(table, one, two) for one, two in pairs},
        "foretold": {
            str(count): {name: foretold(table, name, count) for name in MEASURES} for count in FEW
        },
    }


# -- report -----------------------------------------------------------------------------------


HARD = 2
"""Documents; a loss that every measure sees with as many is no test of them."""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """The documents that each measure needs where that is more than a few, and the two orders."""
    figure, (documents_axis, answers_axis, tokens_axis) = make_figure(13, 4.2, columns=3)
    rows = sorted(result["patterns"], key=lambda row: row["answers"]["difference"])
    hard = [row for row in rows if any((row[m]["needed"] or 1e9) > HARD for m in MEASURES)]
    most = 2.5 * result["documents"]
    for shift, (measure, colour) in zip((-0.2, 0, 0.2), COLOURS.items(), strict=True):
        needed = [row[measure]["needed"] for row in hard]
        places = [place + shift for place in range(len(hard))]
        documents_axis.plot(
            [count or most for count in needed], places, "o", ms=5, color=colour,
            label=MEASURES[measure],
        )  # fmt: skip
    documents_axis.set_xscale("log")
    ticks = [1, 3, 10, 30, 100]
    documents_axis.set_xticks([*ticks, most], [*map(str, ticks), "not seen"])
    documents_axis.minorticks_off()
    documents_axis.set_yticks(range(len(hard)), [row["name"] for row in hard])
    documents_axis.set_xlabel(f"documents needed to see the loss, of {result['documents']}")
    easy = f"not drawn: {len(rows) - len(hard)} patterns, seen by all three in {HARD} documents"
    documents_axis.set_title(easy, fontsize=9, loc="left")
    for axis, measure, unit in (
        (answers_axis, "answers", "nats an answer"),
        (tokens_axis, "tokens", "nats a token"),
    ):
        axis.errorbar(
            [row[measure]["difference"] for row in rows],
            [100 * row[RIGHT]["difference"] for row in rows],
            xerr=[1.96 * row[measure]["error"] for row in rows],
            yerr=[196 * row[RIGHT]["error"] for row in rows],
            fmt="o", ms=4, lw=0.8, color=COLOURS[measure],
        )  # fmt: skip
        found = result["agreement"][f"{RIGHT}-{measure}"]
        axis.set_title(
            f"{len(rows)} patterns, rank correlation {found['rho']:.2f} "
            f"({found['low']:.2f} to {found['high']:.2f})",
            fontsize=9,
            loc="left",
        )
        axis.set_xlabel(f"added {MEASURES[measure]}, {unit}")
        axis.axhline(0, color="black", lw=0.6)
        axis.axvline(0, color="black", lw=0.6)
    answers_axis.set_ylabel("right answers lost, points")
    figure.legend(
        *documents_axis.get_legend_handles_labels(), loc="outside lower center", ncols=3,
        frameon=False, fontsize=9, title="measured by (bars: 95 % intervals)", title_fontsize=8,
    )  # fmt: skip
    for axis in (documents_axis, answers_axis, tokens_axis):
        axis.grid(alpha=0.25)
    save_figure(figure, path)


def table(result: Mapping[str, Any]) -> Grid:
    """What each measure says of each pattern, and with how many documents."""

    def cell(row: Mapping[str, Any], measure: str) -> str:
        found = row[measure]
        scale, digits = (100, 1) if measure == RIGHT else (1, 3)
        mean, half = (scale * found[name] for name in ("difference", "error"))
        seen = "not seen" if found["needed"] is None else f"{found['needed']:,}"
        return f"{mean:+.{digits}f} ± {1.96 * half:.{digits}f} ({seen})"

    rows = tuple(
        (f"{row['name']} `{row['pattern']}`", *(cell(row, measure) for measure in MEASURES))
        for row in sorted(result["patterns"], key=lambda row: row["answers"]["difference"])
    )
    title = (
        f"{result['documents']} documents with {result['answers']:,} answers; in brackets the "
        "documents needed to see the loss"
    )
    units = {"right": "points lost", "answers": "nats an answer", "tokens": "nats a token"}
    return Grid(title, ("pattern", *units.values()), rows)


def orders(result: Mapping[str, Any]) -> Grid:
    """How far the measures agree on the order of the patterns."""

    def said(found: Mapping[str, float]) -> str:
        return f"{found['rho']:.2f} ({found['low']:.2f} to {found['high']:.2f})"

    rows = [
        (" and ".join(MEASURES[name] for name in pair.split("-")), "all, the same", said(found))
        for pair, found in result["agreement"].items()
    ]
    rows += [
        (f"{MEASURES[name]} and {MEASURES[RIGHT]}", f"{count}, and all others", said(found))
        for count in (str(FEW[0]), str(FEW[-1]))
        for name, found in result["foretold"][count].items()
    ]
    title = (
        "In brackets a 95 % interval over documents where they are the same, and what 90 % of "
        "random choices lie between where they are others"
    )
    return Grid(title, ("order by", "documents", "Spearman's rho"), tuple(rows))


def main() -> None:
    """Ask what is missing and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, default=RUNS / "quality/measures.work", help="of the log and journal"
    )
    parser.add_argument("--rounds", type=int, default=48, help="documents of each length")
    parser.add_argument("--redraw", action="store_true", help="from the journal alone")
    arguments = read_arguments(parser, NAME, quick=QUICK)
    lines = collect(arguments.work, arguments.rounds, only_read=arguments.redraw)
    result = {
        "command": arguments.command,
        "what": "what three measures see of a pattern's harm, and with how many documents",
        "checkpoint": checkpoint_digest(shipped_checkpoint()),
        "task": TASK,
        "lengths": LENGTHS,
        "machine": machine(),
        **analysed(lines),
    }
    write_json(arguments.output.with_suffix(".json"), result)
    draw(result, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
