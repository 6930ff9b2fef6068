"""Check 4: index keys in SGLang's pages, as every path of its indexer writes them.

In live mode an S layer only stores its key, by another path than an F layer. If the two wrote other
bytes, a key's meaning would depend on the pattern under which it was written.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.card.claims import Report, expect, need
from benchmarks.card.engine import pool_in_use, published
from sglang_indexcache.kernels.contract import INDEX_DIM, PAGE_BYTES, PAGE_TOKENS
from sglang_indexcache.kernels.indexer.quantization import (
    hadamard,
    quantize_e4m3,
    read_pages,
    write_pages,
)

TOKENS, PAGES, HIDDEN, LORA, HEADS, ROPE = 150, 6, 256, 128, 32, 64
EPS = 1e-6
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
STORE = "sglang.kernels.ops.kvcache.dsa_fused_store_index_cache"
LEAST_COSINE = 0.998
"""Of a stored key with the exact one: e4m3 keeps three bits, another rotary style none of this."""


class Pool:
    """Pages of index keys with the two names that SGLang's indexer calls."""

    index_page_size = PAGE_TOKENS

    def __init__(self, device: str) -> None:
        self.pages = torch.full((PAGES, PAGE_BYTES), 0x55, dtype=torch.uint8, device=device)

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Every layer's pages are these."""
        return self.pages

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """SGLang's fallback where its kernels do not run."""
        write_pages(self.pages, loc, index_k, index_k_scale.flatten())


class Inputs:
    """Random hidden states and weights of one indexer."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        self.x, self.q_lora = draw(TOKENS, HIDDEN), draw(TOKENS, LORA)
        self.wk, self.gates = draw(INDEX_DIM, HIDDEN), draw(HEADS, HIDDEN)
        self.wq = draw(HEADS * INDEX_DIM, LORA)
        self.norm = draw(INDEX_DIM, dtype=torch.float32), draw(INDEX_DIM, dtype=torch.float32)
        slots = torch.randperm(PAGES * PAGE_TOKENS, generator=generator)[:TOKENS]
        self.slots = slots.to(device)
        self.positions = torch.randint(4000, (TOKENS,), generator=generator).to(device)


def indexer(inputs: Inputs, is_neox: bool, device: str, side: Any) -> Any:
    """SGLang's indexer around given weights, without a model's construction."""
    cls = need(INDEXER).Indexer
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    norm = need("sglang.srt.layers.layernorm").LayerNorm(INDEX_DIM, eps=EPS)
    norm.weight.data, norm.bias.data = inputs.norm
    rope = need("sglang.srt.layers.rotary_embedding").get_rope(
        ROPE,
        rotary_dim=ROPE,
        max_position=4096,
        base=10000,
        is_neox_style=is_neox,
        dtype=torch.bfloat16,  # the default while SGLang builds a model
    )

    def linear(weight: torch.Tensor) -> Any:
        return lambda x: (x @ weight.T, None)

    vars(made).update(
        head_dim=INDEX_DIM,
        rope_head_dim=ROPE,
        n_heads=HEADS,
        softmax_scale=INDEX_DIM**-0.5,
        block_size=INDEX_DIM,
        scale_fmt="ue8m0",
        is_neox_style=is_neox,
        use_dsa_indexer_fusion=not is_neox,
        use_aiter_fused_fp8_writer=False,
        alt_stream=side,
        dsa_enable_prefill_cp=False,
        half_device_sm_count=64,
        wk=linear(inputs.wk),
        wq_b=linear(inputs.wq),
        wk_weights_proj=linear(torch.cat([inputs.wk, inputs.gates])),
    )
    made.k_norm, made.rotary_emb = norm.to(device), rope.to(device)
    return made


def stored(
    inputs: Inputs, is_neox: bool, key_only: bool, report: Report, side: Any
) -> torch.Tensor:
    """The pages after one layer's keys were stored by one of SGLang's paths."""
    module = need(INDEXER)
    mode = need("sglang.srt.model_executor.forward_batch_info").ForwardMode.DECODE
    act_quant = (
        quantize
        if report.dry
        else need("sglang.kernels.ops.quantization.act_quant_triton").act_quant
    )
    batch = SimpleNamespace(forward_mode=mode, out_cache_loc=inputs.slots, attn_cp_metadata=None)
    pool, layer = Pool(report.device), indexer(inputs, is_neox, report.device, side)
    cls = module.Indexer
    with pool_in_use(pool), torch.inference_mode():
        if key_only:
            cls._forward_cuda_k_only(
                layer, inputs.x, inputs.positions, batch, 0, act_quant, None, return_indices=False
            )
        elif is_neox:
            _, key, _ = cls._get_q_k_bf16(
                layer, inputs.q_lora, inputs.x, inputs.positions, False, forward_batch=batch
            )
            cls._store_index_k_cache(layer, batch, 0, key, act_quant=act_quant)
        else:
            cls._fused_q_prepare_and_store(
                layer, inputs.x, inputs.q_lora, inputs.positions, batch, 0, act_quant
            )
    return pool.pages


def exact_keys(inputs: Inputs, is_neox: bool) -> torch.Tensor:
    """``[TOKENS, 128]`` float32 on the CPU: the keys by their definition."""
    key = (inputs.x.cpu().float() @ inputs.wk.cpu().float().T).double()
    key = (key - key.mean(-1, keepdim=True)) / (
        key.var(-1, correction=0, keepdim=True) + EPS
    ).sqrt()
    weight, bias = (one.cpu().double() for one in inputs.norm)
    key = key * weight + bias
    powers = torch.arange(0, ROPE, 2).double() / ROPE
    angles = inputs.positions.cpu().double()[:, None] * 10000.0**-powers
    rope = key[:, :ROPE]
    first, second = rope.chunk(2, -1) if is_neox else (rope[:, ::2], rope[:, 1::2])
    turned = (
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
    )
    rope = torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(1)
    key = torch.cat([rope, key[:, ROPE:]], -1).float()
    return hadamard(key) if is_neox else key


def quantize(key: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for SGLang's ``act_quant``."""
    return quantize_e4m3(key)


@contextmanager
def kernels(dry: bool) -> Iterator[None]:
    """SGLang's kernels; what stands for them on a CPU."""
    if not dry:
        yield
        return

    def norm_rope_store(
        key: Any,
        pages: Any,
        slots: Any,
        weight: Any,
        bias: Any,
        eps: Any,
        cache: Any,
        positions: Any,
        _: Any,
    ) -> None:
        normed = torch.nn.functional.layer_norm(key.float(), (INDEX_DIM,), weight, bias, eps)
        cos, sin = cache[positions].float().chunk(2, -1)
        even, odd = normed[:, :ROPE:2], normed[:, 1:ROPE:2]
        rope = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(1)
        write_pages(pages, slots, *quantize_e4m3(torch.cat([rope, normed[:, ROPE:]], -1)))

    stubs = {
        "fused_k_indexer_norm_rope_store": norm_rope_store,
        "fused_q_indexer_rope_first_quant": lambda *_: (None, None),
        "can_use_dsa_fused_store": lambda *_: True,
        "rotate_activation": hadamard,
    }
    with ExitStack() as patches:
        for name, stub in stubs.items():
            patches.enter_context(mock.patch(f"{INDEXER}.{name}", stub, create=True))
        yield


def store_kernel(inputs: Inputs, report: Report) -> dict[str, Any]:
    """SGLang's quantising store against our reader's layout, byte for byte.

    Raises:
        RefutedError: other bytes.
    """
    keys = torch.cat([inputs.x[:, :INDEX_DIM], inputs.x[:5, :INDEX_DIM] * 1e-6])[-TOKENS:]
    wanted = Pool(report.device)
    write_pages(wanted.pages, inputs.slots, *quantize_e4m3(keys))
    got = Pool(report.device)
    if report.dry:
        got.set_index_k_scale_buffer(0, inputs.slots, *quantize_e4m3(keys))
    else:
        need(STORE).fused_store_index_k_cache(keys, got.pages, inputs.slots, PAGE_TOKENS)
    wrong = int((got.pages != wanted.pages).sum())
    expect(not wrong, f"{wrong} of {got.pages.numel()} bytes differ")
    return {"bytes compared": got.pages.numel()}


def run(report: Report) -> None:
    """Both rotary styles, full and key-only, with one stream and with two."""
    inputs = Inputs(report.device)
    with report.claim(report.claims[0]) as evidence, kernels(report.dry):
        published()
        for is_neox in (False, True):
            name = "neox (DeepSeek-V3.2)" if is_neox else "interleaved (GLM)"
            full = stored(inputs, is_neox, False, report, None)
            alone = stored(inputs, is_neox, True, report, None)
            wrong = int((full != alone).sum())
            expect(not wrong, f"{name}: {wrong} bytes differ")
            if not report.dry:
                both = stored(inputs, is_neox, False, report, torch.cuda.Stream())
                torch.cuda.synchronize()
                expect(torch.equal(both, alone), f"{name}: two streams give other bytes")
            values, scales = read_pages(full, inputs.slots, INDEX_DIM)
            key = values.float().cpu() * scales.cpu()[:, None]
            likeness = torch.cosine_similarity(key, exact_keys(inputs, is_neox), dim=-1)
            evidence[name] = {"least cosine with exact keys": float(likeness.min())}
            expect(likeness.min() > LEAST_COSINE, f"{name}: a key is not what it shall be")
    with report.claim(report.claims[1]) as evidence:
        evidence |= store_kernel(inputs, report)
