"""Make the table from which ``--indexcache-kernels auto`` chooses, from the committed record.

    python -m benchmarks.card.measured

A shape is in it if SGLang's default was timed, and ours was not wrong on the timed inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks import engine_kernels
from benchmarks.card import record as records
from benchmarks.kernels.workloads import Family, Workload
from benchmarks.records import RESULTS
from sglang_indexcache.kernels import routes
from sglang_indexcache.library.writing import write_whole

OPERATIONS: dict[Family, str] = {
    "select_prefill": "select-prefill",
    "select_decode": "select-decode",
    "mla_prefill": "sparse_mla-prefill",
    "mla_decode": "sparse_mla-decode",
}


def rows_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the shapes of a card's record, as :data:`.routes.TABLE` has them."""
    return [
        _row(work, row)
        for family in OPERATIONS
        for work, row in sorted(records.timed(record, family), key=lambda pair: str(pair[0]))
        if engine_kernels.engine_default(work) in row["times"] and not row["wrong"]
    ]


def _row(work: Workload, row: Mapping[str, Any]) -> dict[str, Any]:
    names = {engine_kernels.engine_default(work): routes.ENGINE, records.OURS: routes.OURS}
    if work.family == "select_prefill":
        names[f"deep_gemm + {engine_kernels.ENGINE_TOPK}"] = routes.SECOND_TOPK
    attends = work.family.startswith("mla")
    return {
        "operation": OPERATIONS[work.family],
        "heads": work.heads,
        "cache": ("fp8" if work.fp8 else "bfloat16") if attends else "",
        "verified": work.verified,
        "rows": work.rows,
        "tokens": work.context,
        "overlap": work.overlap if work.family == "mla_prefill" else 0,
        "times": {
            name: records.microseconds(row, anchor)[0]
            for anchor, name in names.items()
            if anchor in row["times"]
        },
    }


def table() -> str:
    """Return the text of :data:`.routes.TABLE`, a shape a line."""
    record = json.loads((RESULTS / records.RECORD).read_text())
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows_of(record))
    card = json.dumps(record["machine"]["name"])
    command = json.dumps("python -m benchmarks.card.measured")
    return f'{{"command": {command}, "cards": {{{card}: [\n{lines}\n]}}}}\n'


def main() -> None:
    """Write the table into the package."""
    write_whole(routes.TABLE, table())
    print(f"wrote {routes.TABLE}")


if __name__ == "__main__":
    main()
