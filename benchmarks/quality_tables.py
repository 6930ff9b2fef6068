"""The tables of benchmarks/results/quality/README.md that simulations make again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.records import markdown


def errors(record: Mapping[str, Any]) -> str:
    """Write how often simulated evaluations said what is not so, and what is."""
    rows = []
    for row in record["rows"]:
        world, loses = row["world"], row["world"]["loss"] > 0
        wrong, right = ("no_loss", "loss") if loses else ("any_loss", "no_loss")
        times = round(world["loss"] * (1 - 2 * world["noise"]) / world["margin"])
        beside = f"; {world['rows']} rows beside 5 x {world['made']}" if world["rows"] else ""
        tied = f"{100 * world['discordance']:g} % differ, tied by {world['correlation']:g}{beside}"
        truth = f"loses {times} x the margin" if loses else "loses nothing"
        mistake = "" if row["pairing"] == "by context" else row["pairing"]
        rows.append(
            (tied, truth, mistake, f"{100 * row[wrong]:.1f} %", f"{100 * row[right]:.1f} %")
        )
    header = ("questions", "the pattern", "mistake", "wrong", "right")
    return markdown(header, rows, f"{record['evaluations']:,} simulated evaluations a row")


def signs(record: Mapping[str, Any]) -> str:
    """Write how often a pattern that loses nothing was said to lose."""
    rows = []
    for row in record["rows"]:
        world = row["world"]
        if not isinstance(world, str):
            differ, tied = 100 * world["discordance"], world["correlation"]
            beside = f"; {world['rows']} rows beside 5 x {world['made']}" if world["rows"] else ""
            world = f"{differ:g} % of questions differ, tied by {tied:g}{beside}"
        rows.append((world, f"{100 * row['said_to_lose']:.1f} %"))
    title = f"{record['evaluations']:,} simulated evaluations a row"
    return markdown(("world", "said to lose"), rows, title)


def worlds(record: Mapping[str, Any]) -> str:
    """Write how often rare, whole losses were called none."""
    header = (
        *("what is lost", "contexts", "loses the margin: no loss (wrong)", "a loss"),
        *("loses nothing: no loss", "a loss (wrong)"),
    )
    rates = [(truth, claim) for truth in ("at_margin", "at_none") for claim in ("no_loss", "loss")]
    rows = [
        (row["world"], row["contexts"], *(f"{100 * row[a][b]:.1f} %" for a, b in rates))
        for row in record["held_back"]
    ]
    return markdown(header, rows, f"{record['evaluations']:,} simulated evaluations a row")
