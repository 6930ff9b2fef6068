"""The eleven checks, the cheapest and most fundamental first, and the process that runs one.

python -m benchmarks.card.checks 3 --seconds 60 [--dry]
"""

import argparse
from dataclasses import dataclass
from importlib import import_module

from benchmarks.card.claims import Report


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        number: as on the command line and in the report.
        name: of its module, ``benchmarks.card.<name>``.
        claims: what it decides; what it does not get to is reported as not reached.
        seconds: it is stopped after so many.
        least: it is not begun with less time than that.
    """

    number: int
    name: str
    claims: tuple[str, ...]
    seconds: float
    least: float


CHECKS = (
    Check(
        1,
        "start",
        ("what was carried can be imported", "SGLang resolves indexcache to DSA with the pattern"),
        90,
        20,
    ),
    Check(
        2,
        "kernels",
        ("our CUDA kernels compile", "our CUDA kernels are right", "our Triton kernels are right"),
        300,
        60,
    ),
    Check(
        3,
        "graphs",
        (
            "our CUDA kernels are right in CUDA graphs",
            "our Triton kernels are right in CUDA graphs",
        ),
        120,
        30,
    ),
    Check(
        4,
        "keys",
        (
            "the full and the key-only path store the same index keys",
            "index keys lie in pages as we read them",
        ),
        90,
        30,
    ),
    Check(
        5,
        "capture",
        (
            "capture and replay: a stage that starts on F",
            "capture and replay: a stage that starts on S",
            "capture and replay: sub-batches that start on S",
            "capture and replay: rows of several patterns",
        ),
        90,
        20,
    ),
    Check(
        6, "breakable", ("breakable prefill: every replay uses its own batch's indices",), 90, 20
    ),
    Check(
        7,
        "metadata",
        (
            "our decode selection over SGLang's metadata",
            "our prefill selection over SGLang's metadata",
        ),
        90,
        30,
    ),
    Check(
        8,
        "served",
        (
            "a server answers on this machine with --attention-backend indexcache",
            "its tokens are those of stock SGLang with the same indexer_types",
            "live mode answers, counts and switches",
        ),
        420,
        120,
    ),
    Check(9, "sanitized", ("compute-sanitizer finds nothing in our CUDA kernels",), 120, 40),
    Check(10, "speed", ("the kernels were timed", "the index buffer was timed"), 150, 40),
)


def main() -> None:
    """Run one check in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, choices=[check.number for check in CHECKS])
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--with-servers", action="store_true")
    options = parser.parse_args()
    check = next(check for check in CHECKS if check.number == options.number)
    report = Report(check.claims, options.dry, options.seconds, options.with_servers)
    import_module(f"benchmarks.card.{check.name}").run(report)


if __name__ == "__main__":
    main()
