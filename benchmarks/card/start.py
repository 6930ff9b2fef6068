"""Check 1: what was carried loads on this machine, and SGLang resolves our command line there.

It says at once which of the checks 4 to 8 are possible.
"""

import time
from importlib.util import find_spec
from typing import Any

from benchmarks.card.claims import MissingError, Report, expect, need
from benchmarks.card.engine import PATTERN, configuration, resolved
from sglang_indexcache.study.provenance import package_version

EVERYWHERE = {
    "torch": "torch",
    "triton": "triton",
    "tvm_ffi": "apache-tvm-ffi",
    "transformers": "transformers",
    "sglang": "sglang",
    "sglang.srt.entrypoints.http_server": "fastapi",
    "sglang.srt.managers.scheduler": "pyzmq",
}
"""Modules, and the distribution whose version says something about them."""
WITH_A_DRIVER = {
    "sgl_kernel": "sglang-kernel",
    "deep_gemm": "sgl-deep-gemm",
    "flash_mla": "sgl-flash-mla",
    "sglang_indexcache.serving.cuda.backend": "sglang-indexcache",
}


def imports(report: Report) -> dict[str, Any]:
    """Version and seconds of every module, or why it cannot be imported."""
    if find_spec("sglang") is None:
        raise MissingError("there is no SGLang here: unpack the archive of benchmarks.card.pack")
    found: dict[str, Any] = {}
    for name, distribution in (EVERYWHERE | ({} if report.dry else WITH_A_DRIVER)).items():
        started = time.perf_counter()
        try:
            need(name)
        except MissingError as missing:
            found[name] = {"problem": str(missing)}
            continue
        seconds = round(time.perf_counter() - started, 2)
        found[name] = {"version": package_version(distribution), "seconds": seconds}
    return found


def resolution() -> dict[str, Any]:
    """What SGLang makes of our command line on this machine.

    Raises:
        RefutedError: it lost the backend or the pattern.
    """
    cfg, types = configuration(resolved())
    expect(cfg.attention_backend == "dsa", f"the backend became {cfg.attention_backend!r}")
    expect(types == PATTERN.to_indexer_types(), f"indexer_types became {types}")
    names = ("kv_cache_dtype", "dsa_prefill_backend", "dsa_decode_backend", "page_size")
    names += ("cuda_graph_backend_decode", "cuda_graph_backend_prefill", "dsa_topk_backend")
    return {name: getattr(cfg, name, None) for name in names}


def run(report: Report) -> None:
    """Imports, then the command line."""
    with report.claim(report.claims[0]) as evidence:
        evidence |= imports(report)
        failed = {name: one["problem"] for name, one in evidence.items() if "problem" in one}
        expect(not failed, "; ".join(failed.values()))
    with report.claim(report.claims[1]) as evidence:
        evidence |= resolution()
