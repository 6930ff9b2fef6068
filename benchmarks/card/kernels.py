"""Check 2: our kernels compile and pass the conformance grid (``benchmarks.kernels``)."""

from benchmarks.card.claims import MissingError, Report, expect
from benchmarks.children import Clock
from benchmarks.kernels.device_check import build, check, verdicts


def run(report: Report) -> None:
    """Compile, then every group of the grid on every implementation."""
    clock = Clock(report.left())
    with report.claim(report.claims[0]) as evidence:
        if report.dry:
            raise MissingError("it needs nvcc and a GPU")
        evidence |= build(clock)
        problems = {name: one["problem"] for name, one in evidence.items() if one["problem"]}
        expect(not problems, "; ".join(f"{name}: {why[-300:]}" for name, why in problems.items()))
    # The reference stands for both on a CPU.
    implementations = ["reference"] if report.dry else ["cuda", "triton"]
    checked = check(clock, implementations, large=not report.dry)
    right = verdicts(checked)
    for number, claim in enumerate(report.claims[1:]):
        name = implementations[number % len(implementations)]
        with report.claim(claim) as evidence:
            evidence |= checked[name]
            wrong = [op for op, holds in right[name].items() if not holds]
            expect(not wrong, f"{', '.join(wrong)} failed; the evidence has the cases")
