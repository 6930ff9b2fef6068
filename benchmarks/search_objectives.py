"""Which calibration objective ranks patterns as users feel them? On the shipped small checkpoint.

For every pattern: what each objective says of it on calibration documents, and how many answers
the model gets right under it on other documents. Then, within a retention, the rank correlation of
the two, and what descents on each objective arrive at.

python -m benchmarks.search_objectives --work runs/objectives [--settings own] [--rows 64]

Each measurement is appended to a journal in the work folder before it counts, so a killed run goes
on where it was, and a run with fewer ``--rows`` than were measured only reports.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from transformers import AutoTokenizer

from benchmarks.training.batches import TEXT
from sglang_indexcache.data.machine import TEXT_CHARACTERS, MachineText, Tokens, window
from sglang_indexcache.data.retrieval import TASKS, TaskDocument, TaskWords, facts_in
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators import BatchLosses, Floats
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.methods.greedy import greedy
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.rules import Constraints, parse_targets
from sglang_indexcache.search.run import Search
from sglang_indexcache.stats.student import half_width
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "sglang_indexcache" / "demo" / "tiny-dsa"
RESULT = Path(__file__).parent / "results" / "search" / "objectives.json"

COUNTS = (6, 3, 2)
"""F layers at which patterns are compared."""
DRAWN = (12, 8, 6, 5, 4, 3, 2)
"""F layers at which a descent is drawn."""
DESCENTS = ("all", "late", "answers")
"""Objectives that are searched on."""
OBJECTIVES = (*DESCENTS, "kl", "late_kl", "late_top1")
CALIBRATED_ON = (TEXT, *TASKS)
"""Documents of one calibration batch."""
RECALL_EVERY = 2
"""Of recall one row in so many: a document has dozens of answers where others have a few."""
RESAMPLES = 2000
_REUSE_BYTES = 1 << 29


@dataclass(frozen=True)
class Setting:
    """A document length, and how much of it a layer may select.

    Attributes:
        name: of its journal.
        length: tokens of a document.
        topk: selected tokens.
        batches: calibration batches, each one document of each kind.
        patterns: with 6 and with 3 F layers, of those that descents visit and of random ones.
        rows: held-out documents of a task; see :func:`rows_of`.
    """

    name: str
    length: int
    topk: int
    batches: int
    patterns: int
    rows: int


SETTINGS = (Setting("starved", 256, 16, 6, 44, 24), Setting("own", 512, 64, 3, 18, 15))


# -- documents --------------------------------------------------------------------------------


def interleaved(words: TaskWords, text: Tokens, length: int, draw: random.Random) -> TaskDocument:
    """Facts spread over the first half of a text, questions about them over its second half."""
    pairs = words.draw(facts_in(length), draw)
    notes = [_line([*words.note, name, *words.be], value, words, False) for name, value in pairs]
    asked = draw.sample(pairs, len(pairs))
    questions = [_line([*words.ask, name, *words.be], value, words, True) for name, value in asked]
    lines = notes + questions
    filler = window(text, length - sum(map(len, lines)), draw)
    document = TaskDocument()
    for piece, line in zip(np.array_split(filler, len(lines)), lines, strict=True):
        document.add(piece.tolist())
        document.add(line.ids)
        document.answer[-len(line) :] = line.answer
    return document


def _line(start: list[int], value: int, words: TaskWords, answer: bool) -> TaskDocument:
    line = TaskDocument()
    line.add(start)
    line.add([value], answer=answer)
    line.add(words.end)
    return line


@cache
def _materials() -> tuple[TaskWords, Tokens, Tokens]:
    """The tasks' words, source code that training never saw, and English prose, as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    source = MachineText.read(tokenizer, TEXT_CHARACTERS).held_out
    english = "\n".join(text for _, text in sorted(topics.topics.items()))
    prose = tokenizer(english, add_special_tokens=False)["input_ids"]
    return TaskWords(tokenizer), source, np.asarray(prose, dtype=np.int32)


class Documents:
    """Calibration documents and held-out ones; no filler text is in both.

    Args:
        length: tokens of each.

    Attributes:
        words: of the tasks.
    """

    def __init__(self, length: int) -> None:
        self.words, unseen, self._prose = _materials()
        self._length = length
        self._calibration, self._source = unseen[: len(unseen) // 2], unseen[len(unseen) // 2 :]

    def calibration(self, task: str, row: int) -> TaskDocument:
        """TaskDocument ``row`` of a kind that is searched on."""
        draw = random.Random(f"calibration/{task}/{self._length}/{row}")
        if task == TEXT:
            ids = window(self._calibration, self._length, draw)
            return TaskDocument(ids, [True] * self._length, [False] * self._length)
        return TASKS[task](self.words, self._calibration, self._length, draw)

    def held_out(self, task: str, row: int) -> TaskDocument:
        """TaskDocument ``row`` of a task of :data:`USERS_TASKS`."""
        draw = random.Random(f"held out/{task}/{self._length}/{row}")
        make, prose = USERS_TASKS[task]
        return make(self.words, self._prose if prose else self._source, self._length, draw)

    def chance(self, task: str, document: TaskDocument) -> float:
        """Share of right answers of who guesses among the values that the document states."""
        if task != "recall":
            return 1 / facts_in(self._length)
        return 3 / (document.answer.index(True) - 1 - len(self.words.ask))


USERS_TASKS: Mapping[str, tuple[Callable[..., TaskDocument], bool]] = {
    "needles": (TASKS["needles"], False),
    "recall": (TASKS["recall"], False),
    "interleaved": (interleaved, False),
    "prose": (TASKS["needles"], True),
}
"""What users feel: a task's generator, and whether its filler is English prose, not source code.
The first two are also calibrated on (other documents); nothing is calibrated on the last two."""


def masks(document: TaskDocument, topk: int) -> dict[str, torch.Tensor]:
    """Which predictions the objectives count: ``[length - 1]`` bool each.

    Entry i predicts token i + 1 and sees i + 1 tokens. Only those that see more than ``topk``
    count; ``late`` are those of the later half of the positions, ``answers`` those of answers.
    """
    place = torch.arange(len(document) - 1)
    counted = place >= topk
    answer = torch.tensor(document.answer[1:])
    late = place >= len(document) // 2
    return {"all": counted, "late": counted & late, "answers": counted & answer}


# -- measuring --------------------------------------------------------------------------------


class Model(TransformersEvaluator):
    """The checkpoint with another ``index_topk``.

    Args:
        folder: a scratch folder for the changed checkpoint.
        topk: selected tokens.
        sequence: any document, to name the length.
    """

    def __init__(self, folder: Path, topk: int, sequence: list[int]) -> None:
        shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
        config = json.loads((CHECKPOINT / "config.json").read_text())
        write_json(folder / "config.json", config | {"index_topk": topk})
        calibration = Calibration((tuple(sequence),), 1, "study")
        super().__init__(folder, calibration, reuse_bytes=_REUSE_BYTES)

    @torch.no_grad()
    def logits(self, pattern: Pattern, ids: Sequence[int], places: torch.Tensor) -> torch.Tensor:
        """``[places, vocabulary]`` float32 predictions made at these places (bool mask)."""
        hidden = self.run(pattern, tuple(ids)).hidden[-1][0, :-1][places]
        found: torch.Tensor = self._model.lm_head(self._model.model.norm(hidden)).float()
        return found


Key = tuple[str, str]
"""A document's name and a pattern."""


class Study:
    """Everything that is measured at one setting, in memory and in its journal.

    Args:
        setting: length and selection.
        work: folder of the journal and of the changed checkpoint.

    Attributes:
        visited: patterns that a search has asked for.
    """

    def __init__(self, setting: Setting, work: Path) -> None:
        self.setting, self._work = setting, work
        self.documents = Documents(setting.length)
        self.layers = int(json.loads((CHECKPOINT / "config.json").read_text())["num_hidden_layers"])
        self.full = Pattern.full(self.layers)
        self._journal = work / f"{setting.name}.jsonl"
        self._known: dict[Key, dict[str, float]] = {}
        self._full: dict[str, torch.Tensor] = {}
        self.visited: set[Pattern] = set()
        if self._journal.exists():
            for line in self._journal.read_text().splitlines():
                row = json.loads(line)
                self._known[row["document"], row["pattern"]] = row["sums"]

    @cached_property
    def _model(self) -> Model:
        any_document = self.documents.calibration(TEXT, 0)
        return Model(self._work / self.setting.name, self.setting.topk, any_document.ids)

    def calibrated(self, pattern: Pattern, task: str, row: int) -> dict[str, float]:
        """Sums of every objective over one calibration document, and their counts."""
        name = f"calibration/{task}/{row}"
        return self._remembered(name, pattern, lambda: self._calibrate(pattern, name, task, row))

    def accuracy(self, pattern: Pattern, task: str, row: int) -> float:
        """Share of one held-out document's answers that are the most probable prediction."""
        name = f"held out/{task}/{row}"
        found = self._remembered(name, pattern, lambda: self._answer(pattern, task, row))
        return found["right"] / found["answers"]

    def _remembered(
        self, name: str, pattern: Pattern, measure: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        key = (name, str(pattern))
        if key not in self._known:
            self._known[key] = measure()
            row = {"document": name, "pattern": str(pattern), "sums": self._known[key]}
            with self._journal.open("a") as journal:
                journal.write(json.dumps(row) + "\n")
        return self._known[key]

    def _calibrate(self, pattern: Pattern, name: str, task: str, row: int) -> dict[str, float]:
        document = self.documents.calibration(task, row)
        if name not in self._full:
            self._full[name] = self._log_probabilities(self.full, document)
        counted = masks(document, self.setting.topk)
        targets = torch.tensor(document.ids[1:])
        found = compare(self._log_probabilities(pattern, document), self._full[name], targets)
        sums = {n: float(found[n][counted[mask]].sum()) for n, mask in MASK_OF.items()}
        return sums | {f"count {mask}": float(counted[mask].sum()) for mask in counted}

    def _log_probabilities(self, pattern: Pattern, document: TaskDocument) -> torch.Tensor:
        everywhere = torch.ones(len(document) - 1, dtype=torch.bool)
        return self._model.logits(pattern, document.ids, everywhere).log_softmax(-1)

    def _answer(self, pattern: Pattern, task: str, row: int) -> dict[str, float]:
        document = self.documents.held_out(task, row)
        places = torch.tensor(document.answer[1:])
        predicted = self._model.logits(pattern, document.ids, places).argmax(-1)
        right = predicted == torch.tensor(document.ids[1:])[places]
        return {"right": float(right.sum()), "answers": float(places.sum())}

    # -- objectives -------------------------------------------------------------------------------

    def objective(self, pattern: Pattern, name: str, batch: int) -> float:
        """An objective on one calibration batch: the mean over what it counts."""
        rows = [self.calibrated(pattern, task, batch) for task in CALIBRATED_ON]
        count = f"count {MASK_OF[name]}"
        return sum(row[name] for row in rows) / sum(row[count] for row in rows)

    def objectives(self, pattern: Pattern) -> dict[str, float]:
        """Every objective's mean over all calibration batches."""
        batches = range(self.setting.batches)
        return {
            n: float(np.mean([self.objective(pattern, n, b) for b in batches])) for n in MASK_OF
        }


MASK_OF = {
    "all": "all", "late": "late", "answers": "answers", "kl": "all", "late_kl": "late",
    "late_top1": "late",
}  # fmt: skip
"""Which predictions each objective counts."""


def compare(
    found: torch.Tensor, full: torch.Tensor, targets: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Each objective per prediction, ``[predictions]`` float32; lower is better.

    Args:
        found: ``[predictions, vocabulary]`` log-probabilities under a pattern.
        full: the same under all F.
        targets: ``[predictions]`` the tokens that came.
    """
    loss = -found.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    kl = (full.exp() * (full - found)).sum(-1)
    differs = (found.argmax(-1) != full.argmax(-1)).float()
    losses = dict.fromkeys(DESCENTS, loss)
    return losses | {"kl": kl, "late_kl": kl, "late_top1": differs}


@dataclass
class ObjectiveEvaluator:
    """A study as a search sees it: one objective's loss."""

    study: Study
    objective: str
    in_flight = 1

    @property
    def num_layers(self) -> int:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        return self.study.layers

    @property
    def batch_tokens(self) -> tuple[int, ...]:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        setting = self.study.setting
        return (len(CALIBRATED_ON) * setting.length,) * setting.batches

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        self.study.visited.add(pattern)
        values = [self.study.objective(pattern, self.objective, batch) for batch in batches]
        tokens = sum(self.batch_tokens[batch] for batch in batches)
        return BatchLosses(np.array(values), tokens * self.num_layers)


# -- the study --------------------------------------------------------------------------------

Descents = dict[str, dict[str, dict[int, Pattern]]]
"""By method and objective: the pattern at each number of F layers."""


def descend(study: Study) -> Descents:
    """Algorithm 1 and the default search, on each objective."""
    rules = Constraints.make(study.full)
    targets = parse_targets([str(count) for count in COUNTS], rules)
    found: Descents = {"greedy": {}, "fast, refined": {}}
    for objective in DESCENTS:
        evaluator = ObjectiveEvaluator(study, objective)
        steps = list(greedy(Ledger(evaluator), rules, targets))
        found["greedy"][objective] = {len(s.pattern.full_layers): s.pattern for s in steps}
    for objective in DESCENTS:
        search = Search(Ledger(ObjectiveEvaluator(study, objective)), rules, targets, Options())
        for _ in search.run():
            pass
        patterns = {count: mark.pattern for count, mark in search.found.items()}
        found["fast, refined"][objective] = patterns
    return found


def chosen(study: Study, descents: Descents) -> dict[Pattern, str]:
    """The patterns to hold out, and why each: what descents arrived at, visited, or random."""
    patterns = {study.full: "all F"}
    for paths in descents.values():
        for path in paths.values():
            for count, pattern in path.items():
                if count in DRAWN:
                    patterns.setdefault(pattern, "found")
    for count in COUNTS:
        patterns |= _filled(study, count, patterns)
    return patterns


def _filled(study: Study, count: int, taken: Mapping[Pattern, str]) -> dict[Pattern, str]:
    """Visited and random patterns with ``count`` F layers, half and half, up to the number."""
    draw = random.Random(f"patterns/{count}")
    legal = [p for p in every_pattern(study.layers, count) if p not in taken]
    visited = [p for p in legal if p in study.visited]
    draw.shuffle(visited)
    draw.shuffle(legal)
    room = study.setting.patterns - sum(len(p.full_layers) == count for p in taken)
    found = dict.fromkeys(visited[: room // 2], "visited")
    for pattern in legal:
        if len(found) < room:
            found.setdefault(pattern, "random")
    return found


def every_pattern(layers: int, count: int) -> list[Pattern]:
    """All patterns with ``count`` F layers, layer 0 among them."""
    numbers = range(1 << (layers - 1))
    sets = ([0, *(i + 1 for i in range(layers - 1) if n >> i & 1)] for n in numbers)
    return [Pattern.from_layers(layers, full) for full in sets if len(full) == count]


def rows_of(task: str, rows: int) -> range:
    """The held-out documents of a task."""
    return range(-(-rows // RECALL_EVERY) if task == "recall" else rows)


def hold_out(study: Study, patterns: Iterable[Pattern], rows: int) -> None:
    """Measure every pattern on every document; neighbours in the order share lower layers."""
    ordered = sorted(patterns, key=str)
    for batch in range(study.setting.batches):
        for task in CALIBRATED_ON:
            for pattern in ordered:
                study.calibrated(pattern, task, batch)
    for row in range(rows):
        for task in USERS_TASKS:
            if row in rows_of(task, rows):
                for pattern in ordered:
                    study.accuracy(pattern, task, row)
        print(f"{study.setting.name}: row {row + 1} of {rows}", flush=True)


# -- statistics -------------------------------------------------------------------------------


def spearman(first: Floats, second: Floats) -> Floats:
    """Rank correlation along the last axis, ties sharing their mean rank; NaN for a constant."""
    ranks = [rankdata(values, axis=-1) for values in (first, second)]
    one, two = (rank - rank.mean(axis=-1, keepdims=True) for rank in ranks)
    scale = np.sqrt((one**2).sum(axis=-1) * (two**2).sum(axis=-1))
    with np.errstate(invalid="ignore"):
        correlation: Floats = (one * two).sum(axis=-1) / scale
    return correlation


def correlation(first: Floats, second: Floats) -> dict[str, float]:
    """Spearman's rho of ``[patterns]`` values, and its 95 % percentile bootstrap over patterns."""
    draws = np.random.default_rng(0).integers(len(first), size=(RESAMPLES, len(first)))
    low, high = np.nanpercentile(spearman(first[draws], second[draws]), [2.5, 97.5])
    return {"rho": float(spearman(first, second)), "low": float(low), "high": float(high)}


def held_out(study: Study, pattern: Pattern, rows: int) -> dict[str, dict[str, float | None]]:
    """A pattern's accuracy on each task, and what it adds to all F's, paired by document."""
    found: dict[str, dict[str, float | None]] = {}
    for task in USERS_TASKS:
        own, base = (
            np.array([study.accuracy(p, task, row) for row in rows_of(task, rows)])
            for p in (pattern, study.full)
        )
        found[task] = over_full(own, base)
    return found


def over_full(own: Floats, base: Floats) -> dict[str, float | None]:
    """A pattern's accuracy, and what it adds to all F's, of ``[documents]`` right shares each."""
    return {
        "accuracy": float(own.mean()),
        "over_full": float((own - base).mean()),
        "half_width": half_width(own - base),
    }


def correlations(patterns: list[dict[str, Any]]) -> dict[str, Any]:
    """By objective and task, over the patterns of one retention."""
    accuracies = {
        task: np.array([p["held_out"][task]["accuracy"] for p in patterns]) for task in USERS_TASKS
    }
    accuracies["mean of four"] = np.mean(list(accuracies.values()), axis=0)
    losses = {n: np.array([p["objectives"][n] for p in patterns]) for n in OBJECTIVES}
    return {
        name: {task: correlation(loss, accuracy) for task, accuracy in accuracies.items()}
        for name, loss in losses.items()
    }


def chances(study: Study, rows: int) -> dict[str, float]:
    """The accuracy of guessing, by task."""
    documents = study.documents
    return {
        task: float(
            np.mean(
                [documents.chance(task, documents.held_out(task, r)) for r in rows_of(task, rows)]
            )
        )
        for task in USERS_TASKS
    }


def report(study: Study, rows: int) -> dict[str, Any]:
    """Measure what is missing at one setting, and summarise it."""
    descents = descend(study)
    reasons = chosen(study, descents)
    hold_out(study, reasons, rows)
    patterns = [
        {
            "pattern": str(pattern),
            "full_layers": len(pattern.full_layers),
            "because": because,
            "objectives": study.objectives(pattern),
            "held_out": held_out(study, pattern, rows),
        }
        for pattern, because in sorted(reasons.items(), key=lambda item: str(item[0]))
    ]
    return {
        **asdict(study.setting),
        "calibration_documents": study.setting.batches * len(CALIBRATED_ON),
        "held_out_documents": {task: len(rows_of(task, rows)) for task in USERS_TASKS},
        "chance": chances(study, rows),
        "correlation": {
            str(count): {"patterns": len(there), **correlations(there)}
            for count in COUNTS
            for there in [[p for p in patterns if p["full_layers"] == count]]
        },
        "descents": {
            method: {
                objective: {str(count): str(pattern) for count, pattern in path.items()}
                for objective, path in paths.items()
            }
            for method, paths in descents.items()
        },
        "patterns": patterns,
    }


# -- figures ----------------------------------------------------------------------------------

_COLOURS = {"all": "C3", "late": "C0", "answers": "C2"}


def draw_descents(settings: list[dict[str, Any]], path: Path) -> None:
    """Accuracy along Algorithm 1's descents: a row a setting, a column a task."""
    tasks = list(USERS_TASKS)
    figure, axes = make_figure(13, 3.2 * len(settings), len(settings), len(tasks), sharex=True)
    for number, axis in enumerate(axes):
        setting, task = settings[number // len(tasks)], tasks[number % len(tasks)]
        known = {p["pattern"]: p["held_out"][task] for p in setting["patterns"]}
        for shift, objective in enumerate(DESCENTS):
            steps = setting["descents"]["greedy"][objective]
            at = {int(count): known[p] for count, p in steps.items() if int(count) in DRAWN}
            axis.errorbar(
                [count + 0.12 * (shift - 1) for count in at],
                [100 * value["accuracy"] for value in at.values()],
                yerr=[100 * (value["half_width"] or 0) for value in at.values()],
                marker="o", markersize=4, capsize=2, color=_COLOURS[objective],
                label=f"searched on: {objective}",
            )  # fmt: skip
        axis.axhline(100 * setting["chance"][task], color="grey", linestyle=":", label="chance")
        axis.set_title(f"{task}, {setting['length']} tokens, {setting['topk']} selected", size=9)
        axis.set_ylim(-2, 102)
        axis.grid(alpha=0.3)
    axes[0].invert_xaxis()
    for axis in axes[:: len(tasks)]:
        axis.set_ylabel("held-out answers right, %")
    for axis in axes[-len(tasks) :]:
        axis.set_xlabel("F layers")
    axes[0].legend(fontsize=8)
    save_figure(figure, path)


def draw_correlations(settings: list[dict[str, Any]], path: Path) -> None:
    """Rank correlations with their intervals: a row a setting, a column a retention."""
    figure, axes = make_figure(
        13, 3.6 * len(settings), len(settings), len(COUNTS), sharex=True, sharey=True
    )
    for number, axis in enumerate(axes):
        setting, count = settings[number // len(COUNTS)], COUNTS[number % len(COUNTS)]
        found = setting["correlation"][str(count)]
        for shift, task in enumerate(USERS_TASKS):
            values = [found[objective][task] for objective in OBJECTIVES]
            rho = [value["rho"] for value in values]
            axis.errorbar(
                rho, [place + 0.16 * (shift - 1.5) for place in range(len(OBJECTIVES))],
                xerr=[
                    [max(0, r - v["low"]) for r, v in zip(rho, values, strict=True)],
                    [max(0, v["high"] - r) for r, v in zip(rho, values, strict=True)],
                ],
                fmt="o", markersize=4, capsize=2, label=task,
            )  # fmt: skip
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_yticks(range(len(OBJECTIVES)), OBJECTIVES)
        where = f"{setting['length']} tokens, {setting['topk']} selected"
        axis.set_title(f"{count} F, {found['patterns']} patterns; {where}", size=9)
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    for axis in axes[-len(COUNTS) :]:
        axis.set_xlabel("rank correlation with held-out accuracy (-1 is best)")
    axes[0].legend(fontsize=8)
    save_figure(figure, path)


def main() -> None:
    """Measure, then write the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--work", type=Path, required=True, help="journal and scratch checkpoints")
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", type=int, help="held-out documents, instead of each setting's")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    wanted = [setting for setting in SETTINGS if setting.name in arguments.settings]
    found = [report(Study(s, arguments.work), arguments.rows or s.rows) for s in wanted]
    result = {
        "what": "objectives on calibration documents against held-out accuracy, by pattern",
        "checkpoint": checkpoint_digest(CHECKPOINT),
        "machine": machine(),
        "settings": found,
    }
    write_json(arguments.output, result)
    draw_descents(found, arguments.output.with_name("objectives-descents.png"))
    draw_correlations(found, arguments.output.with_name("objectives-correlations.png"))


if __name__ == "__main__":
    main()
