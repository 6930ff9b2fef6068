"""One server for each feature that needs a card, each asked the same.

Alone or in a batch, an answer is the same; prompts and answers are those of transformers; and
a layer that is S in every pattern ran no indexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.pattern import Pattern
from tests.rehearsal import evidence
from tests.rehearsal.checkpoint import ADAPTER
from tests.rehearsal.conftest import Judges, Models, Rehearse
from tests.rehearsal.pair import disaggregated
from tests.rehearsal.questions import (
    DECODE,
    DECODE_GRAPHS,
    EAGER,
    LENGTHS,
    PATTERNS,
    QUARTER,
    Judge,
    alone_and_together,
    logprobs,
    prompt,
)

pytestmark = pytest.mark.matrix
LIVE = ("--indexcache-mode", "live")
TP_2 = ("--tp", "2")
FP8_KV = ("--kv-cache-dtype", "fp8_e4m3")
PREFILL_GRAPHS = (
    "--cuda-graph-backend-prefill",
    "breakable",
    "--cuda-graph-bs-prefill",
    "352",
    "1120",
)
MTP = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
    *("--speculative-draft-attention-backend", "indexcache"),
)
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "4"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    *("--max-total-tokens", "1024"),
)
DP_2 = (*TP_2, "--dp", "2", "--enable-dp-attention")
TP_4_DP_2 = ("--tp", "4", "--dp", "2", "--enable-dp-attention")
OVERLAP = (
    *("--enable-two-batch-overlap", "--moe-a2a-backend", "deepep", "--deepep-mode", "normal"),
    *("--moe-runner-backend", "deep_gemm"),
)
SPLIT = ("--indexcache-split-rows", "on")
OURS = ("--indexcache-kernels", "reference")
OURS_IN_GRAPHS = ("--indexcache-kernels", "cuda")
"""A card's, for which the stage has the references: graphs refuse those by their own name."""
PREFILL_CP = (*TP_2, "--attn-cp-size", "2", "--enable-prefill-cp", "--cp-strategy", "interleave")


@dataclass(frozen=True)
class Case:
    """A server.

    Attributes:
        name: what it rehearses.
        flags: beside the pattern's.
        is_pair: whether it is two servers, of which one prefills and one decodes.
        family: of its checkpoint.
        rehearses: features of SGLang, by their names in ``FEATURES`` of
            ``serving.operating.features``.
        variables: of the environment.
        shows: what tells that the feature was at work.
        same_chunks: whether a prompt is cut alike alone and in a batch. Where a chunk ends decides
            which of SGLang's two ways through attention its rows take, and they round differently.
        same_tokens: whether an answer's tokens are the same all the same. Where not, one is given
            the other's tokens, and their log-probabilities are compared.
        answers_judged: whether answers are held to the bound, not only prompts. DeepSeek-V3.2's
            noise is far from tame: transformers' own bfloat16 is 0.2 nats from float32, and six
            tokens an answer do not average that.
    """

    name: str
    flags: tuple[str, ...]
    shows: tuple[evidence.Evidence, ...]
    is_pair: bool = False
    family: str = "glm-5"
    rehearses: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    same_chunks: bool = True
    same_tokens: bool = True
    answers_judged: bool = True

    @property
    def is_live(self) -> bool:
        """Whether each request brings its pattern."""
        return set(LIVE) <= set(self.flags)

    @property
    def patterns(self) -> list[str]:
        """Patterns under which the requests are answered."""
        return list(PATTERNS) if self.is_live else [QUARTER] * len(LENGTHS)

    @property
    def asked(self) -> list[tuple[int, str | None]]:
        """The requests' lengths, and the patterns that they name."""
        patterns = self.patterns if self.is_live else [None] * len(LENGTHS)
        return list(zip(LENGTHS, patterns, strict=True))


CASES = [
    Case(
        "attention tensor parallelism",
        (*LIVE, *EAGER, *TP_2, "--moe-dense-tp-size", "1"),
        rehearses=("tensor parallelism",),
        shows=(evidence.mixed_forwards, evidence.switches),
    ),
    Case(
        "dp_attention",
        (*LIVE, *DP_2, *EAGER),
        rehearses=("dp_attention",),
        shows=(evidence.argument("attn_dp_size", 2), evidence.idle_ranks),
    ),
    Case(
        "dp_attention with graphs",
        (*DP_2, *DECODE_GRAPHS, "--enable-metrics"),
        rehearses=("dp_attention",),
        shows=(evidence.replays("decode_cuda_graph"), evidence.idle_ranks),
    ),
    Case(
        "dp_attention over four ranks",
        (*LIVE, *TP_4_DP_2, *EAGER),
        rehearses=("dp_attention", "tensor parallelism"),
        shows=(evidence.argument("attn_dp_size", 2), evidence.idle_ranks),
    ),
    Case(
        "row split",
        (*LIVE, *EAGER, *TP_2, *SPLIT),
        variables=(("SGLANG_DSA_TOPK_BROADCAST", "1"),),
        rehearses=("tensor parallelism",),
        shows=(evidence.mixed_forwards, evidence.split_rows),
    ),
    Case(
        "row split over FP8 in mixed batches",
        (
            *(*LIVE, *EAGER, *TP_2, *FP8_KV, *SPLIT),
            *("--enable-mixed-chunk", "--chunked-prefill-size", "128"),
        ),
        rehearses=("mixed batches", "FP8 KV cache"),
        same_chunks=False,
        same_tokens=False,
        # Split or not, two ranks round FP8 so that another pattern comes within a factor of two:
        # ``mixed_chunks`` tells patterns apart on one rank, above.
        shows=(evidence.mixed_forwards, evidence.split_rows),
    ),
    Case(
        "row split with prefill graphs",
        (*TP_2, *DECODE, *PREFILL_GRAPHS, "--enable-metrics", *SPLIT),
        variables=(("SGLANG_DSA_TOPK_BROADCAST", "1"),),
        rehearses=("CUDA graphs",),
        shows=(evidence.replays("prefill_cuda_graph"), evidence.split_rows),
    ),
    Case(
        "row split of our kernels",
        (*LIVE, *EAGER, *TP_4_DP_2, *SPLIT, *OURS),
        rehearses=("dp_attention",),
        shows=(evidence.kernels_of_ours, evidence.split_rows),
    ),
    Case(
        "prefill context parallelism",
        (*PREFILL_CP, *DECODE_GRAPHS),
        rehearses=("prefill context parallelism",),
        shows=(evidence.argument("attn_cp_size", 2),),
    ),
    Case(
        "chunked prefill",
        (*LIVE, *EAGER, "--chunked-prefill-size", "128"),
        rehearses=("chunked prefill",),
        same_chunks=False,
        shows=(evidence.argument("chunked_prefill_size", 128),),
    ),
    Case(
        "mixed batches",
        (*LIVE, *EAGER, "--enable-mixed-chunk", "--chunked-prefill-size", "128"),
        rehearses=("mixed batches",),
        same_chunks=False,
        same_tokens=False,
        shows=(evidence.mixed_forwards, evidence.mixed_chunks),
    ),
    Case(
        "mixed batches over FP8",
        (*LIVE, *EAGER, *FP8_KV, "--enable-mixed-chunk", "--chunked-prefill-size", "128"),
        rehearses=("mixed batches", "FP8 KV cache"),
        same_chunks=False,
        same_tokens=False,
        shows=(evidence.mixed_forwards, evidence.mixed_chunks),
    ),
    Case(
        "returned selections",
        (*DECODE_GRAPHS, "--enable-metrics", "--enable-return-indexer-topk"),
        variables=(("SGLANG_DSA_FUSE_TOPK", "0"),),
        rehearses=("returned selections", "CUDA graphs"),
        shows=(evidence.replays("decode_cuda_graph"), evidence.returned_selections),
    ),
    Case(
        "two-batch overlap",
        (*LIVE, *DP_2, *EAGER, *OVERLAP),
        rehearses=("two-batch overlap",),
        same_chunks=False,
        shows=(evidence.halves,),
    ),
    Case(
        "prefill graphs",
        (*DECODE, *PREFILL_GRAPHS, "--enable-metrics"),
        rehearses=("CUDA graphs",),
        shows=(evidence.replays("prefill_cuda_graph"),),
    ),
    Case(
        "MTP",
        (*DECODE_GRAPHS, *MTP),
        family="glm-5-mtp",
        rehearses=("MTP",),
        shows=(evidence.accepted_drafts,),
    ),
    Case(
        "HiCache",
        (*LIVE, *EAGER, *HICACHE),
        rehearses=("HiCache",),
        shows=(evidence.pages_from_the_host,),
    ),
    Case(
        "HiCache with graphs",
        (*DECODE_GRAPHS, *HICACHE),
        rehearses=("HiCache",),
        shows=(evidence.pages_from_the_host,),
    ),
    Case(
        "disaggregation",
        (*LIVE, *EAGER),
        is_pair=True,
        rehearses=("disaggregation",),
        shows=(evidence.argument("disaggregation_mode", "decode"),),
    ),
    Case(
        "pipeline parallelism",
        ("--pp-size", "2", *DECODE_GRAPHS),
        rehearses=("pipeline parallelism",),
        shows=(evidence.argument("pp_size", 2),),
    ),
    Case(
        "kernels of ours",
        (*LIVE, *EAGER, *OURS),
        shows=(evidence.kernels_of_ours,),
    ),
    Case(  # the draft's layer keeps SGLang's, so that a mutant has to show whose the target's are
        "MTP by kernels of ours",
        (*DECODE_GRAPHS, *MTP, *OURS_IN_GRAPHS),
        family="glm-5-mtp",
        rehearses=("MTP",),
        shows=(evidence.accepted_drafts,),
    ),
    Case(  # in prefill lists are offsets into gathered rows
        "kernels of ours over FP8",
        (
            *(*DECODE_GRAPHS, "--enable-metrics", *FP8_KV, *OURS_IN_GRAPHS),
            *("--dsa-prefill-backend", "flashmla_sparse"),
        ),
        rehearses=("FP8 KV cache", "CUDA graphs"),
        shows=(evidence.kernels_of_ours, evidence.replays("decode_cuda_graph")),
    ),
    Case(  # lists are positions, which SGLang maps to slots itself
        "selections of kernels of ours",
        (*DECODE_GRAPHS, "--enable-return-indexer-topk", *OURS_IN_GRAPHS),
        variables=(("SGLANG_DSA_FUSE_TOPK", "0"),),
        rehearses=("returned selections",),
        shows=(evidence.kernels_of_ours, evidence.returned_selections),
    ),
    Case(
        "kernels by measured rows",
        (
            *(*DECODE_GRAPHS, "--enable-metrics", "--indexcache-kernels", "auto:70"),
            *("--dsa-decode-backend", "flashmla_sparse"),
        ),
        shows=(evidence.kernels_by_rows, evidence.replays("decode_cuda_graph")),
    ),
    Case(
        "FP8 KV cache",
        (*LIVE, *EAGER, *FP8_KV),
        rehearses=("FP8 KV cache",),
        shows=(evidence.argument("kv_cache_dtype", "fp8_e4m3"),),
    ),
    Case(
        "FP8 weights",
        (*DECODE_GRAPHS, *FP8_KV),
        family="glm-5-fp8",
        rehearses=("FP8 weights", "FP8 KV cache"),
        shows=(evidence.argument("kv_cache_dtype", "fp8_e4m3"),),
    ),
    Case(
        "an adapter",
        EAGER,
        family="glm-5-adapted",
        shows=(evidence.adapter_served,),
    ),
    Case(
        "DeepSeek-V3.2",
        (*LIVE, *EAGER),
        family="deepseek-v3.2",
        shows=(evidence.mixed_forwards,),
        answers_judged=False,
    ),
    Case(  # SGLang's own padding ends at an assertion with them
        "20 heads",
        (*DECODE_GRAPHS, *FP8_KV, "--dsa-prefill-backend", "flashmla_sparse"),
        family="glm-5-20-heads",
        shows=(evidence.argument("dsa_prefill_backend", "flashmla_sparse"),),
    ),
]
IN_TEST_SERVER = {"radix cache", "overlap schedule", "tensor parallelism", "CUDA graphs"}
"""Rehearsed by ``test_server.py``: prefixes, SGLang's default schedule, and graphs of two ranks."""


@contextmanager
def serve_case(
    case: Case, rehearse: Rehearse, models: Models, mutant: str = ""
) -> Iterator[Client]:
    """Yield the server of a case, or the pair of servers."""
    adapter = models(case.family) / ADAPTER
    adapter_flag = ["--indexcache-adapter", str(adapter)] if adapter.exists() else []
    flags = ["--indexcache-pattern", QUARTER, *case.flags, *adapter_flag]
    start = partial(disaggregated, rehearse) if case.is_pair else rehearse
    with start(*flags, family=case.family, mutant=mutant, variables=case.variables) as client:
        yield client


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name.replace(" ", "_"))
def case(request: pytest.FixtureRequest) -> Case:
    parameter: Case = request.param
    return parameter


@pytest.fixture(scope="module")
def client(case: Case, rehearse: Rehearse, models: Models) -> Iterator[Client]:
    with serve_case(case, rehearse, models) as client:
        yield client


@pytest.fixture(scope="module")
def answers(case: Case, client: Client) -> tuple[list[Any], list[Any]]:
    return alone_and_together(client, case.asked)


def judge_of(case: Case, judges: Judges) -> Judge:
    return judges(case.family, set(FP8_KV) <= set(case.flags))


def tokens(answers: list[Any]) -> list[list[int]]:
    return [[token for _, token in answer] for answer in answers]


def test_an_answer_alone_is_the_same(
    case: Case, client: Client, judges: Judges, answers: tuple[list[Any], list[Any]]
) -> None:
    """It is to the bit, or to rounding where a batch decides the way of rows through attention."""
    alone, together = answers
    if case.same_tokens:
        assert alone == together if case.same_chunks else tokens(alone) == tokens(together)
        return
    judge, apart = judge_of(case, judges), 0.0
    for (length, pattern), answer in zip(case.asked, together, strict=True):
        ids = prompt(length) + [token for _, token in answer]
        rescored = logprobs(client, ids, pattern)[-len(answer) :]
        apart += float((rescored - torch.tensor([logprob for logprob, _ in answer])).abs().mean())
    under = list(zip(LENGTHS, case.patterns, strict=True))
    assert apart < judge.answers_apart(under, together)[1]


def test_prompts_and_answers_are_those_of_transformers(
    case: Case, client: Client, judges: Judges, answers: tuple[list[Any], list[Any]]
) -> None:
    judge = judge_of(case, judges)
    length, pattern = case.asked[-1]
    judge.check(logprobs(client, prompt(length), pattern), prompt(length), case.patterns[-1])
    if case.answers_judged:
        under = list(zip(LENGTHS, case.patterns, strict=True))
        apart, bound = judge.answers_apart(under, answers[1])
        assert apart < bound


def test_the_feature_was_at_work(
    case: Case, client: Client, models: Models, answers: tuple[list[Any], list[Any]]
) -> None:
    for check in case.shows:
        check(client, models(case.family))


def test_layers_that_are_shared_in_every_pattern_ran_no_indexer(
    case: Case, client: Client, answers: tuple[list[Any], list[Any]]
) -> None:
    full = {layer for pattern in case.patterns for layer in Pattern(pattern).full_layers}
    indexed_layers: set[int] = set()
    for state in client.server_info()["internal_states"]:
        runs = state["indexcache"]["indexer_selections"]
        indexed_layers |= {layer for layer, count in enumerate(runs) if count}
    assert indexed_layers
    assert indexed_layers <= full
