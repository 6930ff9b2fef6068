"""One evaluation as a user runs it: told what it costs, with a progress bar and a journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.arms import Ask, Server, facts, longest_prompt, make_arms
from sglang_indexcache.evaluate.chat import make_chat_ask
from sglang_indexcache.evaluate.evaluation import Arm, Evaluation, Mode, Role
from sglang_indexcache.evaluate.journal import EvaluationJournal, identity
from sglang_indexcache.evaluate.plan import (
    AGAIN_EVERY,
    CORRELATION,
    DISCORDANCE,
    Cost,
    Material,
    Plan,
    check_fits,
    cost,
    detectable,
    mend,
    needed,
    tails,
)
from sglang_indexcache.evaluate.replies import reply
from sglang_indexcache.evaluate.run import Run
from sglang_indexcache.evaluate.scoring import score
from sglang_indexcache.evaluate.verdict import points
from sglang_indexcache.library import Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.study.provenance import checkpoint_digest, commit, versions
from sglang_indexcache.study.running import progress_at_most, sigterm_interrupts
from sglang_indexcache.support.lengths import format_length
from sglang_indexcache.support.words import counted

CONTROL = "first-layer-only"
"""The positive control's name, if the user gives no other: F, then S as far as it may be."""
ASKS_ABOVE_HOURS = 1.0


@dataclass(frozen=True)
class Request:
    """What a user asked for.

    Attributes:
        model: the checkpoint's folder.
        against: the reference, in any form of a pattern.
        patterns: likewise, the candidates.
        control: likewise, known to be bad; empty for the first layer alone.
        plan: what to ask.
        flags: of the command, to print beside the verdict.
        reply_tokens: let the model answer by itself, with so many tokens more than the right
            answer has; None to put the right answers in its mouth.
        chat: whether it is asked by chat completions, where it has to answer by itself.
        notices: what a reader must know besides: which rows of files are asked.
    """

    model: Path
    against: str
    patterns: tuple[str, ...]
    control: str
    plan: Plan
    flags: str
    reply_tokens: int | None = None
    chat: bool = False
    notices: tuple[str, ...] = ()

    @property
    def mode(self) -> Mode:
        """How answers are had."""
        return Mode.TEACHER_FORCED if self.reply_tokens is None else Mode.GENERATE

    @property
    def settings(self) -> dict[str, int]:
        """What else must stay the same until the end."""
        return {} if self.reply_tokens is None else {"reply_tokens": self.reply_tokens}

    def ask(self, material: Material) -> Ask:
        """Likewise, as a function."""
        if self.reply_tokens is None:
            return score
        if self.chat:
            return make_chat_ask(material, self.plan.selects_all, self.reply_tokens)
        return partial(reply, spare=self.reply_tokens)


def make_arm_list(request: Request) -> tuple[Arm, ...]:
    """The reference, the candidates from most to fewest full layers, the positive control.

    Raises:
        QualityError: two arms are the same pattern, or there is nothing to compare.
        PatternError, LibraryError: a pattern that is none, or not for this checkpoint.
    """
    checkpoint, library = Checkpoint.read(request.model), Library.default()

    def arm(value: str, role: Role) -> Arm:
        return Arm(_label(value), str(library.resolve(value, checkpoint).pattern), role)

    if not request.patterns:
        raise QualityError("give at least one pattern to evaluate")
    reference = arm(request.against, Role.REFERENCE)
    candidates = [arm(value, Role.CANDIDATE) for value in request.patterns]
    candidates.sort(key=lambda one: -one.pattern.count("F"))
    first = Pattern("F" + "S" * (checkpoint.num_layers - 1))
    bad = arm(request.control, Role.BAD) if request.control else Arm(CONTROL, str(first), Role.BAD)
    arms = (reference, *candidates, bad)
    for place, one in enumerate(arms):
        for other in arms[:place]:
            if one.pattern == other.pattern:
                raise QualityError(
                    f"{one.name} and {other.name} are the same pattern, {one.pattern}; an arm "
                    "compared with itself says nothing. Give another one (--against, --control)."
                )
            if one.name == other.name:
                raise QualityError(f"two patterns are called {one.name}; give each once")
    return arms


def run_evaluation(
    request: Request,
    servers: Mapping[str, Server],
    material: Material,
    output: Path,
    console: Console,
    *,
    rate: float | None = None,
    agree: Callable[[str], None],
) -> Evaluation:
    """Ask, or go on where the same evaluation was stopped.

    Args:
        request: what to evaluate.
        servers: one under the name "", or one for each arm's name.
        material: what contexts are made of.
        output: folder of the journal.
        console: where to tell what happens.
        rate: tokens that the servers compute in a second, if it is known.
        agree: is given a question before an evaluation of more than :data:`ASKS_ABOVE_HOURS`, and
            raises if the answer is no.

    Raises:
        KeyboardInterrupt: by Ctrl-C or SIGTERM; the same command goes on.
        QualityError: what may not be evaluated, or not go on.
    """
    arms = make_arm_list(request)
    serving = make_arms(arms, servers)
    for server in serving.servers:
        most = longest_prompt(server)
        if request.chat and most is not None:  # it holds the reply too
            most -= request.reply_tokens or 0
        check_fits(request.plan, most, server.url)
    lengths_of_tails = tails(request.plan, material)
    who = identity(
        request.plan,
        arms,
        request.mode,
        checkpoint=checkpoint_digest(request.model),
        material=material.digest,
        server=facts(serving.servers[0]) | request.settings,
        pattern_verified=serving.verified,
    )
    with sigterm_interrupts(), EvaluationJournal(output, who) as journal:
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

        def bill(found: float | None) -> Cost:
            return cost(request.plan, len(arms), lengths_of_tails, found, chat=request.chat)

        for line in plan_in_words(request.plan, arms, bill(rate), request.notices):
            console.print(line, highlight=False)
        _ask_for_hours(bill(rate), agree)
        if journal.recorded.done:
            console.print(f"resuming: {len(journal.recorded.done)} contexts are in {journal.path}")
        try:
            return _under_way(
                Run(serving, material, journal, request.ask(material)), console, bill, rate, agree
            )
        except KeyboardInterrupt:
            console.print(f"interrupted: what was asked is in {output}; the same command goes on")
            raise


def _under_way(
    run: Run,
    console: Console,
    bill: Callable[[float | None], Cost],
    rate: float | None,
    agree: Callable[[str], None],
) -> Evaluation:
    """Ask, and show how far it came."""
    with progress_at_most(console) as progress:
        task = progress.add_task("asking", total=len(run.journal.evaluation().planned))

        def on_block() -> None:
            progress.update(task, completed=len(run.journal.recorded.done))

        def on_rate(length: int, found: float) -> None:
            if rate is None:
                said = f"measured at {format_length(length)}: {_hours(bill(found))} for the plan"
                console.print(said, highlight=False)
                progress.stop()
                _ask_for_hours(bill(found), agree)
                progress.start()

        run.tell, run.on_block, run.on_rate = console.print, on_block, on_rate
        on_block()
        return run.run()


def plan_in_words(
    plan: Plan, arms: Sequence[Arm], whole: Cost, notices: Sequence[str] = ()
) -> list[str]:
    """What will be asked, what it costs, and what it can show; a line each."""
    design, cells = plan.design, plan.scored
    lengths = ", ".join(format_length(length) for length in plan.lengths)
    pairs = sum(len(rows) * plan.questions_of(task) for (task, _), rows in cells.items())
    made = f"{plan.contexts} of each of {', '.join(plan.tasks)} at {lengths}; " * bool(plan.tasks)
    lines = [
        f"arms       {', '.join(f'{arm.name} ({arm.role.value})' for arm in arms)}; the reference "
        f"again on every {AGAIN_EVERY}th context (A/A)",
        *(f"file       {notice}" for notice in notices),
        f"contexts   {made}{counted(len(cells), 'cell')}, {counted(pairs, 'paired question')}; "
        f"control at {plan.control_length} tokens",
        f"cost       {whole.total:,} tokens at most, {_hours(whole)}; looks: {plan.looks}, the "
        "evaluation ends at the one that decides",
    ]
    if not cells:
        lines.append("can show   how far each pattern moves the model; no answer is right or wrong")
        return lines
    lines.append(
        f"can show   a loss of {100 * detectable(plan):.1f} points, with {design.power:.0%} "
        f"probability, if {DISCORDANCE:.0%} of the pairs differ (correlation {CORRELATION:g} "
        "within a context); both are assumed here, and measured in the report"
    )
    if (contexts := needed(plan)) > design.contexts:
        lines.append(
            f"warning    no loss beyond {points(plan.margin)} can hardly be shown: that "
            f"needs {contexts:,} contexts under these assumptions, and {design.contexts:,} are "
            f"planned. {mend(plan)}, or take a wider --margin."
        )
    return lines


def _hours(whole: Cost) -> str:
    if whole.hours is None:
        return "node-hours not known yet: give --rate, or see what the first contexts take"
    return f"{whole.hours:.2g} node-hours at {whole.rate:,.0f} tokens a second"


def _ask_for_hours(whole: Cost, agree: Callable[[str], None]) -> None:
    if whole.hours is not None and whole.hours > ASKS_ABOVE_HOURS:
        agree(f"This takes {_hours(whole)}. Go on?")


def _label(value: str) -> str:
    """What a user wrote, short enough for a legend: a file's name without its folder."""
    return Path(value).stem if value.endswith((".yaml", ".yml")) else value
