"""Tables in the wheel's form, from formulas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

PREFIXES = (0, 8192, 16_384, 32_768, 65_536, 131_072)
STEPS = (2047, 8191, 32_767, 65_535, 131_071, 262_143)


def write_rows(
    folder: Path, changed: Mapping[tuple[str, int, int], float] = {}, card: str = "h200_sxm"
) -> Path:
    """Rows of GLM-5-FP8 at 8 heads in bfloat16; returns the data folder.

    A chunk of any length takes 2 ms in an S layer, in an F layer a microsecond more for each token
    of prefix; a step 50 us, in an F layer 50 more and a microsecond for each thousand tokens.

    Args:
        folder: where.
        changed: other milliseconds of a chunk, by kind, tokens and prefix.
        card: whose folder.
    """
    rows_of_all: list[dict[str, Any]] = []
    for kind, suffix, model in (
        ("F", "", "zai-org/GLM-5-FP8"),
        ("S", "_skip_indexer", "zai-org/GLM-5.2-FP8"),
    ):
        columns = {
            "model": model, "kernel_source": f"sglang_dsa{suffix}_flashmla_sparse",
            "num_heads": 8, "gemm_type": "fp8_block", "kv_cache_dtype": "bfloat16",
        }  # fmt: skip
        for isl in (4096, 8192):
            for prefix in PREFIXES:
                latency = 2 + 1e-3 * prefix * (kind == "F")
                latency = changed.get((kind, isl, prefix), latency)
                about = {"op_name": f"dsa_context_module{suffix}", "batch_size": 1, "isl": isl}
                rows_of_all.append({**columns, **about, "step": prefix, "latency": latency})
        for requests in (1, 4):
            for step in STEPS:
                latency = 0.05 + (0.05 + 1e-6 * (step + 1)) * (kind == "F")
                about = {"op_name": f"dsa_generation_module{suffix}", "batch_size": requests}
                rows_of_all.append({**columns, **about, "isl": 1, "step": step, "latency": latency})
    data = folder / card
    sparse = data / "sparse_attention" / "sglang" / "0.5.14"
    for phase in ("context", "generation"):
        rows = [row for row in rows_of_all if phase in row["op_name"]]
        _write(sparse / f"dsa_{phase}_module_perf.parquet", rows)
    experts = {
        "hidden_size": 6144, "inter_size": 2048, "topk": 8, "num_experts": 256,
        "moe_dtype": "fp8_block", "moe_tp_size": 8, "moe_ep_size": 1,
        "distribution": "power_law_1.01", "latency": 1.0,
    }  # fmt: skip
    counts = (1, 4, 8192, 16_384)
    _write(
        data / "moe/sglang/0.5.14/moe_perf.parquet",
        [{**experts, "num_tokens": n} for n in counts],
    )
    _write(
        data / "comm/sglang/0.5.14/custom_allreduce_perf.parquet",
        [
            {"num_gpus": 8, "backend": backend, "message_size": 2**n, "latency": 0.25}
            for n in range(7, 30)
            for backend in ("sglang_graph", "sglang_eager")
        ],
    )
    _write(
        data / "comm/nccl/2.29.2/nccl_perf.parquet",
        [
            {"op_name": "all_gather", "nccl_dtype": "int8", "num_gpus": 8, "message_size": 2**n}
            | {"latency": 0.1}
            for n in range(10, 31)
        ],
    )
    sizes = ((512, 6144), (6144, 256), (256, 6144), (3072, 6144), (6144, 1536), (19_360, 6144))
    _write(
        data / "gemm/sglang/0.5.14/gemm_perf.parquet",
        [
            {"n": n, "k": k, "m": m, "gemm_dtype": weights, "latency": 0.01}
            for n, k in sizes
            for m in (1, 4, 8192, 16_384)
            for weights in ("fp8_block", "bfloat16")
        ],
    )
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
