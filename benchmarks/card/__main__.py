"""Eleven checks of everything that only a card can prove, into one JSON, with a verdict.

    benchmarks/device_check.sh [--only 3,5] [--seconds 570] [--out FILE]      on a GPU
    benchmarks/device_check.sh --dry [--with-servers]                         its logic, on a CPU

Every check is a process of its own with a time limit; the JSON is written after each. A second call
with the same ``--out`` adds the checks that are missing. A dry run proves nothing about a card.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.card.checks import CHECKS, Check
from benchmarks.card.pack import MANIFEST
from benchmarks.children import ROOT, Clock, Finished, module, run
from benchmarks.kernels.device_check import facts, options_of
from sglang_indexcache.support.files import write_json

RESULT = ROOT / "benchmarks" / "results" / "card" / "card.json"


def perform(check: Check, seconds: float, flags: list[str]) -> dict[str, Any]:
    """Run one check to its end or its limit."""
    command = module("benchmarks.card.checks", str(check.number), "--seconds", f"{seconds:.0f}")
    return entry(check, run([*command, *flags], seconds + 5, group=True))


def entry(check: Check, done: Finished) -> dict[str, Any]:
    """What the report keeps of a check: every claim of the table has an outcome."""
    decided = {line["claim"]: line for line in done.lines if "claim" in line}
    begun = {line["begin"] for line in done.lines if "begin" in line}
    late = bool(done.problem and done.problem.startswith("stopped after"))
    claims = {}
    for name in check.claims:
        found = decided.get(name)
        if found is None:
            crashed = name in begun and done.problem and not late
            found = {
                "outcome": "refuted" if crashed else "not reached",
                "why": f"{done.problem or 'it ended before that'}: {done.output[-600:].strip()}",
                "evidence": {},
            }
        claims[name] = {key: found[key] for key in ("outcome", "why", "evidence")}
    return {"claims": claims, "late": late, "problem": done.problem}


def skipped(check: Check, why: str) -> dict[str, Any]:
    """The entry of a check that was not begun."""
    claims = {n: {"outcome": "not reached", "why": why, "evidence": {}} for n in check.claims}
    return {"claims": claims, "late": True, "problem": why}


def todo(report: dict[str, Any], only: list[int]) -> Iterator[Check]:
    """The checks to run: those named, else those that no call has finished."""
    for check in CHECKS:
        known = report["checks"].get(str(check.number))
        if check.number in only if only else known is None or known["late"]:
            yield check


def verdict(report: dict[str, Any]) -> list[tuple[str, int, str, str]]:
    """Outcome, check, claim and reason of everything that the eleven checks can decide."""
    rows = []
    for check in CHECKS:
        found = report["checks"].get(str(check.number)) or skipped(check, "not asked for yet")
        for name, claim in found["claims"].items():
            rows.append((claim["outcome"], check.number, name, claim["why"]))
    return rows


def text(report: dict[str, Any]) -> str:
    """The verdict for a person."""
    machine = report["machine"]
    lines = [f"{machine['name']}, torch {machine['torch']}, commit {machine['commit']}"]
    if report["dry"]:
        lines.append("DRY RUN on a CPU: it shows that the checks work and proves nothing else.")
    for outcome, number, name, why in verdict(report):
        reason = f": {' '.join(why.split())[:300]}" if why else ""
        lines.append(f"{outcome:>12}  {number:2}  {name}{reason}")
    return "\n".join(lines)


def archive() -> dict[str, Any] | None:
    """The manifest of the unpacked archive, if one is on the path."""
    places = (Path(place) / MANIFEST for place in sys.path)
    found = next((place for place in places if place.exists()), None)
    return json.loads(found.read_text()) if found else None


def opened(out: Path, dry: bool) -> dict[str, Any]:
    """The report to add to.

    Raises:
        SystemExit: the file is another run's.
    """
    report = {"dry": dry, "machine": facts(), "archive": archive(), "checks": {}}
    if not out.exists():
        return report
    earlier: dict[str, Any] = json.loads(out.read_text())
    for what in ("dry", "commit", "name"):
        then, now = (
            one["dry"] if what == "dry" else one["machine"][what] for one in (earlier, report)
        )
        if then != now:
            raise SystemExit(
                f"error: {out} is of another run ({what} {then}, now {now}). Remove it, or name "
                "another file with --out."
            )
    return earlier


def main() -> int:
    """Run what is asked for; 0 if nothing is refuted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="numbers of checks, as 3,5; runs them again")
    parser.add_argument("--with-servers", action="store_true", help="a dry run starts real servers")
    options = options_of(parser, RESULT, seconds=570.0)
    if options is None:
        return 2
    only = [int(number) for number in options.only.split(",") if number]
    if unknown := set(only) - {check.number for check in CHECKS}:
        parser.error(f"there is no check {', '.join(map(str, sorted(unknown)))}")
    flags = ["--dry"] * options.dry + ["--with-servers"] * options.with_servers
    clock = Clock(options.seconds)
    report = opened(options.out, options.dry)
    for check in todo(report, only):
        left = clock.left(check.seconds)
        print(f"{check.number:2}  {check.name}: at most {left:.0f} s", flush=True)
        enough = left >= check.least or options.dry
        found = perform(check, left, flags) if enough else skipped(check, "no time was left")
        report["checks"][str(check.number)] = found
        report["verdict"] = [list(row) for row in verdict(report)]
        write_json(options.out, report)
    print(text(report))
    print(f"wrote {options.out}")
    return int(any(row[0] == "refuted" for row in verdict(report)))


if __name__ == "__main__":
    sys.exit(main())
