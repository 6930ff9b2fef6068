"""A server that answers ``indexcache eval`` by the lean forward, on a CPU or a GPU.

It speaks the part of SGLang's protocol that an evaluation uses, as a server in live mode: a context
comes first and alone, then its questions with their answers, all behind the same key. The questions
of a context are computed with it in one forward, as branches that do not see each other.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax

from benchmarks.smollm2.lean import Lean, Tables
from sglang_indexcache import __version__
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.protocol import CUSTOM, PATTERN_OF_REQUEST, STATE, RankState

KEPT = 64
"""Contexts that are kept for their questions, the last ones."""


class Branched(Lean):
    """The lean forward over a context with questions behind it, each alone with the context."""

    def lay(self, context: Sequence[int], tails: Sequence[Sequence[int]]) -> torch.Tensor:
        """Lay tokens out for the next forward: the context, then one tail after the other.

        Returns:
            ``[T]`` int64 ids. Each tail's positions begin behind the context's.
        """
        spans = [range(len(context)), *(range(len(context), len(context) + len(t)) for t in tails)]
        self._positions = torch.tensor([p for span in spans for p in span], device=self.device)
        lengths = torch.tensor([len(span) for span in spans], device=self.device)
        self._branch = torch.arange(len(spans), device=self.device).repeat_interleave(lengths)
        return torch.tensor([*context, *(token for tail in tails for token in tail)])

    def rotation(self, length: int) -> Tables:
        """Return cosine and sine as without branches, by the positions laid out."""
        angles = self._positions[:length, None].float() * self.frequencies
        return angles.cos(), angles.sin()

    def causal(self, rows: slice) -> torch.Tensor:
        """Return ``[rows, S]`` bool without other branches' keys."""
        branch = self._branch[: rows.stop]
        return super().causal(rows) & ((branch == 0) | (branch == branch[rows, None]))


class Answers:
    """Contexts by their keys, and what layers did so far.

    Args:
        folder: of the checkpoint.
        dtype: of matrix products.
    """

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._model, self._folder = Branched(folder, dtype, device), folder
        self._longest = int(config["max_position_embeddings"])
        self._contexts: dict[str, list[int]] = {}
        self._guard = threading.Lock()
        on_cpu = self._model.device.type == "cpu"
        self._workers = ThreadPoolExecutor(
            (os.cpu_count() or 1) if on_cpu else 1,
            initializer=partial(torch.set_num_threads, 1) if on_cpu else None,
        )
        layers = self._model.layers
        full = "F" * layers
        self._state = RankState(
            version=__version__,
            **dict.fromkeys(("pattern", "policy", "checkpoint_pattern"), full),
            source="benchmarks.smollm2.answers",
            mode="live",
            architecture=config["architectures"][0],
            indexer_selections=[0] * layers,
            index_reuses=[0] * layers,
            index_key_writes=[0] * layers,
        )

    def server_info(self) -> dict[str, Any]:
        """Return what ``/server_info`` says: who computes, and the counters of layers."""
        return {
            "model_path": str(self._folder),
            "version": "benchmarks.smollm2.answers",
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": self._model.device.type,
            "max_req_input_len": self._longest,
            "internal_states": [{STATE: self._state.to_json()}],
        }

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Answer a call of ``/generate``: contexts, or questions behind contexts that are known.

        Raises:
            KeyError: a prompt without a key, or questions behind a key that no context came with.
        """
        keys, prompts = body["extra_key"], body["input_ids"]
        patterns = [p[CUSTOM][PATTERN_OF_REQUEST] for p in body["sampling_params"]]
        replies = [_reply(ids, pattern) for ids, pattern in zip(prompts, patterns, strict=True)]
        with self._guard:
            if not body.get("return_logprob"):
                self._contexts |= dict(zip(keys, prompts, strict=True))
                for key in list(self._contexts)[:-KEPT]:
                    del self._contexts[key]
                return replies
            scored = self._workers.map(partial(self._score, body, replies), dict.fromkeys(keys))
            for pattern in scored:
                self._count(pattern)
        return replies

    def _count(self, pattern: Pattern) -> None:
        state = self._state
        for layer in range(len(pattern)):
            counter = state.indexer_selections if pattern.is_full(layer) else state.index_reuses
            counter[layer] += 1
        self._state = state.model_copy(update={"forwards": state.forwards + 1})

    def _score(self, body: dict[str, Any], replies: list[dict[str, Any]], key: str) -> Pattern:
        """Write log-probabilities into the replies to a key's questions; return its pattern."""
        model = copy.copy(self._model)  # what lies in it is this key's
        places = [place for place, other in enumerate(body["extra_key"]) if other == key]
        context, top = self._contexts[key], int(body.get("top_logprobs_num", 0))
        prompts = [body["input_ids"][place] for place in places]
        pattern = Pattern(replies[places[0]]["meta_info"][PATTERN_OF_REQUEST][0])
        stream = self._forward(model, context, prompts, pattern)
        end = len(context)
        for place, prompt in zip(places, prompts, strict=True):
            begin, start = end - len(context), body["logprob_start_len"][place]
            end += len(prompt) - len(context)
            # In the layout a tail's token at position p stands at ``begin`` + p.
            asked = torch.tensor([p if p < len(context) else begin + p
                                  for p in range(start, len(prompt) - 1)])  # fmt: skip
            logprobs = log_softmax(model.logits(stream[asked]), -1).cpu()
            targets = prompt[start + 1 :]
            taken = logprobs[torch.arange(len(targets)), targets].tolist()
            best = logprobs.topk(max(top, 1))
            rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            entries = [[p, token, None] for p, token in zip(taken, targets, strict=True)]
            tops = [[[p, token, None] for p, token in zip(*row, strict=True)] for row in rows]
            replies[place]["meta_info"] |= {
                "cached_tokens": len(context),
                "input_token_logprobs": [[None, prompt[start], None], *entries],
                "input_top_logprobs": [None, *tops],
            }
        return pattern

    def _forward(
        self,
        model: Branched,
        context: list[int],
        prompts: Sequence[list[int]],
        pattern: Pattern,
    ) -> torch.Tensor:
        """Return the stream behind all layers."""
        if any(prompt[: len(context)] != context for prompt in prompts):
            raise KeyError("a question that does not begin with its key's context")
        ids = model.lay(context, [prompt[len(context) :] for prompt in prompts])
        return model.hidden(ids, pattern)


def _reply(ids: list[int], pattern: str) -> dict[str, Any]:
    info = {
        "prompt_tokens": len(ids),
        "cached_tokens": 0,
        "finish_reason": {"type": "length"},
        PATTERN_OF_REQUEST: [pattern],
    }
    return {"meta_info": info, "text": "", "output_ids": []}


class _Handler(BaseHTTPRequestHandler):
    answers: Answers
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(self.answers.server_info() if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        try:
            self._send(self.answers.generate(body) if self.path == "/generate" else {})
        except KeyError as error:
            self._send({"error": {"message": f"this server answers eval alone: {error}"}}, 400)

    def _send(self, data: Any, status: int = 200) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing of single requests."""


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """Serve on a free port until the block ends; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"answers": answers}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
