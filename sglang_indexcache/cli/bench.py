"""``indexcache bench``: measure what sharing gains on your node, or predict it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from typer import Option

from sglang_indexcache.cli.common import (
    LENGTH,
    AdminApiKey,
    ApiKey,
    Command,
    Figures,
    Json,
    Model,
    Output,
    Urls,
    connect,
    group,
    out,
    print_json,
)

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": False}
"""Command settings with which server flags are accepted after ``--``."""
PAPERS_PATTERNS, PAPERS_CONTEXTS = ("full", "1/2", "1/4"), ("10K", "60K", "120K", "200K")
PLANNED_CONTEXTS = ("32K", "64K", "128K", "200K")

app = group("Measure what sharing gains, or predict it.")

# fmt: off
Patterns = Annotated[list[str] | None, Option("--pattern", metavar="[NAME=]PATTERN", help=
    "A pattern in any form, NAME for the tables. Repeat it.")]
Contexts = Annotated[list[str] | None, Option("--context", metavar="TOKENS", help=
    f"Context length: {LENGTH} Repeat it.")]
Rounds = Annotated[int, Option("--rounds", metavar="N", help=
    "How often every pattern has its turn: A B A B.")]
NewTokens = Annotated[int, Option("--new-tokens", metavar="N", help=
    "Tokens that each request generates.")]
MeasuredModel = Annotated[str, Option("--model", "--model-path", metavar="NAME|FOLDER", help=
    "GLM-5-FP8 or DeepSeek-V3.2, whose layers were measured, or a folder of such a checkpoint.")]
Gpu = Annotated[str, Option("--gpu", metavar="h200|b200", help="The card.")]
Gpus = Annotated[int, Option("--gpus", "--tp", min=1, metavar="8", help=
    "How many GPUs, SGLang's --tp: sums are there for eight.")]
Dp = Annotated[int, Option("--dp", min=1, metavar="N", help=
    "Ranks of data-parallel attention: SGLang's --dp with --enable-dp-attention.")]
# fmt: on


@app.command("latency", cls=Command, context_settings=PASS_ON)
def latency_command(
    passed_on: typer.Context,
    model: Model,
    output: Output,
    pattern: Patterns = None,
    context: Contexts = None,
    url: Urls = None,
    api_key: ApiKey = None,
    admin_api_key: AdminApiKey = None,
    rounds: Rounds = 3,
    new_tokens: NewTokens = 64,
    figures: Figures = "png",
) -> None:
    """Measure the paper's Table 1 and bar figure on your servers; the first pattern is the base.

    With --url, once for each pattern or one server in live mode for all, nothing is started.
    Without it, servers are started with the flags behind --, for example:
    indexcache bench latency --model MODEL -o out -- --tp 8 --dp 8 --enable-dp-attention
    """
    from sglang_indexcache.lab.latency import measure, tables
    from sglang_indexcache.lab.latency.results import configurations
    from sglang_indexcache.lab.latency.servers import TIMEOUT, open_servers
    from sglang_indexcache.lab.runs.plots import check_installed
    from sglang_indexcache.lab.runs.progress import resumable
    from sglang_indexcache.library.lengths import parse_length

    target = measure.read_target(model)
    served = configurations(pattern or PAPERS_PATTERNS, target.checkpoint)
    settings = measure.Settings(
        lengths=tuple(parse_length(text) for text in context or PAPERS_CONTEXTS),
        rounds=rounds,
        new_tokens=new_tokens,
    )
    settings.check()
    check_installed()
    flags = passed_on.args
    clients = connect(url, api_key, admin_api_key, TIMEOUT)
    servers = open_servers(model, served, clients, flags, output / "logs")
    report = partial(out.print, highlight=False)
    with resumable(out, output, "every whole round"):
        result = measure.run(
            target, servers, served, settings, output, arguments=flags, report=report
        )
    out.print(tables.latency_grid(result).to_terminal())
    files = ", ".join(map(str, measure.write_latency(result, output, figures)))
    out.print(f"wrote {files}", soft_wrap=True)


@app.command("plan", cls=Command)
def plan_command(
    model: MeasuredModel,
    pattern: Patterns = None,
    context: Contexts = None,
    gpu: Gpu = "h200",
    gpus: Gpus = 8,
    dp: Dp = 1,
    as_json: Json = False,
) -> None:
    """Tell what a pattern should gain on eight GPUs, composed from NVIDIA's measured layers.

    With the row split beside it, where ranks share a request's attention. For example:
    indexcache bench plan --model GLM-5-FP8 --gpu h200
    """
    from sglang_indexcache.lab.latency.forecast import (
        MODELS,
        choose_patterns,
        find_composed,
        plan_grid,
        plan_to_json,
    )
    from sglang_indexcache.library.lengths import parse_length

    contexts = [parse_length(text) for text in context or PLANNED_CONTEXTS]
    deployment = find_composed(model, gpu, gpus, dp)
    shape = MODELS[deployment.model].shape
    patterns, notes = choose_patterns(pattern or PAPERS_PATTERNS[1:], shape)
    sentences = [*filter(None, [*deployment.sources, *notes])]
    if as_json:
        print_json(plan_to_json(deployment, patterns, contexts) | {"notes": sentences})
        return
    out.print(plan_grid(deployment, patterns, contexts).to_terminal())
    for sentence in sentences:
        out.print(sentence, highlight=False)
