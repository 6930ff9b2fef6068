"""Latency results in the paper's layout: Table 1 and its bar figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.box import SIMPLE
from rich.table import Table

from sglang_indexcache.lab.latency.results import METRICS, Configuration, LatencyResult, Metric
from sglang_indexcache.lab.runs.plots import make_figure, pattern_color, save_figure
from sglang_indexcache.library.lengths import format_length

NAMES = {metric: text.rpartition(" (")[0] for metric, text in METRICS.items()}
"""Names of the metrics without their units."""


@dataclass(frozen=True)
class Grid:
    """A table independent of its format; a row with one cell is a heading."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """Return the table in GitHub's syntax; a title becomes a bold line above it."""
        lines = [f"**{self.title}**", ""] if self.title else []
        lines += [_line(self.header), _line(["---"] * len(self.header))]
        blank = [""] * (len(self.header) - 1)
        lines += [_line([f"*{row[0]}*", *blank] if len(row) == 1 else row) for row in self.rows]
        return "\n".join(lines) + "\n"

    def to_terminal(self) -> Table:
        """Return the table for rich."""
        table = Table(title=self.title, box=SIMPLE, title_justify="left")
        for number, name in enumerate(self.header):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row, style="bold" if len(row) == 1 else None)
        return table


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def latency_grid(result: LatencyResult) -> Grid:
    """Make the paper's Table 1, with absolute figures (medians) on a GPU, else only speed-ups.

    A speed-up is the median over the rounds, followed by the lowest and the highest, and by its
    share of the ideal if the server reported its indexers' share.
    """
    header = ("", *(format_length(length) for length in result.lengths))
    rows: list[tuple[str, ...]] = []
    for metric in result.metrics:
        rows.append((METRICS[metric] if result.on_gpu else f"{NAMES[metric]}, speed-up",))
        rows += [_row(result, metric, configuration) for configuration in result.configurations]
    return Grid(_title(result), header, tuple(rows))


def _title(result: LatencyResult) -> str:
    facts = result.visits[0].facts
    ranks = f", dp_attention with {facts.dp} ranks" if facts.dp_attention else ""
    device = _gpus(result) if result.on_gpu else "CPU"
    medians = "" if result.on_gpu else f", median of {result.rounds} rounds (lowest to highest)"
    return f"{result.model.name}{ranks}, {device}{medians}"


def _gpus(result: LatencyResult) -> str:
    """Return the GPUs and drivers as text; they are not known for servers started elsewhere."""
    gpus = result.environment.gpus if result.started_here else ()
    return " and ".join(sorted(set(gpus))) or "GPUs that the client did not see"


def label(result: LatencyResult, configuration: Configuration) -> str:
    """Return a configuration's name as in the paper: DSA, + IndexCache (1/4)."""
    if configuration == result.baseline:
        return "DSA" if not configuration.parsed.shared_layers else configuration.name
    return f"+ IndexCache ({configuration.name})"


def _row(result: LatencyResult, metric: Metric, configuration: Configuration) -> tuple[str, ...]:
    cells = []
    for length in result.lengths:
        speed = result.speedup(configuration.name, metric, length)
        if result.on_gpu:
            middle = median(result.values(configuration.name, metric, length).values())
            cells.append(_number(middle))
            if configuration != result.baseline:
                cells[-1] += f" ({speed.median:.2f}x, {speed.low:.2f}-{speed.high:.2f})"
        elif configuration == result.baseline:
            cells.append("1")
        else:
            cells.append(f"{speed.median:.2f}x ({speed.low:.2f}-{speed.high:.2f})")
            if speed.ideal is not None:
                cells[-1] += f", {speed.median / speed.ideal:.0%} of the ideal"
    return (label(result, configuration), *cells)


def _number(value: float) -> str:
    """Format a number with three digits and without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def memory_grid(result: LatencyResult) -> Grid:
    """Tabulate index-K bytes per token and KV tokens per rank, as reported by each server."""
    rows = []
    for configuration in result.configurations:
        facts = next(v.facts for v in result.visits if v.configuration == configuration.name)
        cells = (str(facts.index_k_bytes), str(facts.capacity))
        rows.append((label(result, configuration), *cells))
    return Grid(
        "memory of one rank", ("", "index-K bytes per token", "KV tokens in the pool"), tuple(rows)
    )


def report(result: LatencyResult) -> str:
    """Write everything about a latency result in Markdown."""
    grids = (latency_grid(result), memory_grid(result))
    return "\n".join([*(grid.to_markdown() for grid in grids), conditions(result)])


def conditions(result: LatencyResult) -> str:
    """Return a few sentences on how the result was measured."""
    environment, facts = result.environment, [visit.facts for visit in result.visits]
    versions = ", ".join(f"{name} {number}" for name, number in environment.versions.items())
    lines = [f"{environment.date}, commit {environment.commit or 'unknown'}, {versions}."]
    name = ", ".join(environment.gpus) or f"{environment.cores} cores of {environment.cpu}"
    if result.started_here:
        lines.append(f"Machine: {name}.")
    else:
        lines.append(f"Client: {name}; the servers ran already, their flags are not known.")
    order = " ".join(configuration.name for configuration in result.configurations)
    lines.append(
        f"{result.rounds} rounds of [{order}], {result.new_tokens} new tokens a request, "
        f"{_turns(result)}."
    )
    if "full" in result.metrics:
        full = ", ".join(_fullness(result, length) for length in result.lengths)
        lines.append(f"Full KV cache, requests a rank and the part of the pool they fill: {full}.")
    if busy := [visit.busy_cores for visit in result.visits if visit.busy_cores is not None]:
        lines.append(
            f"Load average before: {environment.load_before:g}; foreign work before a visit: "
            f"at most {max(busy):g} of {environment.cores} cores."
        )
    if result.arguments:
        lines.append(f"Server flags: `{' '.join(result.arguments)}`.")
    if any(server.mode == "live" for server in facts):
        lines.append(
            "Servers in live mode: S layers go on writing index keys, which static mode saves too."
        )
    return "\n".join([*lines, *([result.model.note] if result.model.note else [])]) + "\n"


def _turns(result: LatencyResult) -> str:
    """Return text on which measurements alternated; in older files a visit was one length."""
    if not result.side_by_side:
        return "one server at a time, started anew for every visit"
    if len(result.visits) == result.rounds * len(result.configurations) * len(result.lengths):
        return "servers side by side, in turns at every length"
    return "in turns, request by request"


def _fullness(result: LatencyResult, length: int) -> str:
    """Return text on how full the baseline's pool was, which is the smallest pool."""
    facts = next(v.facts for v in result.visits if v.configuration == result.baseline.name)
    key = (result.baseline.name, "full", length)
    sample = next(s for s in result.samples if (s.configuration, s.metric, s.length) == key)
    a_rank = sample.requests // facts.dp
    part = a_rank * (length + result.new_tokens) / facts.capacity
    return f"{a_rank} of {format_length(length)} ({part:.0%})"


def draw_speedups(result: LatencyResult, path: Path) -> None:
    """Draw bars of relative speed-up, where every indexer is 1 (paper, figure "Relative speedup").

    The whisker spans the rounds. The short black line is the ideal by Amdahl's law from the
    indexers' measured share, which is noisy too, so a bar may pass it.
    """
    metrics = result.metrics
    width = 3.9 * len(metrics) if metrics[1:] else 5.6
    figure, axes = make_figure(width, 3.8, columns=len(metrics), sharey=True)
    width = 0.8 / len(result.configurations)
    for axis, metric in zip(axes, metrics, strict=True):
        for number, configuration in enumerate(result.configurations):
            offset = (number - (len(result.configurations) - 1) / 2) * width
            for place, length in enumerate(result.lengths):
                speed = result.speedup(configuration.name, metric, length)
                middle, x = speed.median, place + offset
                spread = [[middle - speed.low], [speed.high - middle]]
                axis.bar(
                    x,
                    middle,
                    width * 0.92,
                    color=pattern_color(configuration.parsed),
                    yerr=spread if number else None,
                    error_kw={"lw": 0.8, "capsize": 2},
                    label=label(result, configuration) if place == 0 else None,
                )
                if number and speed.ideal is not None:
                    ends = (x - width / 2, x + width / 2)
                    first = place == 0 and number == 1
                    name = "expected from the indexers' share (Amdahl)" if first else None
                    axis.plot(ends, [speed.ideal] * 2, color="black", lw=1.2, label=name)
        axis.axhline(1, color="black", lw=0.6, ls=":")
        axis.set_xticks(range(len(result.lengths)), [format_length(n) for n in result.lengths])
        axis.set_title(NAMES[metric], fontsize=10, loc="left")
        axis.set_xlabel("context, tokens")
    axes[0].set_ylabel("speed (every indexer = 1)")
    figure.suptitle(f"{describe(result)}; whiskers: lowest to highest", fontsize=9)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, frameon=False, loc="outside lower center", ncols=5)
    save_figure(figure, path)


def describe(result: LatencyResult) -> str:
    """Return a line on what was measured, and where."""
    where = result.environment.gpus[0] if result.environment.gpus else "CPU"
    return f"{result.model.name} on {where}, medians of {result.rounds} rounds"
