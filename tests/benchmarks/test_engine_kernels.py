"""The calls of others' kernels: their arguments fit the installed packages, and what an engine
prepares once a forward is not part of what is timed.

The kernels themselves need a GPU and do not run here; functions that record stand in for them.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import engine_kernels as anchors
from benchmarks.kernels import workloads
from benchmarks.kernels.workloads import Workload

CPU = torch.device("cpu")
SGLANG = "sglang.kernels.ops.attention.dsv4.topk"
FA3 = "sglang.kernels.ops.attention.flash_attention"
SOURCES = {
    "deep_gemm": ("deep_gemm", "__init__.py"),
    "flashinfer": ("flashinfer", "topk.py"),
    "sgl_kernel": ("sgl_kernel", "top_k.py"),
    SGLANG: ("sglang", "kernels/ops/attention/dsv4/topk.py"),
    "flash_mla": ("flash_mla", "flash_mla_interface.py"),
    FA3: ("sglang", "kernels/ops/attention/flash_attention.py"),
}
"""Where the functions of a module are written: to import them takes a GPU's driver."""
PREFILL = Workload("select_prefill", 300, 512, 32, topk=64)
DECODE = Workload("select_decode", 3, 130, 32, topk=64)
TOPK = Workload("topk", 5, 512, 0, topk=64)


def signature(module: str, name: str) -> inspect.Signature | None:
    """Of an installed function, from its source; None if its package is not installed."""
    package, file = SOURCES[module]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    found = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    for argument in ast.walk(found.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    nothing = ast.Constant(None)
    found.args.defaults = [nothing for _ in found.args.defaults]
    found.args.kw_defaults = [d and nothing for d in found.args.kw_defaults]
    found.body, found.decorator_list, found.returns = [ast.Pass()], [], None
    scope: dict[str, Any] = {}
    module_of_one = ast.fix_missing_locations(ast.Module([found], []))
    exec(compile(module_of_one, file, "exec"), scope)
    return inspect.signature(scope[name])


class Installed:
    """In place of load_module: modules whose functions record and answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, module: str) -> Any:
        return SimpleNamespace(**{name: self.function(module, name) for name in self.names(module)})

    def names(self, module: str) -> list[str]:
        source = inspect.getsource(anchors)
        return [n for n in ANSWERS if n in source and ANSWERS[n][0] == module]

    def function(self, module: str, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            own = signature(module, name)
            if own is not None:
                own.bind(*args, **kwargs)
            self.calls.append((name, args, kwargs))
            answer = ANSWERS[name][1]
            return answer(*args) if args else answer(**kwargs)

        return call

    def count(self, name: str) -> int:
        return sum(called == name for called, _, _ in self.calls)


def columns(q: torch.Tensor, kv: Any, *_: Any) -> torch.Tensor:
    return torch.zeros(len(q), len(kv[0]))


def paged(q: torch.Tensor, pages: Any, w: Any, lens: Any, table: Any, plan: Any, width: int) -> Any:
    return torch.zeros(len(q), width)


def chosen(logits: torch.Tensor, k: int) -> torch.Tensor:
    return torch.zeros(len(logits), k, dtype=torch.int32)


ANSWERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "fp8_mqa_logits": ("deep_gemm", columns),
    "fp8_paged_mqa_logits": ("deep_gemm", paged),
    "get_paged_mqa_logits_metadata": ("deep_gemm", lambda *_: None),
    "top_k_ragged_transform": ("flashinfer", lambda logits, _, seen, k: chosen(logits, k)),
    "fast_topk_v2": ("sgl_kernel", lambda logits, seen, k: chosen(logits, k)),
    "plan_topk_v2": (SGLANG, lambda lens: torch.zeros(len(lens) + 1, 2, dtype=torch.int32)),
    "topk_transform_ragged_v2": (SGLANG, lambda *_: None),
    "topk_transform_paged_v2": (SGLANG, lambda *_: None),
    "flash_mla_sparse_fwd": ("flash_mla", lambda q, *_: (q[..., :512], None, None)),
    "flash_mla_with_kvcache": ("flash_mla", lambda q, *_: (q[..., :512], None)),
    "flash_attn_with_kvcache": (FA3, lambda **given: given["qv"]),
    "get_mla_metadata": ("flash_mla", lambda: ("plan", None)),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    found = Installed()
    monkeypatch.setattr(anchors, "load_module", found)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return found


def test_signatures_are_read() -> None:
    """A check of the check: what is installed is looked into."""
    for name, (module, _) in ANSWERS.items():
        own = signature(module, name)
        assert own is None or len(own.parameters) > 0
    own = signature(SGLANG, "topk_transform_ragged_v2")
    if own is not None:
        with pytest.raises(TypeError, match="out_indices"):
            own.bind(1, 2, out_offsets=3)


@pytest.mark.parametrize("work", [PREFILL, DECODE], ids=str)
def test_indexers(work: Workload, installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each anchor's rows, lengths and offsets agree in every slice."""
    monkeypatch.setattr(anchors, "SLICE_BYTES", 4 * work.context * 130)
    tensors = workloads.indexer_tensors(work, CPU)
    makers = anchors.select_anchors(work, tensors)
    assert list(makers) == [f"deep_gemm + {name}" for name in anchors.TOPKS]
    for make in makers.values():
        make()()
    product = "fp8_mqa_logits" if work.is_prefill else "fp8_paged_mqa_logits"
    slices = 3 if work.is_prefill else 1
    assert installed.count(product) == slices * len(makers)
    selects = {
        "top_k_ragged_transform": lambda args, kwargs: (args[0], args[1], args[2]),
        "fast_topk_v2": lambda args, kwargs: args[:2],
        "topk_transform_ragged_v2": lambda args, kwargs: (*args, *kwargs.values()),
        "topk_transform_paged_v2": lambda args, kwargs: (*args[:2], args[3]),
    }
    for name, per_row in selects.items():
        own = [call for call in installed.calls if call[0] == name]
        unused = "topk_transform_paged_v2" if work.is_prefill else "topk_transform_ragged_v2"
        assert len(own) == (0 if name == unused else slices), name
        seen = []
        for _, args, kwargs in own:
            tensors_of_rows = per_row(args, kwargs)
            assert len({len(tensor) for tensor in tensors_of_rows}) == 1, name
            seen.append(args[2] if name == "top_k_ragged_transform" else args[1])
        if seen:
            assert torch.equal(torch.cat(seen), tensors.visible)


def test_plans_are_made_once(installed: Installed) -> None:
    tensors = workloads.indexer_tensors(DECODE, CPU)
    call = anchors.select_anchors(DECODE, tensors)["deep_gemm + sglang v2"]()
    for _ in range(3):
        call()
    assert installed.count("topk_transform_paged_v2") == 3
    assert installed.count("plan_topk_v2") == 1
    assert installed.count("get_paged_mqa_logits_metadata") == 1


def test_topks(installed: Installed) -> None:
    logits, visible = workloads.logits_tensors(TOPK, CPU)
    makers = anchors.topk_anchors(TOPK, logits, visible)
    assert tuple(makers) == anchors.TOPKS
    results = {name: make()() for name, make in makers.items()}
    assert results["torch.topk"].shape == (TOPK.rows, TOPK.topk)
    assert results["sglang v2"].shape == (TOPK.rows, TOPK.topk)
    called = [name for name, _, _ in installed.calls]
    assert called == ["top_k_ragged_transform", "fast_topk_v2", "topk_transform_ragged_v2"]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [20, 128])
def test_flash_mla(heads: int, fp8: bool, installed: Installed) -> None:
    work = Workload("mla_decode", 2, 128, heads, topk=64, fp8=fp8)
    anchors.mla_anchors(work, workloads.attention_tensors(work, CPU))["flash_mla"]()()
    name, args, _ = installed.calls[-1]
    assert name == ("flash_mla_with_kvcache" if fp8 else "flash_mla_sparse_fwd")
    assert args[0].shape[-2] == (64 if heads == 20 else 128)


@pytest.mark.parametrize("fp8", [False, True])
def test_the_padding_of_heads_is_timed(fp8: bool, installed: Installed) -> None:
    """SGLang pads in every call: what is called twice is padded twice, from the query as it is."""
    work = Workload("mla_decode", 2, 128, 20, topk=64, fp8=fp8)
    tensors = workloads.attention_tensors(work, CPU)
    call = anchors.mla_anchors(work, tensors)["flash_mla"]()
    for value in (1.0, 2.0):
        tensors.q.fill_(value)
        call()
        padded = installed.calls[-1][1][0]
        assert padded.shape[-2] == 64
        assert (padded[..., :20, :] == value).all()
        assert not padded[..., 20:, :].any()


def test_decode_over_bfloat16_is_fa3_s(installed: Installed) -> None:
    """A row a sequence, its slots pages of one token; keys and values apart, as SGLang has them."""
    work = Workload("mla_decode", 3, 128, 8, topk=64)
    tensors = workloads.attention_tensors(work, CPU)
    anchors.mla_anchors(work, tensors)["fa3"]()()
    name, _, given = installed.calls[-1]
    assert name == "flash_attn_with_kvcache"
    assert given["q"].shape == (3, 8, 64)
    assert given["qv"].shape == (3, 8, 512)
    assert given["k_cache"].shape == (len(tensors.cache), 1, 1, 64)
    assert given["v_cache"].shape == (len(tensors.cache), 1, 1, 512)
    assert torch.equal(given["page_table"], tensors.slots)
    assert given["cache_seqlens"].tolist() == [64] * 3
    assert given["cu_seqlens_k_new"].tolist() == [0, 64, 128, 192]
    assert "fa3" not in anchors.mla_anchors(Workload("mla_prefill", 3, 128, 8), tensors)


def test_what_cannot_be_loaded_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the anchor fails, and nothing else does."""
    logits, visible = workloads.logits_tensors(TOPK, CPU)
    makers = anchors.topk_anchors(TOPK, logits, visible)
    assert makers["torch.topk"]()().shape == (TOPK.rows, TOPK.topk)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for here, reason in ((False, "needs a GPU"), (True, "import of flashinfer halted")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        with pytest.raises(ImportError, match=reason):
            makers["flashinfer.top_k_ragged_transform"]()
