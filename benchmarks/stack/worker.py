"""Run the layer stack with one set of kernels: the result so far after every row, a line of JSON.

    python -m benchmarks.stack.worker --kernels cuda [--model 30b] [--kv bf16] [--tiny]

A process of its own, because a kernel that faults takes the process's GPU context with it.
"""

import argparse
import json
import sys

import torch

from benchmarks.stack.measure import run
from benchmarks.stack.ops import NAMES, load_ops
from sglang_indexcache.bench.layer_stack import LayerStackResult
from sglang_indexcache.bench.roofline import KV_BYTES
from sglang_indexcache.bench.shapes import ModelShape, preset
from sglang_indexcache.errors import IndexCacheError

LENGTHS = (10_000, 200_000, 60_000, 120_000)
"""The paper's, those first without which the others say little."""
CACHE_TOKENS = 800_000
"""KV tokens of a GPU in the paper."""
TINY_LENGTHS, TINY_CACHE_TOKENS = (70, 40), 160
TINY = {"layers": 4, "hidden": 64, "heads": 4, "q_lora": 32, "nope": 16, "v": 16}
TINY |= {"index_heads": 8, "topk": 16, "experts": 4, "active_experts": 2, "expert_width": 32}


def say(result: LayerStackResult) -> None:
    """One line for the parent."""
    print(json.dumps({"result": result.model_dump(mode="json")}), flush=True)


def main() -> int:
    """Measure until the list ends or the parent's patience does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", choices=NAMES, required=True)
    parser.add_argument("--model", default="30b")
    parser.add_argument("--kv", choices=KV_BYTES, default="bf16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="sizes for a run without a GPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    try:
        shape: ModelShape = preset(options.model)
        if options.tiny:
            shape = shape.model_copy(update=TINY)
        run(
            shape,
            load_ops(options.kernels, device, shape, fp8_kv=options.kv == "fp8"),
            TINY_LENGTHS if options.tiny else LENGTHS,
            layers=min(options.layers, shape.layers),
            chunk=32 if options.tiny else 8192,
            repeats=options.repeats,
            cache_tokens=TINY_CACHE_TOKENS if options.tiny else CACHE_TOKENS,
            device=device,
            report=say,
        )
    except (IndexCacheError, torch.OutOfMemoryError) as error:
        print(json.dumps({"problem": str(error).splitlines()[0][:500]}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
