"""Run of an evaluation, which asks every arm until every pattern is decided, and can be resumed.

The next question follows from the plan and the finished contexts, never from the history of this
process. So an evaluation that was killed and resumed ends like an uninterrupted one. It stops when
its verdict could not be believed: see the ``check_`` functions.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_indexcache.errors import QualityError, ServerUnavailableError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.evaluate.corpus import Corpus
from sglang_indexcache.lab.evaluate.evaluation import NAME, Evaluation, Record, recorded
from sglang_indexcache.lab.evaluate.evaluation_plan import (
    AGAIN_EVERY,
    CONTROL_LOOK,
    Arm,
    EvaluationPlan,
    Planned,
    assumed_spread,
    context_name,
)
from sglang_indexcache.lab.evaluate.servers import Asking, Servers
from sglang_indexcache.lab.evaluate.tasks.context import Context
from sglang_indexcache.lab.evaluate.verdict import DECIDED, Kind, Look, verdicts_of
from sglang_indexcache.lab.runs.progress import (
    print_plan,
    progress_at_most,
    resumable,
    resuming,
    time_in_words,
)
from sglang_indexcache.lab.runs.provenance import commit, versions
from sglang_indexcache.lab.stats.bounds import Estimate
from sglang_indexcache.lab.stats.pairs import Answer, Cell
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.lengths import points
from sglang_indexcache.serving.client_rules import facts

PAUSES = (1.0, 5.0, 25.0)
"""Seconds before a context is asked again; the run ends when they have passed."""
PAGE = 64
"""Tokens in a cache page: a context's last, partial page is computed again for each question."""


@dataclass(frozen=True)
class EvaluationRequest:
    """Request of a user for an evaluation.

    Attributes:
        model: the checkpoint's folder.
        flags: the command's flags, to print with the verdict.
        notices: further facts for the reader, such as the rows of files that are asked.
    """

    model: Path
    arms: tuple[Arm, ...]
    plan: EvaluationPlan
    corpus: Corpus
    flags: str
    notices: tuple[str, ...] = ()

    def tokens(self) -> int:
        """Count the tokens that the whole plan computes if no pattern is decided early.

        A question and its answer are computed after the whole cache pages of their context; for a
        file's row they count as context.
        """
        tails, tokens = self._tails(), 0
        for planned in self.plan.planned:
            size = self.plan.sizes.get(planned.context, planned.length)
            tail = tails.get(planned.task, 0)
            questions = self.plan.questions if planned.task in tails else 1
            per_arm = size + questions * (tail + (size - tail) % PAGE)
            tokens += per_arm * (len(self.arms) + planned.again)
        return tokens

    def _tails(self) -> dict[str, int]:
        """Measure the mean tokens of a question with its answer, on short contexts of each task."""
        tails, length = {}, min(self.plan.lengths)
        for task in self.plan.tasks:
            name = context_name(task, length, self.plan.seed)
            context = self.corpus.make(Planned(name, task, length, 1, False))
            sizes = [len(question.ids) + len(question.answer) for question in context.questions]
            tails[task] = round(sum(sizes) / len(sizes))
        return tails

    def tell(self, console: Console) -> None:
        """Print the plan: what is asked, how much is computed, and what it can show."""
        arms = ", ".join(f"{arm.name} ({arm.role.value})" for arm in self.arms)
        contexts, *expectations = self.plan.in_words()
        rows = [
            ("arms", f"{arms}; the reference again on every {AGAIN_EVERY}th context (A/A)"),
            *(("file", notice) for notice in self.notices),
            contexts,
            (
                "cost",
                f"{self.tokens():,} tokens at most; looks: {self.plan.looks}, the evaluation ends "
                "at the one that decides",
            ),
            *expectations,
        ]
        print_plan(console, rows)


def run_evaluation(
    request: EvaluationRequest,
    servers: Mapping[str, Client],
    output: Path,
    console: Console,
) -> Evaluation:
    """Run an evaluation, or continue it where it was stopped.

    Args:
        servers: one server under the name "", or one for each arm's name.

    Raises:
        KeyboardInterrupt: by Ctrl-C or SIGTERM; the same command continues.
        QualityError: the evaluation may not start, or may not go on.
    """
    request.tell(console)
    arm_servers = Servers(request.arms, servers)
    arm_servers.check_fits(request.plan.longest)
    with recorded(
        output,
        request.plan,
        request.arms,
        server=_server_facts(arm_servers.all[0]),
        checkpoint=checkpoint_digest(request.model),
        material=request.corpus.digest,
    ) as record:
        if not record.done:
            request.corpus.check(request.plan.planned, console)
        if not record.facts:  # from here on the folder belongs to this evaluation
            record.add({"facts": _facts_of(request)})
        resuming(console, len(record.done), "contexts", output / NAME)
        run = Run(arm_servers, request.corpus, record, console, request.tokens())
        with resumable(console, output, "what was asked"):
            return run.run()


def _server_facts(client: Client) -> dict[str, Any]:
    """Return a server's facts for the record, without the path, because the digest tells more."""
    server = facts(client.server_info(), client.name)
    if "model_path" in server:
        server["model_path"] = Path(server["model_path"]).name
    return server


def _facts_of(request: EvaluationRequest) -> dict[str, Any]:
    """Return the facts of a request and of this process for the record, at the first start."""
    return {
        "model": request.model.resolve().name,
        "versions": versions(),
        "commit": commit(),
        "flags": request.flags,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "notices": list(request.notices),
    }


class Run:
    """An evaluation in progress, whose plan computes ``tokens`` tokens."""

    def __init__(
        self,
        servers: Servers,
        corpus: Corpus,
        record: Record,
        console: Console,
        tokens: int,
    ) -> None:
        self._servers, self._corpus, self._record, self._console = servers, corpus, record, console
        self._tokens, self._is_timed = tokens, False
        self._start = record.evaluation()
        self._progress = progress_at_most(console)
        self._decided: set[str] = set()
        self._loss_seen: set[Cell] = set()

    def run(self) -> Evaluation:
        """Ask everything that is left; raise a QualityError if a server must not be believed."""
        contexts = self._record.done
        with self._progress as progress:
            total = len(self._start.planned)
            task = progress.add_task("asking", total=total, completed=len(contexts))
            for look, group in groupby(self._start.planned, key=lambda context: context.look):
                for planned in group:
                    progress.update(task, completed=len(contexts))
                    if planned.context not in contexts:
                        self._ask_context(planned)
                if self._judge(look):
                    break
        if not self._record.finished:
            self._record.add({"finished": True})
        return self._record.evaluation()

    def _tell(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _ask_context(self, planned: Planned) -> None:
        """Ask every undecided arm about a context, except for answers that are already recorded."""
        self._look_for_loss((planned.task, planned.length))
        context = self._corpus.make(planned)
        for batch in self._servers.batches(self._askings(planned)):
            unanswered = [
                (arm, repeat)
                for arm, repeat in batch
                if (arm.name, repeat, planned.context) not in self._record.answers
            ]
            if unanswered:
                self._ask(context, unanswered)
        self._record.add({"done": [planned.context]})
        check_context(self._record.evaluation())

    def _askings(self, planned: Planned) -> list[Asking]:
        """Return the arms to ask: undecided ones, and the bad pattern until it was seen to lose."""
        reference, bad = self._start.reference, self._start.bad
        arms = [arm for arm in self._start.candidates if arm.name not in self._decided]
        askings = [(arm, 0) for arm in (reference, *arms)]
        if bad and (planned.task, planned.length) not in self._loss_seen:
            askings.append((bad, 0))
        return askings + [(reference, 1)] * planned.again

    def _look_for_loss(self, cell: Cell) -> None:
        """Note whether the bad pattern was seen to lose in this cell, and if so stop asking it."""
        bad, look = self._start.bad, Look(self._record.evaluation())
        if bad and cell not in self._loss_seen and look.sees_loss(bad.name, cell):
            self._loss_seen.add(cell)

    def _ask(self, context: Context, askings: Sequence[Asking]) -> None:
        started = time.monotonic()
        results = self._ask_with_retries(context, askings)
        seconds = time.monotonic() - started
        computed = sum(tokens for _, tokens in results)
        for answers, tokens in results:
            self._record.append(answers, tokens, seconds * tokens / computed)
        # The longest contexts are asked first, and have the slowest rate.
        if computed and not self._is_timed and context.length == max(self._start.lengths):
            self._is_timed = True
            rate = computed / seconds
            hours = time_in_words(self._tokens / rate / 3600)
            self._tell(
                f"the plan takes at most {hours} at {rate:,.0f} tokens a second (measured at the "
                "longest)"
            )

    def _ask_with_retries(
        self, context: Context, askings: Sequence[Asking]
    ) -> list[tuple[tuple[Answer, ...], int]]:
        """Ask arms for a context, with retries.

        Raises:
            QualityError: all retries failed; earlier answers are kept.
        """
        for pause in (*PAUSES, None):
            try:
                return self._servers.ask(context, askings)
            except ServerUnavailableError as error:
                failure = error
            if pause is not None:
                self._tell(f"{context.name} is asked again in {pause:g} s: {failure}")
                time.sleep(pause)
        raise QualityError(
            f"{context.name} was not answered: {failure}. What was asked is kept: start the same "
            "command again once the server answers."
        ) from failure

    def _judge(self, look: int) -> bool:
        """Judge the patterns after all contexts of a look; return whether all are decided."""
        evaluation = self._record.evaluation()
        if look == CONTROL_LOOK:
            check_control(evaluation)
            return False
        check_floor(evaluation)
        check_noise(evaluation)
        verdicts = verdicts_of(evaluation)
        for name, (at, verdict) in verdicts.items():
            if verdict.kind is Kind.INVALID:
                raise QualityError(verdict.sentence)
            if at == look:
                self._tell(
                    f"look {look} of {evaluation.design.looks}  {name}: {verdict.kind.value}"
                )
        self._decided = {name for name, (_, verdict) in verdicts.items() if verdict.kind in DECIDED}
        return len(self._decided) == len(verdicts)


ENOUGH_ALIKE = 3
"""Number of contexts in a row with all log-probabilities equal from which two arms count as the
same."""


def check_control(evaluation: Evaluation) -> None:
    """Refuse arms that differ beyond the engine's noise where every pattern selects everything."""
    look = Look(evaluation, CONTROL_LOOK)
    arms = {row.arm for row in look.control}
    for name in (arm.name for arm in evaluation.compared_arms if arm.name in arms):
        if differs := look.control_differs(name):
            shortest = min(row.length for row in look.control)
            raise QualityError(f"the control failed at {shortest} tokens: {differs}")


def check_context(evaluation: Evaluation) -> None:
    """Refuse an arm whose log-probabilities all equal the reference's.

    An arm that computes exactly the same as the reference does not run its own pattern. The last
    contexts are checked, so a server that begins to ignore patterns in the middle is refused too.
    """
    traces: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    long = {planned.context for planned in evaluation.long}
    for row in evaluation.answers:
        if row.context in long and not row.repeat:
            traces[row.arm][row.context].append(row.trace)
    reference = traces[evaluation.reference.name]
    for arm in evaluation.compared_arms:
        last = list(traces[arm.name].items())[-ENOUGH_ALIKE:]
        if len(last) == ENOUGH_ALIKE and all(reference.get(name) == trace for name, trace in last):
            raise QualityError(
                f"the server ignores the pattern, or answers from another arm's cache: behind the "
                f"last {ENOUGH_ALIKE} contexts of more than {evaluation.selects_all} tokens, "
                f"{arm.name} has every log-probability of {evaluation.reference.name}, to the last "
                "digit. Ask `indexcache server show` what it runs, and start it with "
                "--disable-radix-cache to rule the cache out."
            )


def check_floor(evaluation: Evaluation) -> None:
    """Refuse a reference at the floor in every cell, where no pattern can lose anything."""
    look = Look(evaluation)
    low = look.at_floor()
    if low and low.keys() == look.cells:
        shares = ", ".join(
            f"{share:.0%} of {task} at {length:,}" for (task, length), share in low.items()
        )
        raise QualityError(
            f"the reference answers {shares} right, hardly more than guessing, so "
            "no loss could be seen. Ask shorter contexts (--length) or other tasks (--task notes "
            "for a small model), or look whether the checkpoint and its tokenizer belong together."
        )


def check_noise(evaluation: Evaluation) -> None:
    """Refuse an engine whose own noise is too large to resolve the margin.

    It refuses only if the plan could otherwise resolve the margin: a plan that is too small was
    reported before. It waits until several contexts in every cell were asked twice, so that their
    spread is known.
    """
    design, noise = evaluation.design, Look(evaluation).noise
    if noise is None:
        return
    estimate = Estimate(noise)
    planned = Counter((context.task, context.length) for context in evaluation.planned)
    cells = [
        (planned[cell], round(float(noise.questions[noise.cells == number].mean())))
        for number, cell in enumerate(noise.names)
    ]
    assumed = design.needed(*assumed_spread(cells))
    if not estimate.error or not math.isfinite(estimate.error) or design.contexts < assumed:
        return
    needed = design.needed(*estimate.spread)
    if needed > design.contexts:
        raise QualityError(
            f"the reference differs from itself so often (A/A: {noise.flips}) that a margin of "
            f"{points(design.margin)} needs {needed:,} contexts, and {design.contexts:,} "
            "are planned. Plan more (--contexts), or take a wider --margin."
        )
