"""Check 8: a small model served end to end, and compared with stock SGLang token for token.

Three servers on the one card: ours in static mode, SGLang's own ``dsa`` with the same
``indexer_types``, and ours in live mode. What SGLang's start needs may be missing on a bare
machine, so several ways to serve are tried. None uses FlashAttention 3: it cannot be carried.
"""

import json
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.card.claims import MissingError, RefutedError, Report, expect, need
from benchmarks.card.engine import MODEL
from benchmarks.card.fake_server import FakeServer
from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.launch import Server
from sglang_indexcache.ask.protocol import RankState
from sglang_indexcache.errors import ServerError
from sglang_indexcache.pattern import Pattern

TOKENS = 24
START_SECONDS = 240
ENDED = "the server ended"
"""How our client says that a start failed rather than took too long."""
INDEX_K_BYTES = 132
COMMON = (
    *("--max-total-tokens", "32768", "--context-length", "8192", "--max-running-requests", "8"),
    *("--chunked-prefill-size", "2048", "--grammar-backend", "none", "--skip-server-warmup"),
    "--disable-radix-cache",
)
ON_A_CARD = ("--sampling-backend", "pytorch", "--mem-fraction-static", "0.5")
ENVIRONMENT = {
    # The carried sgl_kernel is older than SGLang asks for; pack.py says why.
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    # Dense attention of short prompts is FlashAttention 3's.
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
}
BFLOAT16 = ("--kv-cache-dtype", "bfloat16", "--dsa-decode-backend", "flashmla_sparse")


@dataclass(frozen=True)
class Way:
    """One way to serve; all servers of a comparison take the same."""

    name: str
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


WAYS = (
    Way("FP8 cache, flashmla_kv", ("--kv-cache-dtype", "fp8_e4m3")),
    Way("bfloat16 cache, flashmla_sparse", BFLOAT16),
    Way(
        "bfloat16 cache, flashmla_sparse, index logits and top-k in torch",
        (*BFLOAT16, "--dsa-topk-backend", "torch"),
        (("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1"),),
    ),
)
FITTING = {
    "num_hidden_layers": 6,
    "first_k_dense_replace": 6,
    "mlp_layer_types": ["dense"] * 6,
    "hidden_size": 512,
    "num_attention_heads": 64,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": 2048,
}
"""The widths that DSA's CUDA kernels are compiled for; the demo's checkpoint has others."""


@dataclass(frozen=True)
class Setting:
    """What is served here: a model, a pattern that shares, prompts on which selection matters."""

    model: Path
    pattern: Pattern
    prompts: list[list[int]]
    dry: bool

    def arguments(self, kind: str, way: Way) -> list[str]:
        """The command line of one of the three servers."""
        types = json.dumps({"indexer_types": self.pattern.to_indexer_types()})
        # On a CPU nothing but ours serves DSA: there the override alone says the pattern.
        backend = "dsa" if kind == "stock" and not self.dry else "indexcache"
        ours = ("--indexcache-pattern", str(self.pattern), "--indexcache-mode", kind)
        return [
            *("--model-path", str(self.model), "--attention-backend", backend, *COMMON),
            *(() if self.dry else ON_A_CARD),
            *way.flags,
            *(("--json-model-override-args", types) if kind == "stock" else ours),
        ]


def setting(report: Report, folder: Path) -> Setting:
    """The demo's checkpoint on a CPU, random weights of a fitting shape on a card."""
    if report.dry:
        model, pattern, lengths = MODEL, Pattern.uniform(12, 4), (200, 150, 40)
    else:
        from sglang_indexcache.demo.model import ModelSpec, make_model

        model, pattern, lengths = folder / "model", Pattern("FSSFSS"), (5000, 3001, 700)
        make_model(ModelSpec("glm-5", "small", vocab_size=512, overrides=FITTING), model)
    draw = random.Random(0)
    prompts = [[draw.randrange(10, 500) for _ in range(length)] for length in lengths]
    return Setting(model, pattern, prompts, report.dry)


def answers(client: Client, given: Setting) -> list[list[int]]:
    """Greedy tokens of every prompt, one request at a time so that batches are alike."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    replies = [client.generate(input_ids=ids, sampling_params=sampling) for ids in given.prompts]
    return [list(reply["output_ids"]) for reply in replies]


class Servers:
    """The three servers under one way to serve, started side by side.

    Attributes:
        problems: why a server is not there.
    """

    def __init__(self, given: Setting, way: Way, folder: Path, report: Report) -> None:
        self._stack = ExitStack()
        self.problems: dict[str, str] = {}
        self._clients: dict[str, Client] = {}
        real = report.servers or not report.dry
        started = {}
        for kind in ("static", "stock", "live"):
            log = folder / f"{kind}.log"
            env = {**ENVIRONMENT, **dict(way.environment)}
            server = (Server if real else FakeServer)(given.arguments(kind, way), log, env=env)
            started[kind] = self._stack.enter_context(server)
        for kind, server in started.items():
            try:
                ready = server.wait_until_ready(min(START_SECONDS, report.left() - 30))
                self._clients[kind] = ready
            except ServerError as error:
                self.problems[kind] = f"{str(error)[:100]} ... {str(error)[-1500:]}"

    def client(self, kind: str) -> Client:
        """One of them.

        Raises:
            MissingError: it did not start.
        """
        if kind not in self._clients:
            raise MissingError(f"the {kind} server did not start: {self.problems.get(kind)}")
        return self._clients[kind]

    def stop(self) -> None:
        """All of them."""
        self._stack.close()


def check_static(client: Client, given: Setting) -> dict[str, Any]:
    """It answers, and reports the pattern that it was given.

    Raises:
        RefutedError: it reports another, or layers did what the pattern does not say.
    """
    found = answers(client, given)
    expect(all(len(tokens) == TOKENS for tokens in found), "an answer is not of full length")
    state = client.states()[0]
    expect(state.pattern == str(given.pattern), f"it serves {state.pattern}")
    bytes_per_token = state.index_k_bytes_per_token
    full = len(given.pattern.full_layers)
    if not given.dry:  # a CPU may store wider keys
        expect(
            bytes_per_token == INDEX_K_BYTES * full,
            f"{bytes_per_token} bytes of index keys a token for {full} full layers",
        )
    check_counts(state, given.pattern)
    return {"index-K bytes a token": bytes_per_token, "forwards": state.forwards}


def check_counts(state: RankState, pattern: Pattern) -> None:
    """Indexers ran on F layers, and nowhere else.

    Raises:
        RefutedError: the counters say otherwise.
    """
    ran = [position for position, count in enumerate(state.indexer_selections) if count]
    expect(ran == list(pattern.full_layers), f"indexers ran on {ran}, not {pattern.full_layers}")


def check_tokens(ours: Client, stock: Client, given: Setting) -> dict[str, Any]:
    """The same tokens as stock SGLang's, wherever that agrees with itself.

    Raises:
        RefutedError: other tokens.
        MissingError: stock gives other tokens at every run, so nothing can be compared.
    """
    wanted, again, found = answers(stock, given), answers(stock, given), answers(ours, given)
    stable = [i for i, (one, other) in enumerate(zip(wanted, again, strict=True)) if one == other]
    if not stable:
        raise MissingError("stock SGLang answers every prompt otherwise when it is asked again")
    for number in stable:
        same = sum(a == b for a, b in zip(wanted[number], found[number], strict=True))
        if same != TOKENS:
            raise RefutedError(f"prompt {number}: {same} of {TOKENS} tokens are the same")
    return {"prompts compared": len(stable), "left out": len(wanted) - len(stable)}


def check_live(client: Client, given: Setting) -> dict[str, Any]:
    """It answers under the pattern, under all F after a switch, and again under the pattern.

    Raises:
        RefutedError: a switch did not do what it said, or the first answers do not come back.
    """
    first = answers(client, given)
    check_counts(client.states()[0], given.pattern)
    full = Pattern.full(len(given.pattern))
    state = client.switch_pattern(str(full))[0]
    expect(state.pattern == str(full), f"after the switch it serves {state.pattern}")
    other = answers(client, given)
    check_counts(client.states()[0], full)
    client.switch_pattern(str(given.pattern))
    client.flush_cache()  # KV of the first time would do, but a cached prompt has other kernels
    expect(answers(client, given) == first, "switched there and back, it answers otherwise")
    return {"switches": client.states()[0].switches, "all F answers otherwise": other != first}


def run(report: Report) -> None:
    """Find a way to serve, then compare."""
    if report.servers or not report.dry:
        need("sglang")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        given = setting(report, folder)
        servers, tried = None, {}
        for way in WAYS if not report.dry else (Way("the CPU platform"),):
            if servers:
                servers.stop()
            servers = Servers(given, way, folder, report)
            tried[way.name] = servers.problems
            if "static" not in servers.problems:
                break
        assert servers is not None
        try:
            decide(report, servers, given, tried)
        finally:
            servers.stop()


def decide(report: Report, servers: Servers, given: Setting, tried: dict[str, Any]) -> None:
    """The three claims, each on its own."""
    with report.claim(report.claims[0]) as evidence:
        evidence["ways tried"] = tried
        ended = ENDED in servers.problems.get("static", "")
        if ended and "stock" not in servers.problems:
            raise RefutedError(f"stock starts, ours does not: {servers.problems['static'][-600:]}")
        evidence |= check_static(servers.client("static"), given)
    with report.claim(report.claims[1]) as evidence:
        evidence |= check_tokens(servers.client("static"), servers.client("stock"), given)
    with report.claim(report.claims[2]) as evidence:
        evidence |= check_live(servers.client("live"), given)
