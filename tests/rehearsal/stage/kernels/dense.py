"""Norms, activations, small products and copies."""

from __future__ import annotations

import torch

from tests.rehearsal.stage.registry import reference


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm the last dimension by its root mean square, in float64."""
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@reference("flashinfer.norm:rmsnorm")
def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):  # type: ignore[no-untyped-def]
    """Norm the last dimension by its root mean square."""
    normed = rms(input, weight, eps).to(input.dtype)
    return normed if out is None else out.copy_(normed)


@reference("sgl_kernel.rmsnorm")
def rmsnorm_into(out, input, weight, eps, enable_pdl):  # type: ignore[no-untyped-def]
    """Write :func:`rmsnorm`, as SGLang has it done where flashinfer is missing."""
    rmsnorm(input, weight, eps, out)


@reference("flashinfer.norm:fused_add_rmsnorm", "sgl_kernel.fused_add_rmsnorm")
def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):  # type: ignore[no-untyped-def]
    """``residual += input``, then ``input`` is its norm; the sum is not rounded in between."""
    total = input.double() + residual.double()
    residual.copy_(total)
    input.copy_(rms(total, weight, eps))


@reference("flashinfer.norm:layernorm")
def layernorm(input, gemma, beta, eps=1e-6):  # type: ignore[no-untyped-def]
    """Norm of the last dimension, bfloat16 with float32 weights."""
    assert input.dtype == torch.bfloat16
    assert gemma.dtype == beta.dtype == torch.float32
    x = input.double()
    spread = x.var(-1, unbiased=False, keepdim=True)
    normed = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(spread + eps)
    return (normed * gemma.double() + beta.double()).to(input.dtype)


@reference("jit:hadamard_transform.run", "jit:hadamard.hadamard_transform")
def hadamard(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Write the Walsh-Hadamard transform of the last dimension, times ``scale``."""
    width, step = x.shape[-1], 1
    assert width & (width - 1) == 0, "the transform takes powers of two"
    y = x.double()
    while step < width:
        a, b = y.unflatten(-1, (width // (2 * step), 2, step)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    out.copy_(y * scale)


@reference("jit:activation.run_activation")
def run_activation(x: torch.Tensor, out: torch.Tensor, name: str) -> None:
    """Write ``silu(a) * b`` of the two halves of the last dimension."""
    gate, up = x.double().chunk(2, -1)
    act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[name.split("_")[0]]
    out.copy_(act(gate) * up)


@reference("jit:dsv3_fused_a_gemm.dsv3_fused_a_gemm")
def fused_a_gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``a @ b`` for few rows."""
    out.copy_(a.double() @ b.double())


@reference("jit:tiny_n_gemm.run", "jit:tiny_gemm.run")
def tiny_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``x @ weight.T`` for few rows."""
    out.copy_(x.double() @ weight.double().T)


@reference("jit:clamp_position.clamp_position")
def clamp_position(out: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Write the newest token's position of each sequence."""
    out.copy_((seq_lens - 1).clamp_min(0))


@reference("sgl_kernel:weak_ref_tensor")
def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory is a graph's; here it is kept by whoever has it."""
    return tensor
