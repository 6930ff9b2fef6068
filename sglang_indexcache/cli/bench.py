"""``indexcache bench``: measure what sharing gains on your node, or predict it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from sglang_indexcache.cli.common import (
    AdminApiKeyOption,
    ApiKeyOption,
    ContextsOption,
    ModelOption,
    OutputOption,
    PatternsOption,
    UrlsOption,
    connect,
    group,
    out,
)

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": False}
"""Server flags come behind ``--``."""
PAPERS_PATTERNS, PAPERS_CONTEXTS = ("full", "1/2", "1/4"), ("10K", "60K", "120K", "200K")
PLANNED_CONTEXTS = ("32K", "64K", "128K", "200K")

app = group("Measure what sharing gains, or predict it.")


@app.command("latency", context_settings=PASS_ON)
def latency_command(
    passed_on: typer.Context,
    model: ModelOption,
    output: OutputOption,
    pattern: PatternsOption = None,
    context: ContextsOption = None,
    url: UrlsOption = None,
    api_key: ApiKeyOption = None,
    admin_api_key: AdminApiKeyOption = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="How often every pattern has its turn: A B A B.")
    ] = 3,
    new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens that each request generates.")
    ] = 64,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only prefill, decode or full. Repeat it; left out: all three."
        ),
    ] = None,
    full_concurrency: Annotated[
        int,
        typer.Option(
            metavar="N", help="Requests a rank for the full KV cache; 0 takes as many as fit."
        ),
    ] = 0,
    note: Annotated[
        str, typer.Option(metavar="TEXT", help="A sentence to keep with the result.")
    ] = "",
    side_by_side: Annotated[
        bool,
        typer.Option(
            "--side-by-side", help="Keep all servers up, so that turns are one request long."
        ),
    ] = False,
) -> None:
    """The paper's Table 1 and its bar figure, on your servers; the first pattern is the baseline.

    With --url, once for each pattern or one server in live mode for all, nothing is started.
    Without it, servers are started with the flags behind --, for example:
    indexcache bench latency --model MODEL -o out -- --tp 8 --dp 8 --enable-dp-attention
    """
    from sglang_indexcache.bench import latency, tables
    from sglang_indexcache.bench.results import METRICS, configurations
    from sglang_indexcache.bench.servers import TIMEOUT, open_servers
    from sglang_indexcache.study.plots import check_installed
    from sglang_indexcache.support.lengths import parse_length

    target = latency.read_target(model, note)
    served = configurations(pattern or PAPERS_PATTERNS, target.checkpoint)
    settings = latency.Settings(
        lengths=tuple(parse_length(text) for text in context or PAPERS_CONTEXTS),
        rounds=rounds,
        new_tokens=new_tokens,
        metrics=tuple(metric or METRICS),  # type: ignore[arg-type]  # checked by Settings.check
        full_concurrency=full_concurrency,
    )
    settings.check()
    check_installed()
    flags = passed_on.args
    clients = connect(url, api_key, admin_api_key, TIMEOUT)
    with open_servers(
        model, served, clients, flags, output / "logs", side_by_side=side_by_side
    ) as servers:
        result = latency.run(
            target,
            servers,
            served,
            settings,
            arguments=flags,
            report=partial(out.print, highlight=False),
        )
    for grid in (tables.latency_grid(result), tables.amdahl_grid(result)):
        if grid is not None:
            out.print(grid.to_terminal())
    written = ", ".join(map(str, latency.write_latency(result, output)))
    out.print(f"wrote {written}", soft_wrap=True)


@app.command("plan")
def plan_command(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FOLDER",
            help="GLM-5-FP8, GLM-5 or DeepSeek-V3.2, whose layers were measured, or a folder with "
            "the config.json of one of them.",
        ),
    ],
    pattern: PatternsOption = None,
    context: ContextsOption = None,
    gpu: Annotated[str, typer.Option(metavar="h100|h200|b200", help="The card.")] = "h200",
    gpus: Annotated[
        int,
        typer.Option("--gpus", "--tp", metavar="N", help="How many GPUs: SGLang's --tp.", min=1),
    ] = 8,
    dp: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Ranks of data-parallel attention: SGLang's --dp with --enable-dp-attention.",
            min=1,
        ),
    ] = 1,
    kv: Annotated[
        str,
        typer.Option(
            metavar="bf16|fp8",
            help="Format of the KV cache; left out: SGLang's default on that card.",
        ),
    ] = "",
) -> None:
    """What a pattern should gain on a deployment, from NVIDIA's measurements of its layers.

    For example: indexcache bench plan --model GLM-5-FP8 --gpu h200 --gpus 8
    """
    from sglang_indexcache.bench.plan import choose_patterns, plan, plan_grid
    from sglang_indexcache.support.lengths import parse_length

    contexts = [parse_length(text) for text in context or PLANNED_CONTEXTS]
    forwards = plan(model, gpu, gpus, dp, kv)
    shape = forwards.deployment.measured.shape
    patterns, said = choose_patterns(pattern or PAPERS_PATTERNS[1:], shape)
    out.print(plan_grid(forwards, patterns, contexts).to_terminal())
    ranges = forwards.range_said([one for _, one in patterns], contexts)
    for sentence in filter(None, [*forwards.sources, ranges, *said]):
        out.print(sentence, highlight=False)
