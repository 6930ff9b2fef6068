"""One evaluation as a user runs it: told what it costs, with a progress bar and a journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import PatternError, QualityError
from sglang_indexcache.evaluate.arms import ArmServer, Servers, facts
from sglang_indexcache.evaluate.corpus import Corpus
from sglang_indexcache.evaluate.cost import check_fits, in_words, tails, tokens_at_most
from sglang_indexcache.evaluate.evaluation import Arm, Evaluation, Role
from sglang_indexcache.evaluate.journal import EvaluationJournal, identity
from sglang_indexcache.evaluate.plan import EvaluationPlan
from sglang_indexcache.evaluate.run import Run
from sglang_indexcache.library import Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.study.cost import Cost, Rate, confirm, print_plan
from sglang_indexcache.study.provenance import checkpoint_digest, commit, versions
from sglang_indexcache.study.running import progress_at_most, resumable, resuming
from sglang_indexcache.support.lengths import format_length

CONTROLS = ("uniform:1/4", "uniform:1/8")
"""Positive controls, if the user gives none: the first that is no candidate. They lose a little.

A control that breaks everything would be seen to lose by a task that no real loss shows in.
"""
LAST_CONTROL = "first-layer-only"
"""Where none of them is left, or allowed: F, then S."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What a user asked for.

    Attributes:
        model: the checkpoint's folder.
        against: the reference, in any form of a pattern.
        patterns: likewise, the candidates.
        control: likewise, known to be bad; empty for one of :data:`CONTROLS`.
        plan: what to ask.
        corpus: what contexts are made of.
        flags: of the command, to print beside the verdict.
        rate: how fast the servers compute tokens, if it is known.
        notices: what a reader must know besides: which rows of files are asked.
    """

    model: Path
    against: str
    patterns: tuple[str, ...]
    control: str
    plan: EvaluationPlan
    corpus: Corpus
    flags: str
    rate: Rate | None = None
    notices: tuple[str, ...] = ()

    def arms(self) -> tuple[Arm, ...]:
        """The reference, the candidates from most to fewest full layers, the positive control.

        Raises:
            QualityError: two arms are the same pattern, or there is nothing to compare.
            PatternError, LibraryError: a pattern that is none, or not for this checkpoint.
        """
        checkpoint, library = Checkpoint.read(self.model), Library.default()

        def arm(value: str, role: Role) -> Arm:
            name = Path(value).stem if value.endswith((".yaml", ".yml")) else value
            return Arm(name, str(library.resolve(value, checkpoint).pattern), role)

        if not self.patterns:
            raise QualityError("give at least one pattern to evaluate")
        candidates = [arm(value, Role.CANDIDATE) for value in self.patterns]
        candidates.sort(key=lambda one: -one.pattern.count("F"))
        given = (arm(self.against, Role.REFERENCE), *candidates)
        if self.control:
            arms = (*given, arm(self.control, Role.BAD))
        else:
            first = str(Pattern("F" + "S" * (checkpoint.num_layers - 1)))
            controls = []
            for value in CONTROLS:
                with suppress(PatternError):  # this checkpoint has no such indexers
                    controls.append(arm(value, Role.BAD))
            taken = {one.pattern for one in given}
            controls.append(Arm(LAST_CONTROL, first, Role.BAD))
            left = [one for one in controls if one.pattern not in taken]
            arms = (*given, (left or controls)[0])
        for place, one in enumerate(arms):
            for other in arms[:place]:
                if one.pattern == other.pattern:
                    raise QualityError(
                        f"{one.name} and {other.name} are the same pattern, {one.pattern}; an arm "
                        "compared with itself says nothing. Give another (--against, --control)."
                    )
                if one.name == other.name:
                    raise QualityError(f"two patterns are called {one.name}; give each once")
        return arms

    def tokens(self) -> dict[int, int]:
        """By length, at most: a pattern is asked no more once it is decided."""
        return tokens_at_most(self.plan, len(self.patterns) + 2, tails(self.plan, self.corpus))

    def tell(self, console: Console) -> Cost:
        """Print what will be asked, what it costs, and what it can show.

        Returns:
            The cost.
        """
        cost = Cost(sum(self.tokens().values()), self.rate)
        print_plan(console, in_words(self.plan, self.arms(), cost, self.notices))
        return cost

    def check_contexts(self, console: Console) -> None:
        """Make every context once, so that none is found impossible in the middle of a run."""
        with progress_at_most(console) as progress:
            task = progress.add_task("making every context", total=len(self.plan.planned))
            for line in self.corpus.check(self.plan, lambda: progress.advance(task)):
                console.print(line, highlight=False, soft_wrap=True, markup=False)


def run_evaluation(
    request: EvaluationRequest,
    servers: Mapping[str, ArmServer],
    output: Path,
    console: Console,
    *,
    agree: Callable[[str], None],
) -> Evaluation:
    """Ask, or go on where the same evaluation was stopped.

    Args:
        request: what to evaluate.
        servers: one under the name "", or one for each arm's name.
        output: folder of the journal.
        console: where to tell what happens.
        agree: is given a question before an evaluation of more than an hour, and raises if the
            answer is no.

    Raises:
        KeyboardInterrupt: by Ctrl-C or SIGTERM; the same command goes on.
        QualityError: what may not be evaluated, or not go on.
    """
    arms = request.arms()
    asking = Servers(arms, servers)
    for server in asking.all:
        check_fits(request.plan, server.server_info(), server.name)
    server_facts = facts(asking.all[0])
    if "model_path" in server_facts:  # its digest tells what the checkpoint is, wherever it lies
        server_facts["model_path"] = Path(server_facts["model_path"]).name
    who = identity(
        request.plan,
        arms,
        checkpoint=checkpoint_digest(request.model),
        material=request.corpus.digest,
        server=server_facts,
    )
    with EvaluationJournal(output, who) as journal:
        journal.note(
            {
                "model": request.model.resolve().name,
                "versions": versions(),
                "commit": commit(),
                "flags": request.flags,
                "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "notices": list(request.notices),
            }
        )
        cost = request.tell(console)
        if not journal.recorded.done:
            request.check_contexts(console)
        confirm(cost, agree)
        resuming(console, len(journal.recorded.done), "contexts", journal.path)
        return _under_way(Run(asking, request.corpus, journal), request, console, output, agree)


def _under_way(
    run: Run,
    request: EvaluationRequest,
    console: Console,
    output: Path,
    agree: Callable[[str], None],
) -> Evaluation:
    """Ask, show how far it came, and say what it takes once that is measured.

    The longest contexts are asked first. At their rate, the slowest, everything else takes no
    longer than is said then, and nothing is asked of the user again.
    """
    tokens, longest = request.tokens(), request.plan.longest_cell
    rates: dict[int, float] = {}
    with resumable(console, output, "what was asked"), progress_at_most(console) as progress:
        task = progress.add_task("asking", total=len(request.plan.planned))

        def on_context() -> None:
            progress.update(task, completed=len(run.journal.recorded.done))

        def on_rate(length: int, rate: float) -> None:
            if length <= request.plan.selects_all or request.rate is not None:
                return
            rates[length] = rate
            if length == longest:
                measured = Rate(rate, f"measured at {format_length(length)}, the longest")
                whole = Cost(sum(tokens.values()), measured)
                console.print(f"the plan takes at most {whole.hours_in_words()}", highlight=False)
                progress.stop()
                confirm(whole, agree)
                progress.start()
            elif len(rates) == len(request.plan.all_lengths):
                hours = {one: tokens[one] / rates[one] / 3600 for one in sorted(rates)}
                parts = ", ".join(
                    f"{format_length(one)}: {took:.2g}" for one, took in hours.items()
                )
                said = f"hours by length, at most: {parts}; {sum(hours.values()):.2g} together"
                console.print(said, highlight=False)

        run.tell, run.on_context, run.on_rate = console.print, on_context, on_rate
        on_context()
        return run.run()
