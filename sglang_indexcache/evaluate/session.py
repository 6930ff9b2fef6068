"""One evaluation as a user runs it: told what it costs, with a progress bar and a journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.arms import ArmServer, facts, longest_prompt, make_arms
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

CONTROL = "first-layer-only"
"""The positive control's name, if the user gives no other: F, then S as far as it may be."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What a user asked for.

    Attributes:
        model: the checkpoint's folder.
        against: the reference, in any form of a pattern.
        patterns: likewise, the candidates.
        control: likewise, known to be bad; empty for the first layer alone.
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
            return Arm(_label(value), str(library.resolve(value, checkpoint).pattern), role)

        if not self.patterns:
            raise QualityError("give at least one pattern to evaluate")
        candidates = [arm(value, Role.CANDIDATE) for value in self.patterns]
        candidates.sort(key=lambda one: -one.pattern.count("F"))
        first = str(Pattern("F" + "S" * (checkpoint.num_layers - 1)))
        bad = arm(self.control, Role.BAD) if self.control else Arm(CONTROL, first, Role.BAD)
        arms = (arm(self.against, Role.REFERENCE), *candidates, bad)
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

    def cost(self) -> Cost:
        """At most: a pattern is asked no more once it is decided."""
        lengths = tails(self.plan, self.corpus)
        return Cost(tokens_at_most(self.plan, len(self.patterns) + 2, lengths), self.rate)

    def tell(self, console: Console) -> Cost:
        """Print what will be asked, what it costs, and what it can show.

        Returns:
            The cost.
        """
        cost = self.cost()
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
    asking = make_arms(arms, servers)
    for server in asking.servers:
        check_fits(request.plan, longest_prompt(server), server.name)
    who = identity(
        request.plan,
        arms,
        checkpoint=checkpoint_digest(request.model),
        material=request.corpus.digest,
        server=facts(asking.servers[0]),
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
        run = Run(asking, request.corpus, journal)
        return _under_way(run, console, cost, output, agree)


def _under_way(
    run: Run, console: Console, cost: Cost, output: Path, agree: Callable[[str], None]
) -> Evaluation:
    """Ask, and show how far it came."""
    with resumable(console, output, "what was asked"), progress_at_most(console) as progress:
        task = progress.add_task("asking", total=len(run.journal.evaluation().planned))

        def on_context() -> None:
            progress.update(task, completed=len(run.journal.recorded.done))

        def on_rate(length: int, found: float) -> None:
            if cost.rate is None:
                whole = replace(cost, rate=Rate(found, f"measured at {format_length(length)}"))
                console.print(f"the plan takes {whole.hours_in_words()}", highlight=False)
                progress.stop()
                confirm(whole, agree)
                progress.start()

        run.tell, run.on_context, run.on_rate = console.print, on_context, on_rate
        on_context()
        return run.run()


def _label(value: str) -> str:
    """What a user wrote, short enough for a legend: a file's name without its folder."""
    return Path(value).stem if value.endswith((".yaml", ".yml")) else value
