"""An evaluation as logs of Inspect, one for each arm, to look at in its viewer.

Followed: ``EvalLog`` of inspect-ai 0.3.285, which lists and reads them. A sample is a question;
contexts are named and not repeated, with a digest of what they were made of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from sglang_indexcache.evaluate.evaluation import Answer, Arm, Evaluation
from sglang_indexcache.evaluate.logs.sample import digest
from sglang_indexcache.support.files import write_json

TASK = "indexcache-eval"
MEASURES = ("right", "nll", "kl", "agreement", "score")
"""Of an answer, each a score of its sample."""
UNKNOWN_TIME = "1970-01-01T00:00:00Z"
"""A log must have one."""


def write_inspect(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write the logs; of the reference a second one with what it answered when asked again (A/A).

    Contexts of the control are left out: no pattern can matter there. The same record gives the
    same bytes.
    """
    started = str(evaluation.facts.get("started") or UNKNOWN_TIME)
    # Its viewer lists a JSON log only if its name begins with a time.
    begin = started.removesuffix("Z").replace(":", "-")
    long = [row for row in evaluation.answers if row.length > evaluation.selects_all]
    found = []
    for number, arm in enumerate(evaluation.arms):
        for repeat in (0, 1):
            rows = [row for row in long if (row.arm, row.repeat) == (arm.name, repeat)]
            if rows:
                name = re.sub(r"[^A-Za-z0-9.]+", "-", arm.name) + ("-again" if repeat else "")
                path = folder / f"{begin}_{TASK}_{number}-{name}.json"
                write_json(path, _log(evaluation, arm, repeat, rows, started))
                found.append(path)
    return found


def _log(
    evaluation: Evaluation, arm: Arm, repeat: int, rows: Sequence[Answer], started: str
) -> dict[str, Any]:
    facts = evaluation.facts
    model = str(facts.get("model") or "unknown")
    run = digest(facts.get("checkpoint"), started)[:22]
    material = str(facts.get("material") or f"what run {run} had")  # which pairs with no other
    own = digest(run, arm.name, repeat)[:22]
    measures = [name for name in MEASURES if any(getattr(row, name) is not None for row in rows)]
    about = {
        "arm": arm.name,
        "pattern": arm.pattern,
        "role": arm.role.value,
        "again": bool(repeat),
        "answers": evaluation.mode.value,
        "pattern_verified": evaluation.pattern_verified,
        "checkpoint": facts.get("checkpoint"),
    }
    return {
        "version": 2,
        "status": "success" if evaluation.finished else "started",
        "eval": {
            "eval_id": own,
            "run_id": run,
            "created": started,
            "task": TASK,
            "task_id": own,
            "task_args": {"arm": arm.name},
            "dataset": {"name": ", ".join(evaluation.tasks), "samples": len(rows)},
            "model": model,
            "config": {"epochs": 1},
            "packages": dict(facts.get("versions") or {}),
            "metadata": about,
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(rows),
            "completed_samples": len(rows),
            "scores": [_mean(name, rows) for name in measures],
        },
        "stats": {"started_at": started, "completed_at": _later(started, evaluation.seconds)},
        "samples": [_sample(row, measures, model, material) for row in rows],
    }


def _later(time: str, seconds: float) -> str:
    return (datetime.fromisoformat(time) + timedelta(seconds=round(seconds))).isoformat()


def _mean(name: str, rows: Sequence[Answer]) -> dict[str, Any]:
    values = [float(value) for row in rows if (value := getattr(row, name)) is not None]
    return {
        "name": name,
        "scorer": name,
        "params": {},
        "metrics": {"mean": {"name": "mean", "value": fmean(values), "params": {}}},
    }


def _sample(row: Answer, measures: Sequence[str], model: str, material: str) -> dict[str, Any]:
    reply = row.reply or ""
    return {
        "id": f"{row.context} {row.question}",
        "epoch": 1,
        "input": f"{row.question} behind context {row.context}, made of {material}",
        "target": "",
        "messages": [],
        "output": {"model": model, "choices": [], "completion": reply},
        "scores": {
            name: {"value": _value(value), "answer": reply or None}
            for name in measures
            if (value := getattr(row, name)) is not None
        },
        "metadata": _place(row),
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
    }


def _value(value: bool | float) -> str | float:
    """Right and wrong as Inspect writes them."""
    return ("C" if value else "I") if isinstance(value, bool) else value


def _place(row: Answer) -> Mapping[str, Any]:
    return {
        "task": row.task,
        "length": row.length,
        "depth": row.depth,
        "context_id": row.context,
        "answer_tokens": row.tokens,
    }
