"""``indexcache eval``: whether a pattern keeps long-context quality on your checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_indexcache.cli.common import (
    CONTEXTS,
    AdminApiKeyOption,
    ApiKeyOption,
    ModelOption,
    OutputOption,
    SeedOption,
    connect,
    group,
    out,
)
from sglang_indexcache.errors import QualityError
from sglang_indexcache.support.lengths import parse_length

if TYPE_CHECKING:
    from sglang_indexcache.client import Client
    from sglang_indexcache.quality.plan import Material, Plan
    from sglang_indexcache.quality.session import Request

app = group("Prove, or refute, that a pattern keeps long-context quality on your checkpoint.")

DEFAULT_LENGTHS = ("32Ki", "64Ki", "128Ki")
HAYSTACK_CHARACTERS = 6_000_000
"""Of this machine's text: enough for 200,000 tokens of passages that stand there once."""

PatternsArgument = Annotated[
    list[str], typer.Argument(help="One or more patterns to evaluate, in any form.")
]
AgainstOption = Annotated[str, typer.Option(help="The pattern that they are compared with.")]
ServersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        help="A server in live mode, which then serves every arm; or NAME=URL for each arm, where "
        "NAME is the pattern as given.",
    ),
]
TasksOption = Annotated[
    list[str] | None,
    typer.Option("--task", help="What to ask. Repeat it. The default is every published form."),
]
LengthsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--length",
        help=f"Length of a context with question and answer: {CONTEXTS}. Repeat it. The default is "
        f"{', '.join(DEFAULT_LENGTHS)}.",
    ),
]
ContextsOption = Annotated[int, typer.Option(help="Contexts of each task at each length.")]
QuestionsOption = Annotated[int, typer.Option(help="Questions behind one context.")]
MarginOption = Annotated[
    float, typer.Option(help="The loss that still counts as none, in points of right answers.")
]
LooksOption = Annotated[
    int, typer.Option(help="How often to judge: the evaluation may end at each look.")
]
ControlOption = Annotated[
    str,
    typer.Option(
        "--control",
        help="A pattern that is known to be bad, in any form; it must be seen to lose. The default "
        "keeps the first layer's indexer alone.",
    ),
]
HaystackOption = Annotated[
    Path | None,
    typer.Option(
        help="A text file to hide things in. The default is the Python sources of this machine."
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        help="Tokens that the servers prefill in a second, for the cost. Else it is measured on "
        "the first context of each length."
    ),
]


@app.command("run")
def run_command(
    patterns: PatternsArgument,
    model: ModelOption,
    output: OutputOption,
    url: ServersOption = None,
    api_key: ApiKeyOption = None,
    admin_api_key: AdminApiKeyOption = None,
    against: AgainstOption = "full",
    task: TasksOption = None,
    length: LengthsOption = None,
    contexts: ContextsOption = 32,
    questions: QuestionsOption = 8,
    margin: MarginOption = 1.0,
    looks: LooksOption = 4,
    seed: SeedOption = 0,
    control: ControlOption = "",
    haystack: HaystackOption = None,
    rate: RateOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before more than one node-hour.")
    ] = False,
) -> None:
    """Evaluate patterns on running servers. Start it again after any stop: it resumes.

    Says of each pattern: no loss beyond the margin, a loss, undecided and how many contexts more
    would decide, or that the tasks cannot see it.
    """
    from sglang_indexcache.quality.session import run_evaluation

    plan = _plan(model, task, length, contexts, questions, margin, looks, seed)
    request = _request(model, against, patterns, control, plan, haystack)
    servers = _servers(url, api_key, admin_api_key)

    def agree(question: str) -> None:
        if not yes and not typer.confirm(question):
            raise QualityError("not begun; --yes does without the question")

    material = _material(model, haystack, questions)
    found = run_evaluation(request, servers, material, output, out, rate=rate, agree=agree)
    for look, verdict in found.verdicts().values():
        out.print(f"look {look}: {verdict.sentence}", highlight=False)
    out.print(f"everything is in {output}")


@app.command("plan")
def plan_command(
    patterns: PatternsArgument,
    model: ModelOption,
    against: AgainstOption = "full",
    task: TasksOption = None,
    length: LengthsOption = None,
    contexts: ContextsOption = 32,
    questions: QuestionsOption = 8,
    margin: MarginOption = 1.0,
    looks: LooksOption = 4,
    seed: SeedOption = 0,
    control: ControlOption = "",
    haystack: HaystackOption = None,
    rate: RateOption = None,
) -> None:
    """Say what an evaluation costs and what loss it can show; nothing is sent anywhere."""
    from sglang_indexcache.quality.plan import cost, tails
    from sglang_indexcache.quality.session import make_arm_list, plan_in_words

    plan = _plan(model, task, length, contexts, questions, margin, looks, seed)
    arms = make_arm_list(_request(model, against, patterns, control, plan, haystack))
    tokens = tails(plan, _material(model, haystack, questions))
    for line in plan_in_words(plan, arms, cost(plan, len(arms), tokens, rate)):
        out.print(line, highlight=False)


def _plan(
    model: Path,
    task: list[str] | None,
    length: list[str] | None,
    contexts: int,
    questions: int,
    margin: float,
    looks: int,
    seed: int,
) -> Plan:
    from sglang_indexcache.checkpoint import Checkpoint
    from sglang_indexcache.quality.plan import Plan
    from sglang_indexcache.quality.tasks import DEFAULT

    lengths = sorted(parse_length(one) for one in length or DEFAULT_LENGTHS)
    selects = int(Checkpoint.read(model).shape["index_topk"])
    tasks = tuple(task or DEFAULT)
    return Plan(tasks, tuple(lengths), contexts, questions, selects, margin / 100, looks, seed)


def _request(
    model: Path, against: str, patterns: list[str], control: str, plan: Plan, haystack: Path | None
) -> Request:
    from sglang_indexcache.quality.session import Request

    flags = {**plan.identity, "haystack": haystack.name if haystack else "machine"}
    return Request(model, against, tuple(patterns), control, plan, flags)


def _material(model: Path, haystack: Path | None, questions: int) -> Material:
    from transformers import AutoTokenizer

    from sglang_indexcache.quality.plan import Material
    from sglang_indexcache.support.text import machine_text

    if haystack is None:
        text = "\n".join(machine_text(HAYSTACK_CHARACTERS))
    else:
        try:
            text = haystack.read_text(encoding="utf-8", errors="ignore")
        except OSError as error:
            raise QualityError(f"cannot read {haystack}: {error.strerror}") from error
    return Material(AutoTokenizer.from_pretrained(model), text, questions)


def _servers(
    urls: list[str] | None, api_key: str | None, admin_api_key: str | None
) -> dict[str, Client]:
    """By the name that stands before the URL; a URL alone has none."""
    if not urls:
        raise QualityError("give a server in live mode with --url, or one for each arm")
    found: dict[str, Client] = {}
    for text in urls:
        name, equals, url = text.partition("=")
        if "://" in name or not equals:
            name, url = "", text
        if name in found:
            raise QualityError(
                f"two servers are given for {name or 'all arms'}; write NAME=URL for each arm"
            )
        [found[name]] = connect([url], api_key, admin_api_key)
    return found
