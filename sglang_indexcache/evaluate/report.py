"""What an evaluation leaves in its folder, all of it a pure function of what was recorded.

``report.html`` (one file, its pictures inside), ``eval.json`` (every number), ``samples.jsonl``
(every answer) and the pictures by themselves. The same record gives the same bytes: no clock, no
machine and no order of a dictionary that is not the record's own goes into them.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_indexcache.evaluate.evaluation import Answer, Evaluation
from sglang_indexcache.evaluate.figures import draw_all
from sglang_indexcache.evaluate.summary import (
    NOISE,
    Summary,
    headlines,
    missing_contexts,
    plain,
    summarise,
)
from sglang_indexcache.evaluate.verdict import Verdicts, points
from sglang_indexcache.support.files import write_json, write_whole
from sglang_indexcache.support.lengths import format_length

TEMPLATE = Path(__file__).parent / "report.html"
SAMPLES = "samples.jsonl"
SAMPLE = (
    *("arm", "repeat", "context", "question", "task", "length", "depth", "right"),
    *("nll", "kl", "agreement", "tokens", "score"),
)
"""Of an answer, what is written there."""
CAPTIONS = {
    "forest": "Secondary. Difference in right answers by task and length, with 90 % intervals of "
    "one look. Dashed: the margin. Grey bars: what the engine's own flips (A/A) alone would do "
    "there, 90 % of the time. Grey marks: cells that cannot see a loss (the reference hardly "
    "does better than guessing, or the bad pattern was not seen to lose), left out of the claim.",
    "length": "Secondary. Right answers of each arm against length, and how far each arm's "
    "distribution over answer tokens is from the reference's.",
    "flips": "Questions that only the reference answered (lost) and only the pattern (won). Equal "
    "scores can hide many of both; A/A shows how many the engine makes by itself.",
    "depth": "Secondary. What the pattern adds where the answer lay at this depth of a context of "
    "this length.",
    "looks": "The primary result at each planned look. A claim is made when its line reaches the "
    "dashed one; the first claim (ringed) ends the evaluation of a pattern, and its line. Hollow: "
    "looks that were planned and not taken.",
}


def write_report(evaluation: Evaluation, folder: Path, verdicts: Verdicts | None = None) -> str:
    """Write every file.

    Args:
        evaluation: as it was recorded.
        folder: made if missing; what is there under the same names is replaced.
        verdicts: to report instead of the evaluation's own, for logs of others.

    Returns:
        The sentences to paste, one a line.
    """
    summary = summarise(evaluation, verdicts)
    pictures = draw_all(evaluation, summary, folder)
    write_json(folder / "eval.json", record(evaluation, summary))
    lines = (json.dumps(sample(row), ensure_ascii=False) for row in evaluation.answers)
    write_whole(folder / SAMPLES, "".join(f"{line}\n" for line in lines))
    write_whole(folder / "report.html", page(evaluation, summary, pictures))
    return "\n".join(headlines(evaluation, summary))


def sample(answer: Answer) -> dict[str, Any]:
    """A line of ``samples.jsonl``."""
    return {name: getattr(answer, name) for name in SAMPLE}


def record(evaluation: Evaluation, summary: Summary) -> dict[str, Any]:
    """``eval.json``: the sentences first, then the plan, then every number of the report."""
    return {
        "sentences": headlines(evaluation, summary),
        "facts": dict(evaluation.facts),
        "design": asdict(evaluation.design),
        "arms": [
            {"name": arm.name, "pattern": arm.pattern, "role": arm.role.value}
            for arm in evaluation.arms
        ],
        "mode": evaluation.mode.value,
        "pattern_verified": evaluation.pattern_verified,
        "selects_all": evaluation.selects_all,
        "tasks": list(evaluation.tasks),
        "lengths": list(evaluation.lengths),
        "control_length": evaluation.control_length,
        "finished": evaluation.finished,
        "tokens": evaluation.tokens,
        "seconds": evaluation.seconds,
        "missing": [asdict(missing) for missing in evaluation.missing],
        "notices": list(evaluation.notices),
        **plain(summary),
    }


def page(evaluation: Evaluation, summary: Summary, pictures: Mapping[str, Path]) -> str:
    """``report.html``."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "points": lambda value: "" if value is None else f"{100 * value:+.1f}",
        "nats": lambda value: f"{value:+.3f}" if math.isfinite(value) else "unknown",
        "bound": lambda value: f"{100 * value:+.1f}" if abs(value) <= 1 else "unknown",
        "length": lambda value: format_length(value) if value else "",
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        evaluation=evaluation,
        summary=summary,
        sentences=headlines(evaluation, summary),
        margin=points(evaluation.margin),
        unverified="" if evaluation.pattern_verified else " (pattern not verified)",
        noise=NOISE,
        missing=missing_contexts(evaluation),
        pictures=[
            (CAPTIONS[name], base64.b64encode(path.read_bytes()).decode())
            for name, path in pictures.items()
        ],
        facts=[(name, _words(value)) for name, value in evaluation.facts.items() if value],
    )


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(_words(item) for item in value)
    return str(value)
