"""The engine's indexer by the same model: DeepGEMM's kernel, compiled from the installed package.

It is compiled to be read and never to be run or kept. Where the package is not installed, the
clocks of the last forecast stand, with the version that they came from.
"""

from __future__ import annotations

import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.kernels.hot_loops import clocks_of
from benchmarks.kernels.sass import innermost, parse
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.build import ARCHITECTURE, find_nvcc
from sglang_indexcache.kernels.disassembly import listing
from sglang_indexcache.study.provenance import package_version

WARPS = 4
"""Math warpgroups, 64 keys x 128 columns each: together 256 keys."""
_INSTANCE = (
    "template __global__ void deep_gemm::sm90_fp8_mqa_logits<"
    "{heads}, 128, false, false, {rows}, 256, 3, 3, 132, 128, 512, float>"
    "(uint32_t, uint32_t, uint32_t, uint32_t, uint32_t*, uint32_t*, float*, "
    "const __grid_constant__ cute::TmaDescriptor, const __grid_constant__ cute::TmaDescriptor, "
    "const __grid_constant__ cute::TmaDescriptor, const __grid_constant__ cute::TmaDescriptor);\n"
)
"""As SGLang asks for it: 128 columns, 256 keys, three stages of each."""


def deep_gemm() -> dict[str, Any] | None:
    """Clocks of 256 keys x 128 columns with 32 and 64 heads; None without the package or nvcc.

    Raises:
        KernelError: the package's source does not compile: a version that this does not know.
    """
    package = find_spec("deep_gemm")
    if package is None or package.origin is None:
        return None
    include = Path(package.origin).parent / "include"
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "deep_gemm.cu", Path(folder) / "deep_gemm.cubin"
        source.write_text(
            "#include <deep_gemm/impls/sm90_fp8_mqa_logits.cuh>\n"
            + "".join(_INSTANCE.format(heads=heads, rows=128 // heads) for heads in (32, 64))
        )
        architecture = f"-gencode=arch={ARCHITECTURE.replace('sm', 'compute')},code={ARCHITECTURE}"
        flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", architecture, f"-I{include}"]
        command = [str(find_nvcc()), *flags, "-cubin", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise KernelError(f"DeepGEMM's kernel does not compile:\n{done.stderr[-2000:]}")
        kernels = parse(listing(cubin))
    found: dict[str, Any] = {
        "source": f"sgl-deep-gemm {package_version('sgl-deep-gemm')}, compiled here and modelled"
    }
    for heads in (32, 64):
        code = next(code for name, code in kernels.items() if f"ILj{heads}E" in name)
        loop = innermost(code, {"QGMMA": 4})
        runs = [run[0] for run in clocks_of(loop, WARPS)]
        found[str(heads)] = {
            "instructions": len(loop.iteration(lambda: True)),
            "clocks": [round(min(runs), 1), round(max(runs), 1)],
        }
    return found
