"""An SGLang with IndexCache whose answers follow a formula, and that can go wrong in every way.

The more layers share, the more answers are wrong; up to ``index_topk`` tokens none is. Prefixes are
cached in pages, apart for every ``extra_key``, as SGLang does it.
"""

from __future__ import annotations

import json
import random
import re
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_indexcache.evaluate.tasks.words import ADJECTIVES, NOUNS
from tests.fakes import state

LAYERS = 12
TOPK = 64
PAGE = 16


class Words:
    """A tokenizer of words, spaces and signs, the same in every process."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        del add_special_tokens  # it has none
        return {"input_ids": [[_id(piece) for piece in _pieces(one)] for one in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(_SEEN[i] for i in ids)

    def get_vocab(self) -> Mapping[str, int]:
        words = sorted({*ADJECTIVES, *NOUNS})
        return {f"\u0120{word}": place for place, word in enumerate(words)}


def _pieces(text: str) -> list[str]:
    return re.findall(r" ?\w+|\s|[^\w\s]", text)


_SEEN: dict[int, str] = {}


def _id(piece: str) -> int:
    number = zlib.crc32(piece.encode()) % (1 << 30) + 1
    _SEEN[number] = piece
    return number


HAYSTACK = "\n".join(f"line {n} says {n * 7919 % 997} of {n * 31 % 89}" for n in range(400))


@dataclass
class Fake:
    """The server.

    Attributes:
        fault: what is wrong with it; see :meth:`generate` and :class:`Handler`.
        after: calls of ``/generate`` that are still in order.
        mode: of the plugin.
        spread: share of answers that a pattern of S alone gets wrong besides.
        noise: share of answers that are wrong by chance, anew on each call.
        info: of ``/server_info`` besides.
    """

    fault: str = ""
    after: int = 0
    mode: str = "live"
    pattern: str = "F" * LAYERS
    spread: float = 0.9
    level: float = 0.95
    noise: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.guard = threading.Lock()
        self.calls = self.forwards = 0
        self.selections, self.reuses = [0] * LAYERS, [0] * LAYERS
        self.cache: dict[str, list[tuple[int, ...]]] = {}
        self.chance = random.Random(5)
        self.asked: list[dict[str, Any]] = []

    @property
    def faulty(self) -> bool:
        return bool(self.fault) and self.calls > self.after

    def server_info(self) -> dict[str, Any]:
        said = state(
            self.pattern,
            self.mode,
            forwards=self.forwards,
            indexer_selections=list(self.selections),
            index_reuses=list(self.reuses),
        )
        own = {"dtype": "bfloat16", "model_path": "m", "max_req_input_len": 8186}
        return {**own, **self.info, "internal_states": [{"indexcache": said.to_json()}]}

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls += 1
        self.asked.append(body)
        if self.faulty and self.fault == "restart":
            self.fault, self.forwards = "", 0
            self.selections, self.reuses = [0] * LAYERS, [0] * LAYERS
            self.cache.clear()
        replies = []
        for place, ids in enumerate(body["input_ids"]):
            parameters = body["sampling_params"][place]
            pattern = parameters.get("custom_params", {}).get("indexcache_pattern", self.pattern)
            replies.append(self._reply(body, place, ids, pattern))
        return replies

    def _reply(
        self,
        body: dict[str, Any],
        place: int,
        ids: list[int],
        pattern: str,
    ) -> dict[str, Any]:
        self.forwards += 1
        if not (self.faulty and self.fault == "idle layers"):
            for layer, kind in enumerate(pattern):
                (self.selections if kind == "F" else self.reuses)[layer] += 1
        key = "" if self.faulty and self.fault == "one cache" else body["extra_key"][place]
        start = body["logprob_start_len"][place] if "logprob_start_len" in body else len(ids)
        cached = min(self._cached(key, ids), start) // PAGE * PAGE
        read = len(ids) - 8 if self.faulty and self.fault == "truncates" else len(ids)
        info: dict[str, Any] = {"prompt_tokens": read, "cached_tokens": cached}
        told = self.pattern if self.faulty and self.fault == "ignores requests" else pattern
        if not (self.faulty and self.fault == "names no pattern"):
            info["indexcache_pattern"] = [told]
        if "logprob_start_len" in body:
            shown = "F" * LAYERS if self.faulty and self.fault == "ignores" else pattern
            self._score(info, ids, start, shown)
        return {"meta_info": info, "text": "", "output_ids": []}

    def _cached(self, key: str, ids: list[int]) -> int:
        kept = self.cache.setdefault(key, [])
        best = 0
        for other in kept:
            same = next(
                (n for n, (a, b) in enumerate(zip(other, ids, strict=False)) if a != b),
                min(len(other), len(ids)),
            )
            best = max(best, same)
        kept.append(tuple(ids))
        del kept[:-64]
        return best

    def _is_right(self, ids: list[int], pattern: str) -> bool:
        draw = random.Random(f"{ids}")
        loses = self.spread * pattern.count("S") / len(pattern) if len(ids) > TOPK else 0.0
        return draw.random() < self.level and draw.random() >= loses

    def _score(self, info: dict[str, Any], ids: list[int], start: int, pattern: str) -> None:
        draw = random.Random(f"{ids[:9]}{ids[-9:]}")
        right = self._is_right(ids, pattern)
        if self.faulty and self.fault == "control" and pattern.count("S"):
            right = not right
        if self.chance.random() < self.noise:
            right = not right
        shift = 0.0 if len(ids) <= TOPK else -0.001 * pattern.count("S") * draw.random()
        entries: list[Any] = [[None, ids[start], None]]
        rows: list[Any] = [None]
        for token in ids[start + 1 :]:
            own, other = (-0.2 + shift, -2.5) if right else (-2.5, -0.2 + shift)
            if self.faulty and self.fault == "nan":
                own = float("nan")
            told = token + 1 if self.faulty and self.fault == "other tokens" else token
            entries.append([own, told, None])
            rows.append(sorted([[own, token, None], [other, 7, None], [-6.0, 9, None]])[::-1])
        if self.faulty and self.fault == "nothing scored":
            entries, rows = entries[:1], rows[:1]
        info["input_token_logprobs"], info["input_top_logprobs"] = entries, rows


class Handler(BaseHTTPRequestHandler):
    fake: Fake
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        with self.fake.guard:
            if self.fake.faulty and self.fake.fault == "stops":
                self._answer({}, 503)
            elif self.path == "/health":
                self._answer({})
            elif self.fake.fault == "stranger":
                self._answer({}, 404)
            else:
                self._answer(self.fake.server_info())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        fake = self.fake
        with fake.guard:
            if fake.faulty and fake.fault == "stops":
                self._answer({}, 503)
            elif fake.fault == "one context" and len(body["input_ids"][0]) % 4 == 0:
                self._answer({"error": "too hard"}, 500)
            elif fake.faulty and fake.fault == "garbage":
                fake.calls += 1
                self._answer({"hello": "world"})
            elif fake.faulty and fake.fault == "list of garbage":
                fake.calls += 1
                self._answer([{"hello": "world"}] * len(body["input_ids"]))
            else:
                self._answer(fake.generate(body))

    def _answer(self, data: Any, status: int = 200) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """The server's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": fake}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
