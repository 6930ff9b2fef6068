"""``indexcache eval``: whether a pattern keeps long-context quality on your checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_indexcache.cli.common import (
    CONTEXTS,
    ApiKeyOption,
    ConfigOption,
    ModelOption,
    OutputOption,
    SeedOption,
    connect,
    group,
    name_and_value,
    out,
    writable,
)
from sglang_indexcache.errors import QualityError
from sglang_indexcache.support.lengths import parse_length

if TYPE_CHECKING:
    from sglang_indexcache.ask.client import Client
    from sglang_indexcache.evaluate.evaluation import Evaluation
    from sglang_indexcache.evaluate.request import EvaluationRequest

app = group("Prove, or refute, that a pattern keeps long-context quality on your checkpoint.")

HAYSTACK_CHARACTERS = 6_000_000
"""Enough for 200,000 tokens of passages that stand there once."""
WHAT, HOW, WHERE = "What is asked", "How it is judged", "Servers and files"
"""Panels of the help."""

PatternsArgument = Annotated[
    list[str],
    typer.Argument(metavar="PATTERN", help="One or more patterns to evaluate, in any form."),
]
MarginOption = Annotated[
    float,
    typer.Option(
        metavar="POINTS",
        help="Non-inferiority margin: the loss that still counts as none, in points of right "
        "answers.",
        rich_help_panel=HOW,
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
        metavar="[NAME=]PATH",
        help="A run's folder or file: lm-eval's samples_*.jsonl, or any .jsonl with id and score a "
        "line.",
    ),
]


def _takes(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as options, and an instance as first argument."""
    shared = inspect.signature(options, eval_str=True).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def run(**given: Any) -> None:
            command(options(**{name: given.pop(name) for name in shared}), **given)

        every = [one.replace(kind=one.KEYWORD_ONLY) for one in (*shared.values(), *own)]
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        run.__doc__ = command.__doc__
        return run

    return decorate


@dataclass
class Questions:
    """What is asked, of which patterns."""

    patterns: PatternsArgument
    model: ModelOption
    against: Annotated[
        str, typer.Option(metavar="PATTERN", help="Reference pattern.", rich_help_panel=HOW)
    ] = "full"
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A generated task. Repeat it. The default is every published form, or the rows "
            "alone.",
            rich_help_panel=WHAT,
        ),
    ] = None
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=FILE",
            help="Rows of a file (.parquet, .jsonl, .json), where KIND is mrcr (openai/mrcr), "
            "graphwalks (openai/graphwalks), longbench-v2 (THUDM/LongBench-v2), or prompts: your "
            "own, with messages or prompt, and answer. Repeat it.",
            rich_help_panel=WHAT,
        ),
    ] = None
    length: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS",
            help=f"Length of a context with question and answer: {CONTEXTS}. Repeat it. The "
            "default is 32Ki, 64Ki and so on up to the model's context. A file's row belongs to "
            "the shortest that holds it.",
            rich_help_panel=WHAT,
        ),
    ] = None
    contexts: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="Contexts of each task at each length; of a file, as far as it has them. The "
            "default is as many as the margin needs.",
            rich_help_panel=WHAT,
        ),
    ] = None
    haystack: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text file to hide things in. The default is generated, the same everywhere.",
            rich_help_panel=WHAT,
        ),
    ] = None
    margin: MarginOption = 1.0
    endpoint: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What is compared: answers (right or wrong), or probability (of the right "
            "answer), which needs fewer contexts and is another question.",
            rich_help_panel=HOW,
        ),
    ] = "answers"
    looks: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            help="Planned analyses, the last at the end; the run stops early once one decides.",
            rich_help_panel=HOW,
        ),
    ] = 4
    control: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="Positive control: a pattern known to lose a little. A task that does not see it "
            "lose leaves the claim. The default is uniform:1/4.",
            rich_help_panel=HOW,
        ),
    ] = ""
    seed: SeedOption = 0
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens that the servers prefill in a second, for the cost. Else it is measured "
            "on the first context of each length.",
            rich_help_panel=WHERE,
        ),
    ] = None

    def read(self) -> EvaluationRequest:
        """What that amounts to; files are read, and their tokens counted."""
        from transformers import AutoTokenizer

        from sglang_indexcache.checkpoint import Checkpoint, read_config, text_config
        from sglang_indexcache.evaluate.corpus import Corpus, select_rows
        from sglang_indexcache.evaluate.plan import (
            EvaluationPlan,
            default_lengths,
            enough_contexts,
        )
        from sglang_indexcache.evaluate.request import EvaluationRequest
        from sglang_indexcache.evaluate.tasks import DEFAULT
        from sglang_indexcache.evaluate.tasks.context import QUESTIONS
        from sglang_indexcache.study.cost import Rate

        if self.rate is not None and self.rate <= 0:
            raise QualityError(f"a rate of {self.rate:g} tokens a second is not above 0 (--rate)")
        selects_all = int(Checkpoint.read(self.model).shape["index_topk"])
        longest = text_config(read_config(self.model)).get("max_position_embeddings")
        given = tuple(sorted({parse_length(one) for one in self.length or ()}))
        lengths = given or default_lengths(longest)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        files = self.files
        tasks = tuple(self.task or (() if files else DEFAULT))
        margin, contexts = self.margin / 100, self.contexts
        if contexts is None:
            cells = max(len(tasks), 1) * len(lengths)
            behind = QUESTIONS if tasks else 1
            contexts = enough_contexts(cells, behind, margin, self.looks, self.endpoint)
        plan = EvaluationPlan(
            *(tasks, lengths, contexts, QUESTIONS, selects_all, margin, self.looks, self.seed),
            endpoint=self.endpoint,
        )
        for path in files.values():  # long ones take a while
            out.print(
                f"counting the tokens of {path}", highlight=False, soft_wrap=True, markup=False
            )
        plan, items, told = select_rows(plan, files, tokenizer, int(longest or lengths[-1]))
        flags = [
            f"--contexts {plan.contexts} --looks {plan.looks} --seed {plan.seed}",
            *([f"--haystack {self.haystack.name}"] if self.haystack else []),
            *(f"--rows {name}={path.name}" for name, path in files.items()),
        ]
        return EvaluationRequest(
            self.model,
            self.against,
            tuple(self.patterns),
            self.control,
            plan,
            Corpus(tokenizer, _haystack(self.haystack), QUESTIONS, items),
            " ".join(flags),
            None if self.rate is None else Rate(self.rate, "given by --rate"),
            told,
        )

    @property
    def files(self) -> dict[str, Path]:
        """What a user has, by its kind."""
        from sglang_indexcache.evaluate.tasks.files import FILES

        given: dict[str, Path] = {}
        for text in self.rows or ():
            kind, place = name_and_value(text, "--rows")
            if kind not in FILES:
                raise QualityError(f"--rows {kind}=... is none of {', '.join(FILES)}")
            if kind in given:
                raise QualityError(f"--rows {kind}=... is given twice; join the files")
            given[kind] = Path(place)
        return given


@app.command("run")
@_takes(Questions)
def run_command(
    asked: Questions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            callback=writable,
            help="A folder for everything that is written; needed unless --dry-run.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            metavar="[NAME=]URL",
            help="A server in live mode, which then serves every arm; or NAME=URL for each arm, "
            "where NAME is the pattern as given.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    api_key: ApiKeyOption = None,
    config: ConfigOption = None,  # noqa: ARG001
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Say what the evaluation costs and what loss it can show, and make every context "
            "once; send nothing.",
            rich_help_panel=WHERE,
        ),
    ] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Do not ask before more than one node-hour.", rich_help_panel=WHERE
        ),
    ] = False,
) -> None:
    """Evaluate patterns on running servers. Start it again after any stop: it resumes.

    Each pattern gets a verdict: no loss beyond the margin, a loss, undecided and how many contexts
    more would decide, or that the tasks cannot see it.

    Example: indexcache eval run 1/2 1/4 --model MODEL --url http://127.0.0.1:30000 -o quality/
    """
    from sglang_indexcache.evaluate.run import run_evaluation

    if dry_run:
        request = asked.read()
        request.tell(out)
        request.corpus.check(request.plan.planned, out)
        return
    servers = _servers(url, api_key)
    if output is None:
        raise QualityError("give a folder for the results (--output), or only plan (--dry-run)")

    def agree(question: str) -> None:
        if not yes and not typer.confirm(question):
            raise QualityError("not begun; --yes does without the question")

    _report(run_evaluation(asked.read(), servers, output, out, agree=agree), output)


@app.command("report")
def report_command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The output folder of an evaluation.")
    ],
    write_quality: WriteQualityOption = None,
) -> None:
    """Write an evaluation's report again, from its journal alone; it may still be running.

    Example: indexcache eval report quality/ --write-quality found/MODEL-1of4.yaml
    """
    from sglang_indexcache.evaluate.evaluation import load
    from sglang_indexcache.evaluate.report import write_quality as write

    evaluation = load(folder)
    _report(evaluation, folder)
    if write_quality is not None:
        out.print(f"{write_quality}: {write(write_quality, evaluation)}", highlight=False)


@app.command("compare")
def compare_command(
    reference: LogArgument,
    candidate: LogArgument,
    output: OutputOption,
    margin: MarginOption = 1.0,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which score to compare, if the logs have several."),
    ] = None,
    again: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help="A second run of the reference: how much the engine differs from itself.",
        ),
    ] = None,
    bad: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help="A run with a pattern that is known to be bad: without one, nothing shows that "
            "these questions could have seen a loss.",
        ),
    ] = None,
) -> None:
    """Pair two runs of another harness and give the verdict, sentence and pictures of ours.

    REFERENCE ran with every indexer, CANDIDATE with the pattern, both on the same questions.

    Example: indexcache eval compare all-F=runs/full 1of4=runs/quarter -o compared/
    """
    from sglang_indexcache.evaluate.compare import compare_logs
    from sglang_indexcache.evaluate.logs import read_log
    from sglang_indexcache.study.provenance import commit

    given = {"reference": reference, "candidate": candidate, "again": again, "bad": bad}
    places = {role: _named(place, role) for role, place in given.items() if place}
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
    """``NAME=PATH``, or a path and the name that it gets."""
    before, equals, after = place.partition("=")
    return (before, after) if equals and not Path(place).exists() else (name, place)


def _report(evaluation: Evaluation, folder: Path) -> None:
    from sglang_indexcache.evaluate.report import write_report

    said = write_report(evaluation, folder)
    out.print(said, highlight=False, soft_wrap=True, markup=False)
    out.print(f"everything is in {folder}; look at {folder / 'report.html'}")


def _haystack(path: Path | None) -> str:
    from sglang_indexcache.evaluate.tasks.words import prose

    if path is None:
        return prose(HAYSTACK_CHARACTERS)
    try:
        return path.read_text(encoding="utf-8", errors="ignore")
    except OSError as error:
        raise QualityError(f"cannot read {path}: {error.strerror}") from error


def _servers(urls: list[str] | None, api_key: str | None) -> dict[str, Client]:
    """By the name that stands before the URL; a URL alone has none."""
    if not urls:
        raise QualityError(
            "this asks servers: give --url URL of one in live mode, or --url NAME=URL of one for "
            "each arm. --dry-run needs none."
        )
    found: dict[str, Client] = {}
    for text in urls:
        name, equals, url = text.partition("=")
        if "://" in name or not equals:
            name, url = "", text
        if name in found:
            raise QualityError(
                f"two servers are given for {name or 'all arms'}; write NAME=URL for each arm"
            )
        [found[name]] = connect([url], api_key)
    return found
