"""``indexcache bench``: measure what sharing gains on your node, or predict it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_indexcache.cli.common import (
    CONTEXTS,
    AdminApiKeyOption,
    ApiKeyOption,
    ContextsOption,
    ModelOption,
    OutputOption,
    PatternsOption,
    SeedOption,
    UrlsOption,
    connect,
    group,
    name_and_value,
    out,
)

if TYPE_CHECKING:
    from rich.table import Table

RoundsOption = Annotated[int, typer.Option(help="How often every pattern has its turn: A B A B.")]
NoteOption = Annotated[
    str, typer.Option(help="A sentence to keep with the result, such as what the weights are.")
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(help="An environment variable of the servers, NAME=VALUE. Repeat it."),
]
SideBySideOption = Annotated[
    bool, typer.Option(help="Keep all servers up, so that turns are one request long.")
]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": False}
"""Server flags come behind ``--``."""
PAPERS_PATTERNS, PAPERS_CONTEXTS = ("full", "1/2", "1/4"), ("10K", "60K", "120K", "200K")

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
    rounds: RoundsOption = 3,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each request generates.")] = 64,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Only prefill, decode or full. Repeat it; left out: all three."),
    ] = None,
    full_concurrency: Annotated[
        int, typer.Option(help="Requests a rank for the full KV cache; 0 takes as many as fit.")
    ] = 0,
    seed: SeedOption = 0,
    clock: Annotated[
        str,
        typer.Option(
            help="What seconds are: wall time, or processor, the scheduler's processor time, for a "
            "CPU that others use, with one thread a rank (--env OMP_NUM_THREADS=1)."
        ),
    ] = "wall",
    note: NoteOption = "",
    env: EnvOption = None,
    side_by_side: SideBySideOption = False,
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
        seed=seed,
        clock=clock,  # type: ignore[arg-type]  # likewise
    )
    settings.check()
    check_installed()
    flags, variables = passed_on.args, dict(name_and_value(text, "--env") for text in env or [])
    clients = connect(url, api_key, admin_api_key, TIMEOUT)
    with open_servers(
        model, served, clients, flags, output / "logs", variables, side_by_side=side_by_side
    ) as servers:
        result = latency.run(target, servers, served, settings, arguments=flags, report=_say)
    written = latency.write_latency(result, output)
    grids = (tables.latency_grid(result), tables.amdahl_grid(result))
    _show([grid.to_terminal() for grid in grids if grid is not None], written)


@app.command("replay", context_settings=PASS_ON)
def replay_command(
    passed_on: typer.Context,
    model: ModelOption,
    output: OutputOption,
    context: Annotated[
        str,
        typer.Option(
            help=f"Length of the longest session, which is the 90th percentile: {CONTEXTS}."
        ),
    ],
    pattern: PatternsOption = None,
    url: UrlsOption = None,
    api_key: ApiKeyOption = None,
    admin_api_key: AdminApiKeyOption = None,
    rounds: RoundsOption = 2,
    sessions: Annotated[int, typer.Option(help="How many conversations there are.")] = 32,
    turns: Annotated[float, typer.Option(help="Mean number of turns of a conversation.")] = 3.0,
    system: Annotated[int, typer.Option(help="Tokens of the system prompt that all share.")] = 1024,
    answer: Annotated[int, typer.Option(help="Tokens that each turn generates.")] = 64,
    concurrency: Annotated[int, typer.Option(help="How many conversations run at once.")] = 4,
    seed: SeedOption = 0,
    note: NoteOption = "",
    env: EnvOption = None,
    side_by_side: SideBySideOption = False,
) -> None:
    """Agent-like traffic with prefix-cache hits: TTFT and TPOT percentiles.

    Flags of the servers come behind --. Needs the model's tokenizer with a chat template.
    """
    from sglang_indexcache.bench import latency, replay
    from sglang_indexcache.bench.results import configurations
    from sglang_indexcache.bench.servers import TIMEOUT, open_servers
    from sglang_indexcache.bench.traffic import Mix
    from sglang_indexcache.study.plots import check_installed
    from sglang_indexcache.support.lengths import parse_length

    target = latency.read_target(model, note)
    served = configurations(pattern or PAPERS_PATTERNS, target.checkpoint)
    mix = Mix(
        sessions=sessions,
        turns=turns,
        limit=parse_length(context),
        system=system,
        answer=answer,
        concurrency=concurrency,
        seed=seed,
    )
    mix.check()
    check_installed()
    logs, flags = output / "logs", passed_on.args
    variables = dict(name_and_value(text, "--env") for text in env or [])
    clients = connect(url, api_key, admin_api_key, TIMEOUT)
    with open_servers(
        model, served, clients, flags, logs, variables, side_by_side=side_by_side
    ) as servers:
        result = replay.run(
            target, model, servers, served, mix, logs, rounds=rounds, arguments=flags, report=_say
        )
    _show([replay.replay_grid(result).to_terminal()], replay.write_replay(result, output))


def _say(text: str) -> None:
    out.print(text, highlight=False)


def _show(grids: list[Table], written: list[Path]) -> None:
    for grid in grids:
        out.print(grid)
    out.print(f"wrote {', '.join(str(path) for path in written)}", soft_wrap=True)


@app.command("plan")
def plan_command(
    model: Annotated[
        str, typer.Option(help="The checkpoint's folder, or 30b, glm-5 or deepseek-v3.2.")
    ],
    pattern: PatternsOption = None,
    context: ContextsOption = None,
    gpu: Annotated[str, typer.Option(help="GPU of the roofline: h100, h200 or b200.")] = "h100",
    rates: Annotated[
        Path | None,
        typer.Option(help="Take measured rates instead, from the latency.json of bench latency."),
    ] = None,
    kv: Annotated[str, typer.Option(help="Layout of the latent KV cache: fp8 or bf16.")] = "fp8",
    cache_tokens: Annotated[
        str,
        typer.Option(help=f"What the KV cache of one GPU holds: {CONTEXTS}."),
    ] = "800K",
    tp: Annotated[int, typer.Option(help="How many ranks share heads and experts.")] = 1,
) -> None:
    """Predict prefill and decode speed-up and memory of a pattern before serving it."""
    from sglang_indexcache.bench import plan
    from sglang_indexcache.bench.results import configurations
    from sglang_indexcache.bench.roofline import find_gpu
    from sglang_indexcache.bench.shapes import checkpoint_of, shape_of
    from sglang_indexcache.support.lengths import parse_length

    shape = shape_of(model)
    found: plan.Rates = (
        plan.read_rates(rates, shape) if rates else plan.RooflineRates(shape, find_gpu(gpu), kv, tp)
    )
    served = configurations(pattern or ("uniform:1/2", "uniform:1/4"), checkpoint_of(shape))
    named = [(configuration.name, configuration.parsed) for configuration in served]
    lengths = [parse_length(text) for text in context or PAPERS_CONTEXTS]
    grid = plan.plan_grid(shape, found, named, lengths, parse_length(cache_tokens))
    out.print(grid.to_terminal())
    _say(found.note)
    out.print(plan.memory_grid(shape, named, kv).to_terminal())
