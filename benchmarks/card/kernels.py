"""Check 2: our kernels compile and pass the conformance grid (``benchmarks.kernels``)."""

from benchmarks.card.claims import Missing, Report, expect
from benchmarks.children import Clock
from benchmarks.kernels.device_check import build, check, verdicts


def run(report: Report) -> None:
    """Compile, then every group of the grid on every implementation."""
    clock = Clock(report.left())
    with report.claim(report.claims[0]) as evidence:
        if report.dry:
            raise Missing("it needs nvcc and a GPU")
        evidence |= build(clock)
        problems = {name: one["problem"] for name, one in evidence.items() if one["problem"]}
        expect(not problems, "; ".join(f"{name}: {why[-300:]}" for name, why in problems.items()))
    for claim, name in zip(report.claims[1:], ("cuda", "triton"), strict=True):
        with report.claim(claim) as evidence:
            # The reference stands for each of them on a CPU.
            implementation = "reference" if report.dry else name
            evidence |= check(clock, [implementation], large=not report.dry)
            right = verdicts(evidence)[implementation]
            wrong = [op for op, holds in right.items() if not holds]
            expect(not wrong, f"{', '.join(wrong)} failed; the evidence has the cases")
