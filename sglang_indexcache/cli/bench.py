"""``indexcache bench``: measure what sharing gains on your node, or predict it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_indexcache.cli.common import group, name_and_value, out
from sglang_indexcache.errors import BenchError

if TYPE_CHECKING:
    from sglang_indexcache.bench.replay import ReplayResult
    from sglang_indexcache.bench.results import Configuration, LatencyResult
    from sglang_indexcache.bench.servers import Servers

ModelOption = Annotated[
    Path, typer.Option(help="Checkpoint folder (config.json at least), also with --url.")
]
PatternOption = Annotated[
    list[str] | None,
    typer.Option(
        help="As for --indexcache-pattern, or NAME=VALUE; the first is the baseline. Repeat it."
    ),
]
UrlOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A running server for each pattern, in the same order; one server in live mode may "
        "stand for all. Without it, servers are started one at a time."
    ),
]
LengthOption = Annotated[
    list[str] | None, typer.Option(help="Prompt tokens: 4096, 200K or 16Ki. Repeat it.")
]
RoundsOption = Annotated[int, typer.Option(help="Turns of every pattern: A B A B.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Folder for the results.")]
NoteOption = Annotated[str, typer.Option(help="Kept with the result, e.g. about the weights.")]
EnvOption = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE for the servers that are started. Repeat it.")
]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": False}
"""Server flags come behind ``--``."""


app = group("Measure what sharing gains, or predict it.")


@app.command("latency", context_settings=PASS_ON)
def latency_command(
    context: typer.Context,
    model: ModelOption,
    output: OutputOption,
    pattern: PatternOption = None,
    length: LengthOption = None,
    url: UrlOption = None,
    rounds: RoundsOption = 3,
    new_tokens: Annotated[int, typer.Option(help="Generated per request.")] = 64,
    repeats: Annotated[int, typer.Option(help="Measurements of a length within a turn.")] = 1,
    metric: Annotated[
        list[str] | None, typer.Option(help="prefill, decode or full; all three if left out.")
    ] = None,
    full_concurrency: Annotated[
        int, typer.Option(help="Requests a rank for the full KV cache; 0: as many as fit.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    clock: Annotated[
        str,
        typer.Option(
            help="wall, or processor: the scheduler's processor time, for a CPU that others use, "
            "with one thread a rank (--env OMP_NUM_THREADS=1)."
        ),
    ] = "wall",
    name: Annotated[str, typer.Option(help="Of the files written.")] = "latency",
    note: NoteOption = "",
    env: EnvOption = None,
    side_by_side: Annotated[
        bool, typer.Option(help="Keep all servers up and take turns at every length.")
    ] = False,
) -> None:
    """The paper's Table 1 and its bar figure, on your servers.

    Flags of the servers come behind --, for example:
    indexcache bench latency --model MODEL -o out -- --tp 8 --dp 8 --enable-dp-attention
    """
    from sglang_indexcache.bench import latency, tables
    from sglang_indexcache.bench.results import METRICS
    from sglang_indexcache.support.lengths import parse_length

    target = latency.read_target(model, note)
    served = latency.configurations(pattern or ["full", "1/2", "1/4"], target.checkpoint)
    settings = latency.Settings(
        lengths=tuple(parse_length(text) for text in length or ["10K", "60K", "120K", "200K"]),
        rounds=rounds,
        new_tokens=new_tokens,
        repeats=repeats,
        metrics=tuple(metric or METRICS),  # type: ignore[arg-type]  # checked by Settings.check
        full_concurrency=full_concurrency,
        seed=seed,
        clock=clock,  # type: ignore[arg-type]  # likewise
    )
    settings.check()
    with _servers(model, served, url, context.args, output, env, side_by_side) as servers:
        result = latency.run(
            target,
            servers,
            served,
            settings,
            arguments=context.args,
            report=lambda text: out.print(text, highlight=False),
        )
    written = write_latency(result, output, name)
    for grid in (tables.latency_grid(result), tables.amdahl_grid(result)):
        if grid is not None:
            out.print(grid.to_terminal())
    out.print(f"wrote {', '.join(str(path) for path in written)}", soft_wrap=True)


def _servers(
    model: Path,
    served: Sequence[Configuration],
    urls: list[str] | None,
    flags: list[str],
    output: Path,
    env: list[str] | None,
    side_by_side: bool = False,
) -> AbstractContextManager[Servers]:
    from sglang_indexcache.bench.servers import RunningServers, StartedServers

    if not urls:
        variables = dict(name_and_value(text, "--env") for text in env or [])
        logs = output / "logs"
        return StartedServers(str(model), flags, logs, variables, side_by_side=side_by_side)
    names = [configuration.name for configuration in served]
    every = urls * len(names) if len(urls) == 1 else urls
    if len(every) != len(names) or flags or env:
        raise BenchError(
            f"give one --url, or one for each of {', '.join(names)}, and no server flags or --env: "
            "those servers run already"
        )
    return nullcontext(RunningServers(dict(zip(names, every, strict=True))))


@app.command("replay", context_settings=PASS_ON)
def replay_command(
    context: typer.Context,
    model: ModelOption,
    output: OutputOption,
    limit: Annotated[str, typer.Option(help="Tokens of the longest session: the 90th percentile.")],
    pattern: PatternOption = None,
    url: UrlOption = None,
    rounds: RoundsOption = 2,
    sessions: Annotated[int, typer.Option(help="Conversations.")] = 32,
    turns: Annotated[float, typer.Option(help="Of a conversation, on average.")] = 3.0,
    system: Annotated[int, typer.Option(help="Tokens of the shared system prompt.")] = 1024,
    answer: Annotated[int, typer.Option(help="Tokens generated in a turn.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Conversations at once.")] = 4,
    seed: Annotated[int, typer.Option(help="Of lengths and texts.")] = 0,
    name: Annotated[str, typer.Option(help="Of the files written.")] = "replay",
    note: NoteOption = "",
    env: EnvOption = None,
    side_by_side: Annotated[bool, typer.Option(help="Keep all servers up.")] = False,
) -> None:
    """Agent-like traffic with prefix-cache hits: TTFT and TPOT percentiles.

    Flags of the servers come behind --. Needs the model's tokenizer with a chat template.
    """
    from sglang_indexcache.bench import latency, replay, replay_tables
    from sglang_indexcache.bench.traffic import Mix
    from sglang_indexcache.support.lengths import parse_length

    target = latency.read_target(model, note)
    served = latency.configurations(pattern or ["full", "1/2", "1/4"], target.checkpoint)
    mix = Mix(
        sessions=sessions,
        turns=turns,
        limit=parse_length(limit),
        system=system,
        answer=answer,
        concurrency=concurrency,
        seed=seed,
    )
    mix.check()
    with _servers(model, served, url, context.args, output, env, side_by_side) as servers:
        result = replay.run(
            target,
            model,
            servers,
            served,
            mix,
            output / "logs",
            rounds=rounds,
            arguments=context.args,
            report=lambda text: out.print(text, highlight=False),
        )
    written = write_replay(result, output, name)
    out.print(replay_tables.replay_grid(result).to_terminal())
    out.print(f"wrote {', '.join(str(path) for path in written)}", soft_wrap=True)


def write_replay(result: ReplayResult, folder: Path, name: str) -> list[Path]:
    """Write the result as JSON, Markdown and figures; returns the files."""
    from sglang_indexcache.bench import figures, replay_tables
    from sglang_indexcache.bench.results import save
    from sglang_indexcache.support.files import write_whole

    written = [folder / f"{name}{suffix}" for suffix in (".json", ".md", ".png", ".svg")]
    save(result, written[0])
    write_whole(written[1], replay_tables.report(result))
    for path in written[2:]:
        figures.draw_replay(result, path)
    return written


def write_latency(result: LatencyResult, folder: Path, name: str) -> list[Path]:
    """Write the result as JSON, Markdown and figures; returns the files."""
    from sglang_indexcache.bench import figures, tables
    from sglang_indexcache.bench.results import save
    from sglang_indexcache.support.files import write_whole

    base = folder / name
    written = [base.with_suffix(suffix) for suffix in (".json", ".md")]
    save(result, written[0])
    write_whole(written[1], tables.report(result))
    shares = figures.share_curves(result)
    for suffix in (".png", ".svg"):
        drawn = [folder / f"{name}-speedup{suffix}"]
        figures.draw_speedups(result, drawn[0])
        if "prefill" in result.metrics:
            drawn.append(folder / f"{name}-scaling{suffix}")
            unit = "prefill time, relative to DSA at the shortest"
            figures.draw_scaling(figures.prefill_curves(result), drawn[-1], unit)
        if shares:
            drawn.append(folder / f"{name}-share{suffix}")
            figures.draw_shares(shares, drawn[-1])
        written += drawn
    return written


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Option(help="30b, glm-5, deepseek-v3.2 or a folder.")],
    pattern: Annotated[
        list[str] | None, typer.Option(help="As for --indexcache-pattern. Repeat it.")
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(help="Tokens: 4096, 200K or 16Ki. Repeat it.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="For a roofline: h100, h200 or b200.")] = "h100",
    rates: Annotated[
        Path | None,
        typer.Option(help="Measured rates instead: a result of bench latency or layer-stack."),
    ] = None,
    kv: Annotated[str, typer.Option(help="fp8 or bf16.")] = "fp8",
    cache_tokens: Annotated[
        str, typer.Option(help="KV tokens of a GPU, for the full-cache figure.")
    ] = "800K",
    tp: Annotated[int, typer.Option(help="Ranks that share heads and experts.")] = 1,
) -> None:
    """Predict prefill and decode speed-up and memory of a pattern before serving it."""
    from sglang_indexcache.bench import plan
    from sglang_indexcache.bench.gpus import find_gpu
    from sglang_indexcache.bench.shapes import checkpoint_of, shape_of
    from sglang_indexcache.library import Library
    from sglang_indexcache.support.lengths import parse_length

    shape = shape_of(model)
    found: plan.Rates = (
        plan.read_rates(rates, shape) if rates else plan.RooflineRates(shape, find_gpu(gpu), kv, tp)
    )
    checkpoint = checkpoint_of(shape)
    named = [
        (value, Library.default().resolve(value, checkpoint).pattern)
        for value in pattern or ["uniform:1/2", "uniform:1/4"]
    ]
    lengths = [parse_length(text) for text in context or ["10K", "60K", "120K", "200K"]]
    grid = plan.plan_grid(shape, found, named, lengths, parse_length(cache_tokens))
    out.print(grid.to_terminal())
    out.print(found.note, highlight=False)
    out.print(plan.memory_grid(shape, named, kv).to_terminal())
