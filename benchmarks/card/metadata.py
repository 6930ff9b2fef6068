"""Check 7: our selection over the metadata that SGLang's backend builds of a batch.

Page tables, lengths, the grouping of MTP's rows and the offsets of a prefill are SGLang's to lay
out and ours to read. What was selected is compared, as sets, with float64 logits over the keys that
the batch's own slots hold.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.card.claims import MissingError, RefutedError, Report, expect, need
from benchmarks.card.engine import pool_in_use, published
from benchmarks.card.keys import Pool
from sglang_indexcache.kernels.contract import INDEX_DIM, PADDING, PAGE_TOKENS
from sglang_indexcache.kernels.dispatch import Machine, named
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3, read_pages, write_pages

HEADS, CONTEXT, DRAFT = 32, 2048, 2
LENGTHS = (900, 64, 65, 1500)
TOPK = 256
EXTENDS = (100, 64, 1, 300)
"""Rows of a prefill; the rest of :data:`LENGTHS` is prefix."""
TOLERANCE = 1e-3
"""Of a selected logit below the k-th, relative to the largest."""


class Requests:
    """Requests whose tokens lie in pages in random order, and their index keys."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(3)
        pages_of = [-(-length // PAGE_TOKENS) + 1 for length in LENGTHS]
        order = torch.randperm(sum(pages_of), generator=generator)
        self.slots = torch.zeros(len(LENGTHS) + 1, CONTEXT, dtype=torch.int32)
        for request, pages in enumerate(order.split(pages_of), start=1):
            slots = pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
            self.slots[request, : slots.numel()] = slots.flatten()
        self.pool = Pool("cpu")
        self.pool.pages = torch.zeros(len(order), self.pool.pages.shape[1], dtype=torch.uint8)
        every = torch.arange(len(order) * PAGE_TOKENS)
        keys = torch.randn(len(every), INDEX_DIM, generator=generator)
        write_pages(self.pool.pages, every, *quantize_e4m3(keys))
        values, scales = read_pages(self.pool.pages, every, INDEX_DIM)
        self.keys = values.double() * scales.double()[:, None]
        self.pool.pages, self.slots = self.pool.pages.to(device), self.slots.to(device)

    def row(self, request: int, length: int) -> torch.Tensor:
        """Slots of the first ``length`` tokens, on the CPU."""
        return self.slots[request + 1, :length].long().cpu()


def backend(requests: Requests, report: Report) -> Any:
    """SGLang's DSA backend over a runner of our own."""
    pool = SimpleNamespace(
        dsa_kv_cache_store_fp8=False,
        kv_cache_dim=576,
        dtype=torch.bfloat16,
        size=1 << 20,
        page_size=64,
    )
    hf_config = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"], index_topk=TOPK)
    config = SimpleNamespace(
        hf_config=hf_config,
        hf_text_config=hf_config,
        context_len=CONTEXT,
        num_attention_heads=64,
        qk_nope_head_dim=192,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    runner = SimpleNamespace(
        device=report.device,
        page_size=PAGE_TOKENS,
        model_config=config,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=requests.slots, size=len(LENGTHS)),
        hisparse_coordinator=None,
        is_draft_worker=False,
        kv_cache_dtype=torch.bfloat16,
        max_running_requests=len(LENGTHS),
    )
    made = need("sglang.srt.layers.attention.dsa_backend").DeepseekSparseAttnBackend(runner)
    made.set_dsa_prefill_impl = lambda *_: None  # sparse whatever the length
    made.speculative_num_draft_tokens = DRAFT
    return made


def batch(mode: str, device: str) -> Any:
    """What SGLang's scheduler says of the requests; in MTP their drafts come on top."""
    module = need("sglang.srt.model_executor.forward_batch_info")
    lengths = torch.tensor(LENGTHS)
    extends = list(EXTENDS) if mode == "EXTEND" else None
    prefixes = [n - e for n, e in zip(LENGTHS, EXTENDS, strict=True)] if extends else None
    rows = len(rows_of(mode))
    return module.ForwardBatch(
        forward_mode=module.ForwardMode[mode],
        input_ids=torch.zeros(rows, dtype=torch.int64, device=device),
        out_cache_loc=torch.zeros(rows, dtype=torch.int64, device=device),
        batch_size=len(LENGTHS),
        seq_lens=lengths.to(device),
        seq_lens_cpu=lengths,
        seq_lens_sum=sum(LENGTHS),
        req_pool_indices=torch.arange(1, len(LENGTHS) + 1, device=device),
        extend_seq_lens_cpu=extends,
        extend_seq_lens=torch.tensor(extends, device=device) if extends else None,
        extend_prefix_lens_cpu=prefixes,
        extend_num_tokens=sum(extends or ()),
    )


def rows_of(mode: str) -> list[tuple[int, int]]:
    """Request and visible tokens of every query row."""
    if mode == "EXTEND":
        spans = [range(n - e + 1, n + 1) for n, e in zip(LENGTHS, EXTENDS, strict=True)]
    else:
        drafts = DRAFT if mode == "TARGET_VERIFY" else 0
        spans = [range(n + 1, n + drafts + 1) if drafts else range(n, n + 1) for n in LENGTHS]
    return [(request, length) for request, span in enumerate(spans) for length in span]


def compare(select: Callable[..., Any], mode: str, requests: Requests, report: Report) -> int:
    """One mode with one of our kernels; the rows compared.

    Raises:
        RefutedError: a row selects what is not among its best, or another request's.
    """
    ours = need("sglang_indexcache.serving.cuda.kernels")
    made, live = backend(requests, report), batch(mode, report.device)
    made.init_forward_metadata(live)
    metadata = made.get_indexer_metadata(0, live)
    phase = "prefill" if mode == "EXTEND" else "decode"
    expect(ours.mismatch(metadata, phase) is None, f"{mode}: {ours.mismatch(metadata, phase)}")
    rows = rows_of(mode)
    generator = torch.Generator().manual_seed(4)
    q, _ = quantize_e4m3(torch.randn(len(rows), HEADS, INDEX_DIM, generator=generator))
    weights = torch.randn(len(rows), HEADS, 1, generator=generator)
    run_ours = ours.select_prefill if mode == "EXTEND" else ours.select_decode
    with pool_in_use(requests.pool):
        chosen = run_ours(
            select,
            q.to(report.device),
            weights.to(report.device),
            requests.pool.pages,
            metadata,
            TOPK,
        )
    for number, (request, length) in enumerate(rows):
        slots = requests.row(request, length)
        logits = (weights[number] * (q[number].double() @ requests.keys[slots].T).relu()).sum(0)
        listed = chosen[number].cpu()
        listed = listed[listed != PADDING].long()
        places = {slot: place for place, slot in enumerate(slots.tolist())}
        found = [places.get(slot) for slot in listed.tolist()]
        what = f"{mode}, request {request}, {length} tokens"
        if None in found or len(set(found)) != min(TOPK, length):
            raise RefutedError(f"{what}: {len(set(found) - {None})} of its own tokens selected")
        least = logits.topk(len(found)).values[-1] - TOLERANCE * logits.abs().max()
        expect((logits[found] >= least).all(), f"{what}: not the best tokens")
    return len(rows)


def capability(dry: bool) -> Any:
    """SGLang's backend asks torch for a GPU's, whatever the platform."""
    if not dry:
        return nullcontext()
    return mock.patch("torch.cuda.get_device_capability", return_value=(9, 0))


def settle_for_torch() -> None:
    """Where DeepGEMM does not load, SGLang plans its index logits in torch."""
    try:
        need("deep_gemm")
    except MissingError:
        os.environ["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"] = "1"


def run(report: Report) -> None:
    """Decode (and MTP's verification, on a GPU), then a prefill with prefixes."""
    decode = ("DECODE",) if report.dry else ("DECODE", "TARGET_VERIFY")
    if not report.dry:
        settle_for_torch()
    for claim, modes in zip(report.claims, (decode, ("EXTEND",)), strict=True):
        with report.claim(claim) as evidence, capability(report.dry):
            published(*(("--dsa-topk-backend", "torch") if report.dry else ()))
            requests, machine = Requests(report.device), Machine.here()
            names = ("reference",) if report.dry else ("cuda", "triton")
            able = [n for n in names if named(n).obstacle("select", machine) is None]
            if not able:
                raise MissingError(f"neither of {', '.join(names)} runs here")
            for name in able:
                select = named(name).load("select")
                for mode in modes:
                    rows = compare(select, mode, requests, report)
                    evidence[f"{name}, {mode}"] = f"{rows} rows"
