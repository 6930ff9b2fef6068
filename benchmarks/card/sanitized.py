"""Check 9: compute-sanitizer on the grid's small and wide cases (``benchmarks.kernels``)."""

from benchmarks.card.claims import MissingError, Report, expect
from benchmarks.children import Clock
from benchmarks.kernels.device_check import sanitize


def run(report: Report) -> None:
    """Memory, races and barriers; none of it without a GPU."""
    with report.claim(report.claims[0]) as evidence:
        if report.dry:
            raise MissingError("it needs a GPU")
        evidence |= sanitize(Clock(report.left()))
        if "problem" in evidence:
            raise MissingError(str(evidence["problem"]))
        late = [name for name, one in evidence.items() if "stopped after" in (one["problem"] or "")]
        found = [name for name, one in evidence.items() if one["problem"] and name not in late]
        expect(not found, f"{', '.join(found)}: see the evidence")
        if late:
            raise MissingError(f"no time was left for {', '.join(late)}")
