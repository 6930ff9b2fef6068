"""``indexcache eval``: whether a pattern keeps long-context quality on your checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    takes,
)
from sglang_indexcache.errors import QualityError
from sglang_indexcache.support.lengths import parse_length

if TYPE_CHECKING:
    from sglang_indexcache.client import Client
    from sglang_indexcache.evaluate.evaluation import Evaluation
    from sglang_indexcache.evaluate.plan import Material
    from sglang_indexcache.evaluate.session import Request

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
        "NAME is the pattern as given. An address that ends in /v1 is asked by chat completions, "
        "of any engine.",
    ),
]
TasksOption = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        help="What to ask. Repeat it. The default is every published form, or the files alone.",
    ),
]
LengthsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--length",
        help=f"Length of a context with question and answer: {CONTEXTS}. Repeat it. The default is "
        "32Ki, 64Ki and so on up to the model's context. A file's row belongs to the shortest that "
        "holds it.",
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option(help="Rows of that data set, as published: .parquet, .jsonl or .json."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="Your own prompts, .jsonl: messages or prompt, and answer if it is known. Without "
        "one the arms are held against what the reference says."
    ),
]
GenerateOption = Annotated[
    bool,
    typer.Option(
        "--generate", help="Let the model answer by itself. The default scores right answers."
    ),
]
ContextsOption = Annotated[
    int,
    typer.Option(help="Contexts of each task at each length; of a file, as far as it has them."),
]
QuestionsOption = Annotated[int, typer.Option(help="Questions behind a generated context.")]
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


@dataclass
class Questions:
    """What is asked, of which patterns."""

    patterns: PatternsArgument
    model: ModelOption
    against: AgainstOption = "full"
    task: TasksOption = None
    mrcr: FileOption = None
    graphwalks: FileOption = None
    longbench_v2: FileOption = None
    prompts: PromptsOption = None
    length: LengthsOption = None
    contexts: ContextsOption = 32
    questions: QuestionsOption = 8
    margin: MarginOption = 1.0
    looks: LooksOption = 4
    seed: SeedOption = 0
    control: ControlOption = ""
    haystack: HaystackOption = None
    rate: RateOption = None
    generate: GenerateOption = False

    def read(self, *, generate: bool | None = None) -> tuple[Request, Material]:
        """What that amounts to; files are read, and their tokens counted."""
        from transformers import AutoTokenizer

        from sglang_indexcache.checkpoint import Checkpoint, read_config, text_config
        from sglang_indexcache.evaluate.plan import Material, Plan, default_lengths
        from sglang_indexcache.evaluate.session import Request
        from sglang_indexcache.evaluate.shelf import Bounds, fill_shelf
        from sglang_indexcache.evaluate.tasks import DEFAULT

        selects_all = int(Checkpoint.read(self.model).shape["index_topk"])
        longest = text_config(read_config(self.model)).get("max_position_embeddings")
        given = tuple(sorted({parse_length(one) for one in self.length or ()}))
        lengths = given or default_lengths(longest)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        files = self.files
        bounds = Bounds(
            lengths,
            int(longest or lengths[-1]),
            selects_all,
            self.contexts,
            self.looks,
            self.seed,
            self.generate if generate is None else generate,
        )
        with out.status("") as status:  # a line in a log, a moving one in a terminal

            def on_row(name: str, rows: int) -> None:
                if rows == 1:
                    said = f"counting the tokens of {files[name]}"
                    out.print(said, highlight=False, soft_wrap=True, markup=False)
                status.update(f"{name}: row {rows:,}")

            shelf = fill_shelf(files, tokenizer, bounds, on_row)
        plan = Plan(
            tuple(self.task or (() if files else DEFAULT)),
            lengths,
            self.contexts,
            self.questions,
            selects_all,
            self.margin / 100,
            self.looks,
            self.seed,
            shelf.taken,
        )
        material = Material(tokenizer, _haystack(self.haystack), self.questions, shelf.items)
        flags = [
            f"--contexts {plan.contexts} --questions {plan.questions} --looks {plan.looks} "
            f"--seed {plan.seed} --haystack {self.haystack.name if self.haystack else 'machine'}",
            *(f"--{name} {path.name}" for name, path in files.items()),
        ]
        request = Request(
            self.model,
            self.against,
            tuple(self.patterns),
            self.control,
            plan,
            " ".join(flags),
            notices=shelf.told,
        )
        return request, material

    @property
    def files(self) -> dict[str, Path]:
        """What a user has, by its task."""
        given = {
            "mrcr": self.mrcr,
            "graphwalks": self.graphwalks,
            "longbench-v2": self.longbench_v2,
            "prompts": self.prompts,
        }
        return {name: path for name, path in given.items() if path is not None}


@app.command("run")
@takes(Questions)
def run_command(
    asked: Questions,
    output: OutputOption,
    url: ServersOption = None,
    api_key: ApiKeyOption = None,
    admin_api_key: AdminApiKeyOption = None,
    reply_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that a reply may have beyond the right answer's. The default is 16 with "
            "--generate, and 1024 for chat completions."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before more than one node-hour.")
    ] = False,
    write_quality: WriteQualityOption = None,
) -> None:
    """Evaluate patterns on running servers. Start it again after any stop: it resumes.

    Says of each pattern: no loss beyond the margin, a loss, undecided and how many contexts more
    would decide, or that the tasks cannot see it.
    """
    from sglang_indexcache.evaluate.chat import SPARE as CHAT_SPARE
    from sglang_indexcache.evaluate.chat import check_only_chat
    from sglang_indexcache.evaluate.entry import check_entry
    from sglang_indexcache.evaluate.replies import SPARE
    from sglang_indexcache.evaluate.session import make_arm_list, run_evaluation
    from sglang_indexcache.library import load_entry

    if write_quality is not None:  # before hours of work whose verdict shall go there
        load_entry(write_quality)
    servers = _servers(url, api_key, admin_api_key)
    chat = check_only_chat(servers)
    writes = asked.generate or chat
    _check_reply_tokens(reply_tokens, writes=writes)
    request, material = asked.read(generate=writes)
    if write_quality is not None:
        check_entry(
            write_quality,
            make_arm_list(request),
            scored=bool(request.plan.scored),
            verified=not chat,
        )
    if writes:
        spare = CHAT_SPARE if chat else SPARE
        tokens = spare if reply_tokens is None else reply_tokens
        request = replace(request, chat=chat, reply_tokens=tokens)

    def agree(question: str) -> None:
        if not yes and not typer.confirm(question):
            raise QualityError("not begun; --yes does without the question")

    found = run_evaluation(request, servers, material, output, out, rate=asked.rate, agree=agree)
    _report(found, output, write_quality)


@app.command("plan")
@takes(Questions)
def plan_command(asked: Questions) -> None:
    """Say what an evaluation costs and what loss it can show; nothing is sent anywhere."""
    from sglang_indexcache.evaluate.plan import cost, tails
    from sglang_indexcache.evaluate.session import make_arm_list, plan_in_words

    request, material = asked.read()
    arms = make_arm_list(request)
    whole = cost(request.plan, len(arms), tails(request.plan, material), asked.rate)
    for line in plan_in_words(request.plan, arms, whole, request.notices):
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
    from sglang_indexcache.evaluate.journal import load
    from sglang_indexcache.evaluate.logs.to_inspect import write_inspect

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
    from sglang_indexcache.evaluate.logs import read_log
    from sglang_indexcache.evaluate.logs.compare import compare_logs
    from sglang_indexcache.evaluate.report import write_report
    from sglang_indexcache.study.provenance import commit

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


def _check_reply_tokens(given: int | None, *, writes: bool) -> None:
    if given is not None and not writes:
        raise QualityError(
            "--reply-tokens is for answers that the model writes itself: add --generate, or leave "
            "it out"
        )
    if given is not None and given < 0:
        raise QualityError(f"--reply-tokens {given} is below 0: no answer would fit")


def _report(evaluation: Evaluation, folder: Path, write_quality: Path | None) -> None:
    from sglang_indexcache.evaluate.entry import write_quality as write
    from sglang_indexcache.evaluate.report import write_report

    said = write_report(evaluation, folder)
    out.print(said, highlight=False, soft_wrap=True, markup=False)
    out.print(f"everything is in {folder}; look at {folder / 'report.html'}")
    if write_quality is not None:
        out.print(f"{write_quality}: {write(write_quality, evaluation)}", highlight=False)


def _haystack(path: Path | None) -> str:
    from sglang_indexcache.support.text import machine_text

    if path is None:
        return "\n".join(machine_text(HAYSTACK_CHARACTERS))
    try:
        return path.read_text(encoding="utf-8", errors="ignore")
    except OSError as error:
        raise QualityError(f"cannot read {path}: {error.strerror}") from error


def _servers(
    urls: list[str] | None, api_key: str | None, admin_api_key: str | None
) -> dict[str, Client]:
    """By the name that stands before the URL; a URL alone has none."""
    from sglang_indexcache.evaluate.chat import ChatEndpoint, is_chat

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
        if is_chat(url):
            found[name] = ChatEndpoint(url, api_key=api_key)
        else:
            [found[name]] = connect([url], api_key, admin_api_key)
    return found
