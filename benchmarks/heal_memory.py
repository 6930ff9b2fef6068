"""Peak memory of one step of healing, by the length of its row.

    python -m benchmarks.heal_memory [--lengths 8192 32768 131072]

One F layer of tiny width, made at random; one row of one document, in the dense warm-up and in the
sparse stage: forward, loss, gradients. Each measurement is a process of its own, as a process's
peak memory never falls. MiB are above what the process had before the step, model included. libc
keeps freed memory, as a GPU's allocator does, and does not map every large tensor anew: that would
take most of the time. Writes heal_memory.json after each.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from benchmarks.records import markdown, read_arguments
from sglang_indexcache.lab.heal.frozen import FrozenBody
from sglang_indexcache.lab.heal.local import LocalSharing
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.lab.heal.sharing import Stage
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json

QUICK = {"lengths": [8192]}
PATTERN, TOPK, BLOCK = Pattern("F"), 64, 256
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1
"""Of ``mallopt``, as ``malloc.h`` has them."""
FIELDS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": len(PATTERN),
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": len(PATTERN),
    "index_n_heads": 1,
    "index_head_dim": 16,
    "index_topk": TOPK,
    "initializer_range": 0.3,
    "max_position_embeddings": 1 << 20,
}


def step(folder: Path, length: int, stage: Stage) -> float:
    """Return the MiB that a step takes at its peak."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sharing = LocalSharing(PATTERN, TOPK, block=BLOCK)
    body = FrozenBody(folder, PATTERN, sharing, torch.float32, [torch.device("cpu")])
    ids = torch.randint(0, FIELDS["vocab_size"], (1, length))
    before = peak_mib()
    run = sharing.begin(stage, Layout(torch.zeros_like(ids)), length)
    sharing.resume(run)
    hidden, rotation = body.start(ids, torch.arange(length)[None])
    for number in range(len(PATTERN)):
        hidden = body.layer(number)(hidden, rotation)
    assert all(p.grad is not None for p in body.indexer_tensors().values())
    return peak_mib() - before


def peak_mib() -> float:
    """Return the process's peak memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_a_process(folder: Path, length: int, stage: Stage) -> float:
    """:func:`step`, in a process of its own."""
    with get_context("fork").Pool(1, keep_freed_memory) as pool:
        return pool.apply(step, (folder, length, stage))


def keep_freed_memory() -> None:
    """Tell this process's libc to."""
    libc = ctypes.CDLL("libc.so.6")
    if not (libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, -1)):
        raise OSError("this libc does not take these options")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    arguments = read_arguments(parser, "heal_memory.json", quick=QUICK)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        torch.manual_seed(0)
        GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**FIELDS)).save_pretrained(folder)
        for length in arguments.lengths:
            rows.append({"length": length, "square_mib": length**2 * 4 / 2**20})
            for name, stage in (("dense", Stage.WARMUP), ("sparse", Stage.SPARSE)):
                rows[-1][f"{name}_mib"] = in_a_process(folder, length, stage)
                print(json.dumps(rows[-1]), flush=True)
                result = {
                    "command": arguments.command,
                    "what": "peak memory of one step of healing, one row, float32, CPU",
                    "machine": machine() | {"threads": 1},
                    "pattern": str(PATTERN),
                    "fields": FIELDS,
                    "block": BLOCK,
                    "square_mib": "what one float32 matrix of length x length would take",
                    "rows": rows,
                }
                write_json(arguments.output, result)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Tabulate MiB by length."""
    header = ("tokens of a row", "dense step, MiB", "sparse step, MiB", "one L x L, MiB")
    names = ("dense_mib", "sparse_mib", "square_mib")
    return markdown(
        header, [(f"{row['length']:,}", *(f"{row[name]:,.0f}" for name in names)) for row in rows]
    )


if __name__ == "__main__":
    main()
