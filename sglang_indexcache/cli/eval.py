"""``indexcache eval``: whether a pattern keeps long-context quality on your checkpoint."""

from __future__ import annotations

from dataclasses import replace
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
    from sglang_indexcache.quality.evaluation import Evaluation
    from sglang_indexcache.quality.plan import Material, Plan
    from sglang_indexcache.quality.session import Request

app = group("Prove, or refute, that a pattern keeps long-context quality on your checkpoint.")

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
        "32Ki, 64Ki and so on up to the model's context.",
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

WriteQualityOption = Annotated[
    Path | None,
    typer.Option(
        "--write-quality",
        metavar="FILE",
        help="Write the verdict into the quality section of this pattern file (YAML): then "
        "patterns show, doctor and the server say what is known of it on this checkpoint.",
    ),
]
LogArgument = Annotated[
    str,
    typer.Argument(
        help="A run's folder or file: lm-eval (samples_*.jsonl), sgl-eval, evalscope, Inspect, or "
        "the output of an evaluation of ours as FOLDER@ARM. Write NAME=PATH to name it."
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
    generate: Annotated[
        bool,
        typer.Option(
            "--generate", help="Let the model answer by itself. The default scores right answers."
        ),
    ] = False,
    reply_tokens: Annotated[
        int, typer.Option(help="With --generate: tokens beyond the right answer's.")
    ] = 16,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before more than one node-hour.")
    ] = False,
    write_quality: WriteQualityOption = None,
) -> None:
    """Evaluate patterns on running servers. Start it again after any stop: it resumes.

    Says of each pattern: no loss beyond the margin, a loss, undecided and how many contexts more
    would decide, or that the tasks cannot see it.
    """
    from sglang_indexcache.quality.session import run_evaluation

    plan = _plan(model, task, length, contexts, questions, margin, looks, seed)
    request = _request(model, against, patterns, control, plan, haystack)
    if generate:
        request = replace(request, reply_tokens=reply_tokens)
    servers = _servers(url, api_key, admin_api_key)

    def agree(question: str) -> None:
        if not yes and not typer.confirm(question):
            raise QualityError("not begun; --yes does without the question")

    _check_entry(write_quality)
    material = _material(model, haystack, questions)
    found = run_evaluation(request, servers, material, output, out, rate=rate, agree=agree)
    _report(found, output, write_quality)


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


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(help="The output folder of an evaluation.")],
    write_quality: WriteQualityOption = None,
    inspect: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write logs of Inspect there too, for its viewer."),
    ] = None,
) -> None:
    """Write an evaluation's report again, from its journal alone; it may still be running."""
    from sglang_indexcache.quality.journal import load
    from sglang_indexcache.quality.logs.to_inspect import write_inspect

    evaluation = load(folder)
    _report(evaluation, folder, write_quality)
    if inspect is not None:
        count = len(write_inspect(evaluation, inspect))
        out.print(f"{count} logs of Inspect are in {inspect}: inspect view --log-dir {inspect}")


@app.command("compare")
def compare_command(
    reference: LogArgument,
    candidate: LogArgument,
    output: OutputOption,
    margin: MarginOption = 1.0,
    metric: Annotated[
        str | None, typer.Option(help="Which score to compare, if the logs have several.")
    ] = None,
    again: Annotated[
        str | None,
        typer.Option(
            help="A second run of the reference: how much the engine differs from itself."
        ),
    ] = None,
    bad: Annotated[
        str | None,
        typer.Option(
            help="A run with a pattern that is known to be bad: without one, nothing shows that "
            "these questions could have seen a loss."
        ),
    ] = None,
) -> None:
    """Pair two runs of another harness and give the verdict, sentence and pictures of ours.

    REFERENCE ran with every indexer, CANDIDATE with the pattern, both on the same questions.
    """
    from sglang_indexcache.quality.logs import read_log
    from sglang_indexcache.quality.logs.compare import compare_logs
    from sglang_indexcache.quality.report import write_report
    from sglang_indexcache.support.provenance import commit

    given = {"reference": reference, "candidate": candidate, "again": again, "bad": bad}
    places = {role: _named(place, role) for role, place in given.items() if place}
    logs = {role: read_log(*named, metric) for role, named in places.items()}
    flags = [f"{role} {Path(place).name}" for role, (_, place) in places.items()]
    record, verdicts = compare_logs(
        logs["reference"],
        logs["candidate"],
        margin=margin / 100,
        again=logs.get("again"),
        bad=logs.get("bad"),
        facts={"commit": commit(), "flags": flags},
    )
    out.print(write_report(record, output, verdicts), highlight=False, soft_wrap=True, markup=False)
    out.print(f"everything is in {output}")


def _named(place: str, name: str) -> tuple[str, str]:
    """``NAME=PATH``, or a path and the name that it gets."""
    before, equals, after = place.partition("=")
    return (before, after) if equals and not Path(place).exists() else (name, place)


def _check_entry(path: Path | None) -> None:
    """Before hours of work whose verdict shall go there."""
    from sglang_indexcache.library import load_entry

    if path is not None:
        load_entry(path)


def _report(evaluation: Evaluation, folder: Path, write_quality: Path | None) -> None:
    from sglang_indexcache.quality.entry import write_quality as write
    from sglang_indexcache.quality.report import write_report

    said = write_report(evaluation, folder)
    out.print(said, highlight=False, soft_wrap=True, markup=False)
    out.print(f"everything is in {folder}; look at {folder / 'report.html'}")
    if write_quality is not None:
        out.print(f"{write_quality}: {write(write_quality, evaluation)}", highlight=False)


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
    from sglang_indexcache.checkpoint import Checkpoint, read_config, text_config
    from sglang_indexcache.quality.plan import Plan, default_lengths
    from sglang_indexcache.quality.tasks import DEFAULT

    context = text_config(read_config(model)).get("max_position_embeddings")
    lengths = sorted({parse_length(one) for one in length or ()}) or default_lengths(context)
    selects = int(Checkpoint.read(model).shape["index_topk"])
    tasks = tuple(task or DEFAULT)
    return Plan(tasks, tuple(lengths), contexts, questions, selects, margin / 100, looks, seed)


def _request(
    model: Path, against: str, patterns: list[str], control: str, plan: Plan, haystack: Path | None
) -> Request:
    from sglang_indexcache.quality.session import Request

    flags = (
        f"--contexts {plan.contexts} --questions {plan.questions} --looks {plan.looks} "
        f"--seed {plan.seed} --haystack {haystack.name if haystack else 'machine'}"
    )
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
