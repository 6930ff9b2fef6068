"""The tables of benchmarks/results/quality/README.md, each made from the record beside it.

``measures.json`` was written by ``benchmarks/quality_measures.py`` of commit deaf833.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.records import markdown

MEASURES = {"right": "right answers", "answers": "answer NLL", "tokens": "loss of all tokens"}
"""Each a mean over a document."""


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


def control(record: Mapping[str, Any]) -> str:
    """Tabulate how often the control below index_topk refuses sound runs and differing arms."""
    rows = []
    for row in record["control"]:
        arm = f"changes {100 * row['fault']:g} % of answers" if row["fault"] else "sound"
        shares = (row["refused_by_one_difference"], row["refused"])
        rows.append(
            (f"{100 * row['flips']:g} %", arm, *(f"{100 * share:.1f} %" for share in shares))
        )
    header = ("the engine flips", "the arm", "refused before: one difference", "refused now")
    title = f"{record['evaluations']:,} simulated controls of {record['control'][0]['pairs']} pairs"
    return markdown(header, rows, title)


def bad_pattern(record: Mapping[str, Any]) -> str:
    """Tabulate how many cells see the bad pattern lose, and how often a harmless one is shown."""
    rows = [
        (
            row["endpoint"],
            f"{row['planned']} a cell",
            "probabilities, too" if row["sure"] else "right answers",
            f"{row['cells']:.1f} of {row['of_cells']}",
            f"{row['contexts']:.0f} of {row['of_contexts']}",
            f"{100 * row['no_loss']:.0f} %",
        )
        for row in record["bad_pattern"]
    ]
    header = (
        *("compared", "plan", "bad pattern seen by", "cells in the claim", "contexts"),
        "harmless: no loss",
    )
    return markdown(header, rows, f"{record['evaluations'] // 10:,} simulated evaluations")


def missing(record: Mapping[str, Any]) -> str:
    """Tabulate how often a loss is called none where what is lost fails and is missing."""
    rows = [
        (
            f"{row['loss_in_margins']:g} points",
            *(f"{100 * row['no_loss'][rule]:.1f} %" for rule in ("left_out", "counted_as_lost")),
        )
        for row in record["missing"]
    ]
    first = record["missing"][0]
    title = (
        f"{record['evaluations'] // 5:,} simulated evaluations of {first['contexts']} contexts, of "
        f"which at most {first['most_missing']} fail"
    )
    header = ("the pattern loses", "no loss, before: left out", "no loss, now: counted as lost")
    return markdown(header, rows, title)


def endpoints(record: Mapping[str, Any]) -> str:
    """Tabulate how often each endpoint is right and wrong, and with how many contexts."""
    kinds = ("whole contexts", "half contexts", "a little everywhere")
    rows = []
    for row in record["rows"]:
        first = row[kinds[0]]
        wrong = max(row[kind]["loss"] for kind in kinds)
        shares = (first["no_loss"], wrong, *(row[kind]["wrong"] for kind in kinds))
        rows.append(
            (
                f"{row['pattern']}, the engine flips {100 * row['flips']:g} %",
                *(row["endpoint"], f"{first['used']:.0f} of {first['contexts']}"),
                *(f"{100 * share:.1f} %" for share in shares),
            )
        )
    header = (
        *("what differs", "compared", "contexts"),
        *("harmless: no loss", "harmless: a loss (wrong, the worst)"),
        *(f"1 point lost, {kind}: no loss (wrong)" for kind in kinds),
    )
    return markdown(header, rows, f"{record['evaluations']:,} simulated evaluations a row and kind")


def documents(record: Mapping[str, Any]) -> str:
    """Tabulate wrong claims where contexts share documents, each counted alone and recognised."""
    rows = []
    for row in record["rows"]:
        before, now = row["before"], row["now"]
        at_margin, at_none = "no_loss_at_margin", "no_loss_at_none"
        claims = (before[at_margin], now[at_margin], before[at_none], now[at_none])
        kind = row["kind"] if row["shared_by"] > 1 else "nothing"
        rows.append(
            (
                *(kind, row["shared_by"], row["documents"], f"{row['texts_recognised']:,}"),
                *(f"{100 * claim:.1f} %" for claim in claims),
            )
        )
    header = (
        *("what is shared", "contexts a document", "documents", "texts recognised"),
        *("loses the margin: no loss (wrong), before", "now"),
        *("loses nothing: no loss, before", "now"),
    )
    count = record["rows"][0]["contexts"]
    title = f"{record['evaluations']:,} simulated evaluations a row, of {count} contexts"
    return markdown(header, rows, title)


def measures(record: Mapping[str, Any]) -> str:
    """Write what three measures say of each pattern, and how far they agree on the order."""
    rows = [
        (f"{row['name']} `{row['pattern']}`", *(_measured(row, measure) for measure in MEASURES))
        for row in sorted(record["patterns"], key=lambda row: row["answers"]["difference"])
    ]
    title = (
        f"{record['documents']} documents with {record['answers']:,} answers; in brackets the "
        "documents needed to see the loss"
    )
    header = ("pattern", "points lost", "nats an answer", "nats a token")
    return markdown(header, rows, title) + "\n" + _orders(record)


def _measured(row: Mapping[str, Any], measure: str) -> str:
    loss = row[measure]
    scale, digits = (100, 1) if measure == "right" else (1, 3)
    mean, half = scale * loss["difference"], 1.96 * scale * loss["error"]
    documents = "not seen" if loss["needed"] is None else f"{loss['needed']:,}"
    return f"{mean:+.{digits}f} ± {half:.{digits}f} ({documents})"


def _orders(record: Mapping[str, Any]) -> str:
    def interval(estimate: Mapping[str, float]) -> str:
        return f"{estimate['rho']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"

    rows = [
        (
            " and ".join(MEASURES[name] for name in pair.split("-")),
            "all, the same",
            interval(estimate),
        )
        for pair, estimate in record["agreement"].items()
    ]
    fewest, *_, most = record["foretold"]
    rows += [
        (
            f"{MEASURES[name]} and {MEASURES['right']}",
            f"{count}, and all others",
            interval(estimate),
        )
        for count in (fewest, most)
        for name, estimate in record["foretold"][count].items()
    ]
    title = (
        "In brackets a 95 % interval over documents where they are the same, and what 90 % of "
        "random choices lie between where they are others"
    )
    return markdown(("order by", "documents", "Spearman's rho"), rows, title)
