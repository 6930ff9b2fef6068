"""Questions for rehearsed servers, and judges of their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.pattern import Pattern
from tests.oracle import Answer, Oracle
from tests.rehearsal.checkpoint import ADAPTED_PATTERN, IN_BFLOAT16, LAYERS, MERGED, is_quantized
from tests.rehearsal.stage.kernels.quantized import from_groups, quantize_groups

QUARTER = ADAPTED_PATTERN
PATTERNS = [QUARTER, "F" * LAYERS, "FSFSFS", "FSSSSS"]
LENGTHS = [300, 260, 205, 330]
ANSWER = 6
EAGER = ("--disable-cuda-graph",)
DECODE = ("--cuda-graph-bs-decode", "1", "2", "4")
DECODE_GRAPHS = (*DECODE, "--disable-prefill-cuda-graph")


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, 900) for _ in range(length)]


def parameters(pattern: str | None, tokens: int = ANSWER) -> dict[str, Any]:
    custom = {"custom_params": {"indexcache_pattern": pattern}} if pattern else {}
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, **custom}


def ask(
    client: Client, *prompts: tuple[int, str | None], tokens: int = ANSWER
) -> list[list[tuple[float, int]]]:
    """Return the greedy answers to prompts of given lengths and patterns, as one request."""
    replies = client.generate(
        input_ids=[prompt(length) for length, _ in prompts],
        sampling_params=[parameters(pattern, tokens) for _, pattern in prompts],
        return_logprob=True,
    )
    return [
        [(logprob, token) for logprob, token, *_ in reply["meta_info"]["output_token_logprobs"]]
        for reply in replies
    ]


def alone_and_together(
    client: Client, prompts: Sequence[tuple[int, str | None]]
) -> tuple[list[Any], list[Any]]:
    """The answers to requests one by one, and in a batch; neither finds the other's prefixes."""
    client.flush_cache()
    together = ask(client, *prompts)
    client.flush_cache()
    return [ask(client, single)[0] for single in prompts], together


def behind_another_pattern_and_first(client: Client) -> tuple[list[Any], list[Any]]:
    """Ask under a pattern when another's prefix is cached, and when none is."""
    client.flush_cache()
    ask(client, (LENGTHS[0], PATTERNS[0]))
    behind = ask(client, (LENGTHS[0], PATTERNS[-1]))[0]
    client.flush_cache()
    return behind, ask(client, (LENGTHS[0], PATTERNS[-1]))[0]


def logprobs(client: Client, tokens: list[int], pattern: str | None) -> torch.Tensor:
    """Return ``[len(tokens) - 1]`` log-probabilities of given tokens, the first left out."""
    reply = client.generate(
        input_ids=tokens,
        sampling_params=parameters(pattern),
        return_logprob=True,
        logprob_start_len=0,
    )
    pairs = reply["meta_info"]["input_token_logprobs"][1:]
    return torch.tensor([logprob for logprob, *_ in pairs])


def _read(oracle: Oracle, tokens: tuple[int, ...], pattern: str) -> Answer:
    return oracle.answer(list(tokens), Pattern(pattern))


def _quantize_inputs(model: torch.nn.Module, is_fp8: Callable[[str], bool]) -> None:
    """Give the modules that ``is_fp8`` names their inputs in FP8, by groups of 128."""

    def quantize(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (from_groups(*quantize_groups(args[0])).to(args[0].dtype), *args[1:])

    for name, module in model.named_modules():
        if is_fp8(name):
            module.register_forward_pre_hook(quantize)


def _multiplies_fp8(name: str) -> bool:
    """Whether an FP8 checkpoint's module has its inputs in FP8.

    Of routed experts only the first product is found, for the second is inside their module.
    SGLang dequantises ``wk`` when it loads a model, and ``kv_b_proj`` for the absorbed form.
    """
    is_dequantized = name.endswith(("indexer.wk", "kv_b_proj"))
    return name.endswith(".experts") or (is_quantized(name + ".weight") and not is_dequantized)


def _reads_latents(name: str) -> bool:
    """Whether a module's input is what the KV cache holds."""
    return name.endswith("kv_b_proj")


class Judge:
    """transformers in float32 with the indexer's FP8, and how far its own bfloat16 is from that.

    Both take the weights as stored, and where an FP8 checkpoint or KV cache quantises, so do they.
    """

    def __init__(self, model: Path, fp8_kv: bool = False) -> None:
        has_fp8 = (model / IN_BFLOAT16).exists()
        model = next(
            (model / name for name in (IN_BFLOAT16, MERGED) if (model / name).exists()), model
        )

        def prepare(module: torch.nn.Module) -> None:
            if has_fp8:
                _quantize_inputs(module, _multiplies_fp8)
            if fp8_kv:
                _quantize_inputs(module, _reads_latents)

        exact, rounded = (
            Oracle(model, dtype, fp8_indexer=True) for dtype in (torch.float32, torch.bfloat16)
        )
        exact.prepare = rounded.prepare = prepare
        self._exact, self._rounded = (cache(partial(_read, oracle)) for oracle in (exact, rounded))

    def apart(self, measured: torch.Tensor, tokens: list[int], pattern: str) -> float:
        """The mean difference of log-probabilities of the last tokens from float32's, in nats."""
        exact = self._exact(tuple(tokens), pattern).logprobs[-len(measured) :]
        return float((measured - exact).abs().mean())

    def bound(self, count: int, tokens: list[int], pattern: str) -> float:
        """Twice what transformers' own bfloat16 is apart: SGLang rounds at other places."""
        rounded = self._rounded(tuple(tokens), pattern).logprobs[-count:]
        return 2 * self.apart(rounded, tokens, pattern)

    def check(self, measured: torch.Tensor, tokens: list[int], pattern: str) -> None:
        """Judge ``got`` ``[n]``, log-probabilities of the last ``n`` tokens as SGLang told them."""
        assert self.apart(measured, tokens, pattern) < self.bound(len(measured), tokens, pattern)

    def behind(self, count: int, tokens: list[int], pattern: str) -> float:
        """Return by how many nats the last ``count`` tokens are not the likeliest, in the mean."""
        return float(self._exact(tuple(tokens), pattern).behind[-count:].mean())

    def answers_apart(
        self, prompts: list[tuple[int, str]], answers: list[Any]
    ) -> tuple[float, float]:
        """Return how far answers are from one forward over prompt and answer, and the bound.

        One answer is a few tokens, so they are judged together.
        """
        apart = bound = 0.0
        for (length, pattern), answer in zip(prompts, answers, strict=True):
            tokens = prompt(length) + [token for _, token in answer]
            measured = torch.tensor([logprob for logprob, _ in answer])
            apart += self.apart(measured, tokens, pattern)
            bound += self.bound(len(measured), tokens, pattern)
        return apart, bound
