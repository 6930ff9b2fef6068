"""The table of a traffic replay, and what was sent under which conditions."""

from __future__ import annotations

from statistics import median

from sglang_indexcache.bench.replay import QUANTITIES, Quantity, ReplayResult, nearest_rank
from sglang_indexcache.bench.results import Configuration
from sglang_indexcache.bench.tables import Grid, foreign_work, what_was_served, where_and_when
from sglang_indexcache.support.lengths import format_length


def replay_grid(result: ReplayResult) -> Grid:
    """Percentiles: absolute on a GPU, speed-ups over the baseline on a CPU.

    A speed-up is the median over the rounds, the lowest and the highest of them behind it.
    """
    percentiles = [(quantity, p) for quantity in QUANTITIES for p in result.percentiles]
    header = ("", *(f"{q.upper()} P{p}" for q, p in percentiles), "prompt tokens cached")
    rows = []
    for configuration in result.configurations:
        cells = [_cell(result, configuration, quantity, p) for quantity, p in percentiles]
        hits = median(replay.hit_rate for replay in result.of(configuration.name))
        rows.append((configuration.name, *cells, f"{hits:.0%}"))
    where = "GPU" if result.on_gpu else "CPU"
    title = f"{result.model.name}, traffic, {where}, median of {_rounds(result)} rounds"
    return Grid(f"{title} (lowest to highest)", header, tuple(rows))


def _rounds(result: ReplayResult) -> int:
    return len(result.of(result.configurations[0].name))


def _cell(
    result: ReplayResult, configuration: Configuration, quantity: Quantity, percent: int
) -> str:
    is_baseline = configuration == result.configurations[0]
    speeds = result.speedups(configuration.name, quantity, percent)
    speed = f"{median(speeds):.2f}x ({min(speeds):.2f}-{max(speeds):.2f})"
    if not result.on_gpu:
        return "1" if is_baseline else speed
    replays = result.of(configuration.name)
    middle = 1e3 * median(replay.percentile(quantity, percent) for replay in replays)
    shown = f"{middle:.0f} ms" if middle >= 100 else f"{middle:.3g} ms"
    return shown if is_baseline else f"{shown}, {speed}"


def conditions(result: ReplayResult) -> str:
    """What was sent, and how it was measured, in a few sentences."""
    mix = result.mix
    first = result.replays[0].turns
    prompts = [turn.prompt for turn in first]
    last = {turn.session: turn.prompt for turn in first}
    order = " ".join(configuration.name for configuration in result.configurations)
    lines = [
        *where_and_when(result.environment, result.started_here),
        f"{_rounds(result)} rounds of [{order}]; a round sends {mix.sessions} sessions of "
        f"{len(first)} turns in all, {mix.concurrency} sessions at once, {mix.answer} tokens an "
        f"answer, {mix.system} tokens of system prompt that all share.",
        f"Prompt tokens of a turn: P50 {nearest_rank(prompts, 50):.0f}, P90 "
        f"{nearest_rank(prompts, 90):.0f}, most {max(prompts)}; of a session's last turn: P50 "
        f"{nearest_rank(list(last.values()), 50):.0f}, P90 "
        f"{nearest_rank(list(last.values()), 90):.0f} (sessions are cut at "
        f"{format_length(mix.limit)}).",
        "Seconds are the client's wall clock and include waiting for other sessions.",
    ]
    lines += foreign_work(result.environment, [replay.busy_cores for replay in result.replays])
    modes = {replay.facts.mode for replay in result.replays}
    lines += what_was_served(result.model, result.arguments, modes)
    return "\n".join(lines) + "\n"


def report(result: ReplayResult) -> str:
    """Everything about a replay in Markdown."""
    return replay_grid(result).to_markdown() + "\n" + conditions(result)
