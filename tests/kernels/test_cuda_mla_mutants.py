"""Sparse MLA's device code with one wait, arrival or barrier taken out: the emulator notices each.

All of them are compiled at once, every one in a namespace of its own. What the emulator does not
model (csrc/README.md) has no mutant here: fences, and `setmaxnreg`.
"""

import ctypes
import re
from ctypes import c_bool, c_char_p, c_float, c_int, c_uint64
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import pytest
import torch

from sglang_indexcache.kernels.build import source_folder
from sglang_indexcache.kernels.sparse_mla import reference
from sglang_indexcache.kernels.sparse_mla.reference import quantize_latent
from tests.kernels.cuda_host import compiled
from tests.kernels.test_cuda_emulated import at, emulator_command

pytestmark = pytest.mark.csrc

PARTS = ("inputs", "load_bf16", "load_fp8", "products", "combine", "attend")
"""The files of the attention kernel, each behind those that it includes."""
NOTHING = ("", "", "both")
MUTANTS: dict[str, tuple[str, str, str]] = {
    # what is missing: (text of PARTS, what stands there instead, with which rows it matters)
    "nothing": NOTHING,
    "math does not wait for keys": (
        "mbarrier_wait(&shared.full[stage], (step / kStages) & 1);", "", "both",
    ),
    "keys never arrive": (
        "wait_copies();\n    fence_async_proxy();  // WGMMA reads the keys through the async proxy"
        "\n    mbarrier_arrive(&shared.full[stage]);", "", "bf16",
    ),
    "keys arrive before their copies": (
        "    wait_copies();\n    fence_async", "fence_async", "bf16",
    ),
    "bfloat16 keys are overwritten": ("mbarrier_wait(&shared.empty[stage], parity);", "", "bf16"),
    "FP8 keys are overwritten": (
        "mbarrier_wait(&shared.empty[1 - stage], (before - begin) / kStages & 1);", "", "fp8",
    ),
    "FP8 keys wait for the wrong phase": (
        "(before - begin) / kStages & 1", "((before - begin) / kStages & 1) ^ 1", "fp8",
    ),
    "stages are never free": (
        "if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.empty[stage]);", "", "both",
    ),
    "raw rows of other lanes": (
        "__syncwarp();  // a row was copied by the lanes of the warp that converts it", "", "fp8",
    ),
    "rows are converted while they are read": (
        "(shared.scales[stage][key]);\n    __syncwarp();", "(shared.scales[stage][key]);", "fp8",
    ),
    "probabilities over keys in use": ("sync_group(group);  // its", "// its", "both"),
    "probabilities are not complete": (
        "sync_math();  // the probabilities are complete", "", "both",
    ),
    "the other group's sums are not scaled": (
        "      rescale(state, peak);\n    }", "    }", "both",
    ),
    "sums over keys in use": ("sync_math();  // the keys are done with", "// the keys", "both"),
    "a cluster reads what is not there": (
        "  cluster_sync();\n  combine(", "  __syncthreads();\n  combine(", "both",
    ),
    "a cluster's block leaves early": ("  cluster_leave();", "  //", "both"),
    "peers' peaks are not complete": (
        "  __syncthreads();\n  const int m = threadIdx.x;", "  const int m = threadIdx.x;", "both",
    ),
    "weights are not complete": (
        "  __syncthreads();\n\n  const int first", "  const int first", "both",
    ),
    "roles start before the barriers are there": (
        "  __syncthreads();\n\n  if (threadIdx.x >= kMathThreads) {",
        "  if (threadIdx.x >= kMathThreads) {", "bf16",
    ),
}  # fmt: skip
NUMBERS = {name: number for number, name in enumerate(MUTANTS)}
TRIES = 8
CLUSTER = 3


@cache
def mutants() -> ctypes.CDLL:
    """Return every mutant's kernels, in one library."""
    files = (source_folder() / f"sparse_mla/{part}.cuh" for part in PARTS)
    source = "\n".join(file.read_text() for file in files)
    includes_of_others = rf'^#include (?!"sparse_mla/(?:{"|".join(PARTS)}).cuh").*$'
    includes = "\n".join(re.findall(includes_of_others, source, re.MULTILINE))
    parts = ['#include "simt.h"', includes, '#include "common/block.cuh"']
    body = re.sub(r"^#(include|pragma once).*$", "", source, flags=re.MULTILINE)
    opening = "namespace indexcache::sparse_mla {"
    for name, (old, new, _) in MUTANTS.items():
        assert not old or body.count(old) == 1, f"{name}: the kernel has changed"
        changed = body.replace(old, new) if old else body
        parts.append(changed.replace(opening, f"{opening[:-2]}::mutant_{NUMBERS[name]} {{"))
    calls = "\n".join(
        f"    case {number}: return run_mutant(threads, seed, [&] {{ using namespace "
        f"indexcache::sparse_mla::mutant_{number}; const Params params = {{q, cache, nullptr, out, "
        "lse, 1, heads, 1, scale * kLog2e, slots, nullptr, &k, k}; "
        "fp8 ? attend_kernel<true>(params) : attend_kernel<false>(params); });"
        for number in NUMBERS.values()
    )
    parts.append(f"""
#include <functional>
std::string failure;
const char* run_mutant(int threads, uint64_t seed, std::function<void()> kernel) {{
  failure = simt::launch(dim3({CLUSTER}, 1, 1), {CLUSTER}, threads,
                         sizeof(indexcache::sparse_mla::Shared) + 1024, seed, std::move(kernel));
  return failure.c_str();
}}
extern "C" const char* attend_mutant(int mutant, const __nv_bfloat16* q, const unsigned char* cache,
                                     bool fp8, __nv_bfloat16* out, float* lse, int heads,
                                     float scale, const int* slots, int k, uint64_t seed) {{
  const int threads = indexcache::sparse_mla::kThreads;
  switch (mutant) {{
{calls}
  }}
  return "no such mutant";
}}
""")
    with NamedTemporaryFile("w", suffix=".cpp") as file:
        file.write("\n".join(parts))
        file.flush()
        library = compiled(lambda target: emulator_command(Path(file.name), target))
    library.attend_mutant.restype = c_char_p
    return library


class Problem:
    """One row of few heads, whose later keys score ever higher: sums are rescaled at every step."""

    def __init__(self, random: np.random.Generator, fp8: bool) -> None:
        self.heads, self.k, self.scale = 5, 9 * 64 - 7, 0.05
        torch.manual_seed(int(random.integers(1 << 31)))
        self.q = torch.randn(1, self.heads, 576).bfloat16()
        growing = torch.linspace(0, 3, self.k)[:, None] * self.q[0].float().mean(0)
        latent = (torch.randn(self.k, 576) + growing).bfloat16()
        self.fp8, self.cache = fp8, quantize_latent(latent) if fp8 else latent
        self.slots = torch.arange(self.k, dtype=torch.int32)[None]
        self.out = torch.empty(1, self.heads, 512).bfloat16()
        self.lse = torch.empty(1, self.heads)
        self.want, self.want_lse = reference.sparse_mla(
            self.q.double(), self.cache, self.slots, self.scale
        )

    def complaint(self, mutant: str, seed: int) -> str:
        """Return what the emulator says, or that the result is wrong; nothing if it is right."""
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        message = mutants().attend_mutant(
            NUMBERS[mutant], at(self.q), at(self.cache), c_bool(self.fp8), at(self.out),
            at(self.lse), c_int(self.heads), c_float(self.scale), at(self.slots), c_int(self.k),
            c_uint64(seed),
        ).decode()  # fmt: skip
        if message:
            return str(message)
        right = torch.allclose(self.lse, self.want_lse, rtol=0, atol=1e-3)
        right = right and torch.allclose(self.out.double(), self.want, rtol=0.03, atol=0.03)
        return "" if right else "another result"


CASES = [
    (name, fp8)
    for name, (_, _, rows) in MUTANTS.items()
    for fp8 in (False, True)
    if rows in ("both", "fp8" if fp8 else "bf16")
]


@pytest.mark.parametrize(("name", "fp8"), CASES)
def test_what_is_missing_is_noticed(name: str, fp8: bool, random: np.random.Generator) -> None:
    problem = Problem(random, fp8)
    tries = 2 if name == "nothing" else TRIES
    complaints = (problem.complaint(name, int(random.integers(1 << 40))) for _ in range(tries))
    complaint = next((message for message in complaints if message), "")
    assert bool(complaint) == (name != "nothing"), complaint
