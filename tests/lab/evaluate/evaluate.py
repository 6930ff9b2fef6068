"""An evaluation on a fake server: in this process, or one to be killed."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from rich.console import Console

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.evaluate.corpus import Corpus
from sglang_indexcache.lab.evaluate.evaluation import Evaluation, recorded
from sglang_indexcache.lab.evaluate.evaluation_plan import Arm, EvaluationPlan, Role
from sglang_indexcache.lab.evaluate.run import Run
from sglang_indexcache.lab.evaluate.servers import Servers
from tests.lab.evaluate.fake_server import TOPK, Words

ARMS = (
    Arm("full", "FFFFFFFFFFFF", Role.REFERENCE),
    Arm("half", "FFSFFSFSFSFS", Role.CANDIDATE),
    Arm("few", "FSSSFSSSFSSS", Role.CANDIDATE),
    Arm("worst", "FSSSSSSSSSSS", Role.BAD),
)
PLAN = EvaluationPlan(("notes",), (128, 160), 8, 4, TOPK, margin=0.1, looks=2)


def corpus_of(plan: EvaluationPlan) -> Corpus:
    return Corpus(Words(), plan.questions)


def evaluate(
    folder: Path,
    urls: str | Mapping[str, str],
    plan: EvaluationPlan = PLAN,
    arms: tuple[Arm, ...] = ARMS,
    corpus: Corpus | None = None,
    output: IO[str] | None = None,
) -> Evaluation:
    """Everything that is left of the evaluation in ``folder``."""
    urls_by_name = {"": urls} if isinstance(urls, str) else urls
    clients = {name: Client(url) for name, url in urls_by_name.items()}
    asking = Servers(arms, clients)
    corpus = corpus or corpus_of(plan)
    made_of = {"checkpoint": "c", "material": corpus.digest}
    with recorded(folder, plan, arms, **made_of, server={}) as record:
        if not record.facts:
            record.add({"facts": {"started": "then", "notices": ["Told."]}})
        return Run(asking, corpus, record, Console(file=output or io.StringIO()), 10**6).run()
