"""The calls of others' kernels: their arguments fit the installed packages, and what an engine
prepares once a forward is not part of what is timed.

The kernels themselves need a GPU and do not run here; functions that record stand in for them.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
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
OPS = "sglang.kernels.ops.attention"
FLASH_MLA = f"{OPS}.flash_mla_interface"
FA3 = f"{OPS}.flash_attention"
TRITON_MLA = f"{OPS}.dsa.triton_sparse_mla_prefill"
Q8 = f"{OPS}.sparse_mla_q8kv8_prefill_sm90"
CAST_Q, CAST_KV = f"{OPS}.mla_qk_prep", f"{OPS}.dsa.dequant_k_cache"
SOURCES = {
    "deep_gemm": ("deep_gemm", "__init__.py"),
    "flashinfer": ("flashinfer", "topk.py"),
    "sgl_kernel": ("sgl_kernel", "top_k.py"),
    SGLANG: ("sglang", "kernels/ops/attention/dsv4/topk.py"),
    **{
        module: ("sglang", module.removeprefix("sglang.").replace(".", "/") + ".py")
        for module in (FLASH_MLA, FA3, TRITON_MLA, Q8, CAST_Q, CAST_KV)
    },
}
"""Where the functions of a module are written: to import them takes a GPU's driver."""
Q8_NAME, TRITON_NAME = "flash_mla q8", "triton_sparse_mla"
PREFILL = Workload("select_prefill", 300, 512, 32, topk=64)
DECODE = Workload("select_decode", 3, 130, 32, topk=64)


def signature(module: str, name: str) -> inspect.Signature | None:
    """Read an installed function's signature from its source; None without its package."""
    package, file = SOURCES[module]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    nothing = ast.Constant(None)
    function.args.defaults = [nothing for _ in function.args.defaults]
    function.args.kw_defaults = [d and nothing for d in function.args.kw_defaults]
    function.body, function.decorator_list, function.returns = [ast.Pass()], [], None
    scope: dict[str, Any] = {}
    module_of_one = ast.fix_missing_locations(ast.Module([function], []))
    exec(compile(module_of_one, file, "exec"), scope)
    return inspect.signature(scope[name])


class Installed:
    """Replacement for load_module, with modules whose functions record and answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, module: str) -> Any:
        return SimpleNamespace(**{name: self.function(module, name) for name in self.names(module)})

    def names(self, module: str) -> list[str]:
        source = inspect.getsource(anchors)
        return [n for n in ANSWERS if n in source and ANSWERS[n][0] == module]

    def function(self, module: str, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            parameters = signature(module, name)
            if parameters is not None:
                parameters.bind(*args, **kwargs)
            self.calls.append((name, args, kwargs))
            answer = ANSWERS[name][1]
            return answer(*args) if args else answer(**kwargs)

        return call

    def count(self, name: str) -> int:
        return sum(callee == name for callee, _, _ in self.calls)


def columns(q: torch.Tensor, kv: Any, *_: Any) -> torch.Tensor:
    return torch.zeros(len(q), len(kv[0]))


def paged(q: torch.Tensor, pages: Any, w: Any, lens: Any, table: Any, plan: Any, width: int) -> Any:
    return torch.zeros(len(q), width)


def sorted_topk(logits: torch.Tensor, k: int) -> torch.Tensor:
    return torch.zeros(len(logits), k, dtype=torch.int32)


ANSWERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "fp8_mqa_logits": ("deep_gemm", columns),
    "fp8_paged_mqa_logits": ("deep_gemm", paged),
    "get_paged_mqa_logits_metadata": ("deep_gemm", lambda *_: None),
    "top_k_ragged_transform": ("flashinfer", lambda logits, _, visible, k: sorted_topk(logits, k)),
    "fast_topk_v2": ("sgl_kernel", lambda logits, visible, k: sorted_topk(logits, k)),
    "plan_topk_v2": (SGLANG, lambda lens: torch.zeros(len(lens) + 1, 2, dtype=torch.int32)),
    "topk_transform_ragged_v2": (SGLANG, lambda *_: None),
    "topk_transform_paged_v2": (SGLANG, lambda *_: None),
    "flash_mla_sparse_fwd": (FLASH_MLA, lambda q, *_: (q[..., :512], None, None)),
    "flash_mla_with_kvcache": (FLASH_MLA, lambda q, *_: (q[..., :512], None)),
    "flash_attn_with_kvcache": (FA3, lambda **arguments: arguments["qv"]),
    "sparse_mla_prefill": (TRITON_MLA, lambda q, *_: q[..., :512]),
    "sparse_mla_q8kv8_prefill_fwd": (Q8, lambda q, *_: (torch.zeros(*q.shape[:2], 512), 0, 0)),
    "concat_and_cast_q_fp8_pad": (CAST_Q, lambda *_: None),
    "gather_cast_kv_fp8_pad_paged": (CAST_KV, lambda out, *_: out),
    "get_mla_metadata": (FLASH_MLA, lambda: ("plan", None)),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    engine = Installed()
    monkeypatch.setattr(anchors, "load_module", engine)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return engine


def test_signatures_are_read() -> None:
    """The check is checked: it reads what is installed."""
    for name, (module, _) in ANSWERS.items():
        parameters = signature(module, name)
        assert parameters is None or len(parameters.parameters) > 0
    parameters = signature(SGLANG, "topk_transform_ragged_v2")
    if parameters is not None:
        with pytest.raises(TypeError, match="out_indices"):
            parameters.bind(1, 2, out_offsets=3)


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
        calls = [call for call in installed.calls if call[0] == name]
        unused = "topk_transform_paged_v2" if work.is_prefill else "topk_transform_ragged_v2"
        assert len(calls) == (0 if name == unused else slices), name
        visible = []
        for _, args, kwargs in calls:
            tensors_of_rows = per_row(args, kwargs)
            assert len({len(tensor) for tensor in tensors_of_rows}) == 1, name
            visible.append(args[2] if name == "top_k_ragged_transform" else args[1])
        if visible:
            assert torch.equal(torch.cat(visible), tensors.visible)


def test_verified_rows_are_requests_of_their_own_on_hopper(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workload("select_decode", 3, 130, 32, topk=64, verified=4)
    tensors = workloads.indexer_tensors(work, CPU)
    anchors.select_anchors(work, tensors)["deep_gemm + sglang v2"]()()
    call = next(args for name, args, _ in installed.calls if name == "fp8_paged_mqa_logits")
    q, _pages, weights, lengths, table = call[:5]
    assert q.shape[:2] == (12, 1)
    assert len(weights) == len(lengths) == 12
    assert torch.equal(table[::4], tensors.block_table)
    assert torch.equal(table[1::4], tensors.block_table)
    assert lengths.flatten().tolist() == [127, 128, 129, 130] * 3


def test_plans_are_made_once(installed: Installed) -> None:
    tensors = workloads.indexer_tensors(DECODE, CPU)
    call = anchors.select_anchors(DECODE, tensors)["deep_gemm + sglang v2"]()
    for _ in range(3):
        call()
    assert installed.count("topk_transform_paged_v2") == 3
    assert installed.count("plan_topk_v2") == 1
    assert installed.count("get_paged_mqa_logits_metadata") == 1


@pytest.mark.parametrize("fp8", [False, True])
def test_the_padding_of_heads_is_timed(fp8: bool, installed: Installed) -> None:
    """SGLang pads in every call: what is called twice is padded twice, from the query as it is."""
    work = Workload("mla_decode", 2, 128, 20, topk=64, fp8=fp8)
    tensors = workloads.attention_tensors(work, CPU)
    call = anchors.mla_anchors(work, tensors)["flash_mla"]()
    for value in (1.0, 2.0):
        tensors.q.fill_(value)
        call()
        name, (padded, *_), _ = installed.calls[-1]
        assert name == ("flash_mla_with_kvcache" if fp8 else "flash_mla_sparse_fwd")
        assert padded.shape[-2] == 64
        assert (padded[..., :20, :] == value).all()
        assert not padded[..., 20:, :].any()


def test_decode_over_bfloat16_is_fa3_s(installed: Installed) -> None:
    """A row a sequence, its slots pages of one token; keys and values apart, as SGLang has them."""
    work = Workload("mla_decode", 3, 128, 8, topk=64)
    tensors = workloads.attention_tensors(work, CPU)
    anchors.mla_anchors(work, tensors)["fa3"]()()
    name, _, arguments = installed.calls[-1]
    assert name == "flash_attn_with_kvcache"
    assert arguments["q"].shape == (3, 8, 64)
    assert arguments["qv"].shape == (3, 8, 512)
    assert arguments["k_cache"].shape == (len(tensors.cache), 1, 1, 64)
    assert arguments["v_cache"].shape == (len(tensors.cache), 1, 1, 512)
    assert torch.equal(arguments["page_table"], tensors.slots)
    assert arguments["cache_seqlens"].tolist() == [64] * 3
    assert arguments["cu_seqlens_k_new"].tolist() == [0, 64, 128, 192]
    assert "fa3" not in anchors.mla_anchors(Workload("mla_prefill", 3, 128, 8), tensors)


@pytest.mark.parametrize(
    ("heads", "rivals"),
    [
        (8, [Q8_NAME, TRITON_NAME, f"{TRITON_NAME}, union 2", f"{TRITON_NAME}, union 4"]),
        (16, [Q8_NAME, TRITON_NAME, f"{TRITON_NAME}, union 2"]),
        (20, [TRITON_NAME]),
        (32, [Q8_NAME, TRITON_NAME]),
        (64, [Q8_NAME]),
        (128, [Q8_NAME]),
    ],
)
def test_what_sglang_offers_besides_for_a_bfloat16_prefill(
    heads: int, rivals: list[str], installed: Installed
) -> None:
    """Start-up checks let these through for so many heads; "faster" means than these, too."""
    work = Workload("mla_prefill", 3, 256, heads, topk=128)
    tensors = workloads.attention_tensors(work, CPU)
    makers = anchors.mla_anchors(work, tensors)
    assert list(makers) == ["flash_mla", *rivals]
    assert set(makers) <= set(anchors.engine_anchors(work))
    for make in makers.values():
        assert make()().shape == (3, heads, 512)
    unions = [
        arguments["union"] for name, _, arguments in installed.calls if name == "sparse_mla_prefill"
    ]
    assert unions == [int(name[-1]) if "union" in name else 0 for name in rivals if name != Q8_NAME]
    assert list(anchors.mla_anchors(replace(work, fp8=True), tensors)) == ["flash_mla"]


def test_q8_casts_in_every_call(installed: Installed) -> None:
    """Query and cache are bfloat16 until then; empty slots fall on rows behind the prompt's."""
    work = Workload("mla_prefill", 3, 256, 8, topk=128)
    tensors = workloads.attention_tensors(work, CPU)
    call = anchors.mla_anchors(work, tensors)[Q8_NAME]()
    call()
    call()
    steps = ["concat_and_cast_q_fp8_pad", "gather_cast_kv_fp8_pad_paged"]
    steps = [*steps, "sparse_mla_q8kv8_prefill_fwd"] * 2
    assert [name for name, _, _ in installed.calls] == steps
    q, kv, slots = installed.calls[-1][1][:3]
    assert (q.shape, kv.shape, slots.shape) == ((3, 64, 576), (256 + 128, 1, 576), (3, 1, 128))
    assert q.dtype == kv.dtype == torch.float8_e4m3fn


def test_the_limits_of_triton_s_heads_are_sglang_s() -> None:
    """Read in its source, for to import it takes a GPU's driver."""
    if (spec := find_spec("sglang")) is None or spec.origin is None:
        pytest.skip("SGLang is not installed")
    backend = Path(spec.origin).parent / "srt/layers/attention/dsa_backend.py"
    source = backend.read_text()
    assert f"_TRITON_SPARSE_MLA_MAX_HEADS = {anchors.TRITON_HEADS}\n" in source
    assert "if rows < {} or rows > {} or rows & (rows - 1):".format(*anchors.TRITON_UNION) in source
    assert "if union not in (0, 2, 4):" in source


def test_what_cannot_be_loaded_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the anchor fails, and nothing else does."""
    visible = torch.full((5,), 512, dtype=torch.int32)
    topk = anchors.make_topk("torch.topk", visible, decode=False)
    assert topk(torch.randn(5, 512), visible, 64).shape == (5, 64)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for has_gpu, reason in ((False, "needs a GPU"), (True, "import of flashinfer halted")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda value=has_gpu: value)
        with pytest.raises(ImportError, match=reason):
            anchors.make_topk("flashinfer.top_k_ragged_transform", visible, decode=False)
