"""An SGLang with IndexCache over HTTP whose answers follow a formula, and that can go wrong.

What it reports comes from the serving code's own report. In a process of its own, to be killed:
python -m tests.fakes.server PORT LAYERS SECONDS
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from typing import Any, ClassVar

from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.protocol import PATTERN_OF_REQUEST, STATE
from tests.serving.plans import plan

PAGE = 16
"""Tokens of a page of its prefix cache."""

REFUSALS: dict[str, Any] = {
    "stops": ({}, 503),
    "out of memory": ({"error": "out of memory"}, 500),
    "garbage": ({"hello": "world"}, 200),
}
"""Faults that answer every prompt of a call alike."""

OF_AN_ANSWER: dict[str, dict[str, Any]] = {
    "cache": {"cached_tokens": 64},
    "retraction": {"num_retractions": 1},
    "abort": {"finish_reason": {"type": "abort", "message": "the input is too long"}},
    "nan stop": {"finish_reason": {"type": "stop", "matched": "NaN happened"}},
    "no end": {"finish_reason": None},
}
"""Faults that say something else in an answer's ``meta_info``."""


class Clock:
    """Time that passes only while a server works; the client of its streams reads it too.

    A client reads a clock when it asks and then at every chunk, which come in the order in which
    they were sent. So a reading is the moment when the chunk was sent, however late it was read.
    """

    def __init__(self) -> None:
        self.now, self.sent = 0.0, deque[float]()

    def __call__(self) -> float:
        """Return when the next chunk was sent; now, if none is under way."""
        return self.sent.popleft() if self.sent else self.now


@dataclass
class FakeServer:
    """State of a fake server, and what it does wrong.

    Attributes:
        pattern: of requests that name none.
        mode: of the plugin.
        really: what its layers do whatever is asked; "" if they obey.
        fault: of every call beyond the first ``after``: one of those above, or of the code below.
        faults: of the calls to come instead, one each: those, or a status.
        dp: data-parallel ranks, which all say the same.
        seconds: that a call takes.
        gathers: its first calls wait for each other until so many are under way.
        prefill: seconds a streamed prompt's token takes, and ``step`` one of the answer.
        indexer_share: of these, spent in indexers.
        spread: share of given answers that a pattern of S alone gets wrong besides, if prompts are
            longer than ``topk``; None if sharing only costs nats.
        level: share of given answers that are right without sharing.
        noise: share of them that are wrong by chance, anew on each call.
        api_key: what it wants on ordinary routes.
        admin_api_key: what it wants to be switched or flushed; without one, ``api_key``.
        role: its side of a disaggregated service.
        plugins: whether each rank has loaded the plugin; () if all have.
        launched: whether its launcher has.
        overrides: what its state says instead of what is so.
        info: what ``/server_info`` says besides.
        calls: of ``/generate`` so far; ``bodies`` are what they asked.
        most_at_once: calls that were under way together.
    """

    clock: ClassVar[Clock] = Clock()
    """Of the time that streams take; of all servers, so that one after the other must be asked."""

    pattern: str = "FFFF"
    mode: str = "static"
    really: str = ""
    fault: str = ""
    after: int = 0
    faults: list[str] = field(default_factory=list)
    dp: int = 1
    capacity: int = 4096
    seconds: float = 0.0
    gathers: int = 1
    prefill: float = 1e-5
    step: float = 2e-3
    indexer_share: float = 0.0
    spread: float | None = None
    level: float = 0.95
    noise: float = 0.0
    topk: int = 64
    api_key: str = ""
    admin_api_key: str = ""
    role: str = "null"
    plugins: tuple[bool, ...] = ()
    launched: bool = True
    overrides: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    most_at_once: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guard, self.counting = threading.Lock(), threading.Condition()
        self.under_way = 0
        self.chance = random.Random(5)
        self.restart()

    def restart(self) -> None:
        """Begin anew, with empty counters and caches and the pattern of its start."""
        self.process = ServingProcess(plan(self.pattern, mode=self.mode))
        self.cached: dict[str, list[tuple[int, ...]]] = {}

    # -- what it says of itself ----------------------------------------------------------------

    def rank(self, number: int) -> dict[str, Any]:
        about: dict[str, Any] = {"memory_usage": {"token_capacity": self.capacity}}
        if not self.plugins or self.plugins[number]:
            settings = {"pattern": self.pattern, "policy": self.pattern, "mode": self.mode}
            full = self.pattern.count("F")
            state = self.process.report(rank=number, index_k_bytes_per_token=132 * full)
            about[STATE] = state.model_copy(update=settings | self.overrides).to_json()
        if self.fault == "no report":
            about[STATE] = {"error": "KeyError: 'x'"}
        return about

    def server_info(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "dtype": "bfloat16",
            "model_path": "m",
            "max_req_input_len": 8186,
            "tp_size": self.dp,
            "dp_size": 1,  # as SGLang says under dp_attention
            "enable_dp_attention": self.dp > 1,
            "chunked_prefill_size": 512,
            "page_size": 64,
            "version": "0.5.23",
            "disaggregation_mode": self.role,
            "json_model_override_args": '{"indexcache": {}}' if self.launched else "{}",
            "internal_states": [self.rank(number) for number in range(self.dp)],
            "api_key": self.api_key,  # SGLang shows both keys to whoever has the first
            "admin_api_key": self.admin_api_key,
            "launch_command": f"--api-key {self.api_key} --admin-api-key {self.admin_api_key}",
            **self.info,
        }

    # -- what its layers do --------------------------------------------------------------------

    def count(self, pattern: str = "") -> None:
        """Count a forward under ``pattern``, or under the default."""
        self.process.counters.forwards += 1
        for layer, kind in enumerate(self.really or pattern or self.pattern):
            self.process.count_layer(layer, is_full=kind == "F")

    def spend(self, phase: str, seconds: float) -> None:
        self.clock.now += seconds
        share = self.indexer_share * seconds
        self.process.count_indexer_time(phase, share, share)

    # -- what it answers -----------------------------------------------------------------------

    def next_fault(self) -> str:
        """Return what goes wrong with the call that begins now."""
        self.calls += 1
        if self.faults:
            return self.faults.pop(0)
        return self.fault if self.calls > self.after else ""

    def reply(self, body: dict[str, Any], place: int, fault: str) -> dict[str, Any]:
        """Return the answer to one of a call's prompts."""
        ids, pattern = body["input_ids"][place], self.pattern_of(body, place, fault)
        if fault != "idle layers":
            self.count(pattern)
        start = body["logprob_start_len"][place] if "logprob_start_len" in body else len(ids)
        key = "" if fault == "one cache" else body.get("extra_key", [""] * (place + 1))[place]
        info = {
            "prompt_tokens": len(ids) - (fault == "truncation"),
            "cached_tokens": min(self._take_cached(key, ids), start) // PAGE * PAGE,
        }
        info |= self.answer_fields(pattern, fault)
        if "logprob_start_len" in body:
            obeyed = self.pattern if fault == "ignores" else pattern
            entries, rows = self.score(ids, start, obeyed, fault)
            info["input_token_logprobs"] = [[None, ids[start], None], *entries]
            info["input_top_logprobs"] = [None, *rows]
        return {"meta_info": info | OF_AN_ANSWER.get(fault, {}), "text": "", "output_ids": []}

    def pattern_of(self, body: dict[str, Any], place: int, fault: str) -> str:
        """Return the pattern under which it answers a prompt."""
        sampling = body["sampling_params"]
        parameters = sampling[place] if isinstance(sampling, list) else sampling
        name = (parameters.get("custom_params") or {}).get(PATTERN_OF_REQUEST)
        return str(name) if name and fault != "deaf to names" else self.pattern

    def answer_fields(self, pattern: str, fault: str) -> dict[str, Any]:
        return {} if fault == "names no pattern" else {PATTERN_OF_REQUEST: [pattern]}

    def score(self, ids: list[int], start: int, pattern: str, fault: str) -> tuple[list[Any], ...]:
        """Log-probabilities behind ``start``: sharing costs more on some tokens than on others."""
        if self.spread is not None:
            return self.answers(ids, start, pattern, fault)
        weights = [(i, (i * 7919 % 13 + 1) / 200) for i, kind in enumerate(pattern) if kind == "S"]
        flat, tilted = sum(w for _, w in weights), sum(w * (i % 3) / 10 for i, w in weights)
        losses = [1 + t % 7 / 7 + flat + tilted * (t % 5) for t in ids[start + 1 :]]
        entries = [[-x, t, None] for x, t in zip(losses, ids[start + 1 :], strict=True)]
        return entries, [[entry, [-1.5 - flat, 7, None]] for entry in entries]

    def answers(
        self, ids: list[int], start: int, pattern: str, fault: str
    ) -> tuple[list[Any], ...]:
        """Log-probabilities of a given answer, and the likeliest tokens beside it."""
        long, draw = len(ids) > self.topk, random.Random(f"{ids}")
        loses = (self.spread or 0.0) * pattern.count("S") / len(pattern) * long
        right = draw.random() < self.level and draw.random() >= loses
        right ^= fault == "control" and "S" in pattern
        right ^= self.chance.random() < self.noise
        shift = -0.001 * long * pattern.count("S") * random.Random(f"{ids[:9]}{ids[-9:]}").random()
        entries, rows = [], []
        for token in ids[start + 1 :]:
            sampled, second = (-0.2 + shift, -2.5) if right else (-2.5, -0.2 + shift)
            entries.append([sampled, token, None])
            rows.append(sorted([[sampled, token, None], [second, 7, None], [-6.0, 9, None]])[::-1])
        return entries, rows

    def _take_cached(self, key: str, ids: list[int]) -> int:
        """Count the first tokens of a prompt that were asked under this key before, and keep it."""
        cached = self.cached.setdefault(key, [])
        pairs = [zip(prefix, ids, strict=False) for prefix in cached]
        lengths = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zipped)) for zipped in pairs
        ]
        cached.append(tuple(ids))
        del cached[:-64]
        return max(lengths, default=0)

    def gather(self, more: int) -> None:
        """Count calls under way, and wait for those that shall begin together."""
        with self.counting:
            self.under_way += more
            self.most_at_once = max(self.most_at_once, self.under_way)
            self.counting.notify_all()
            self.counting.wait_for(lambda: self.most_at_once >= self.gathers, 30.0)


class Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the chunks of a stream arrive in lumps
    wbufsize = -1  # headers and body in one packet

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.fake
        if not self._may():
            return
        if fake.faults[:1] == ["deaf"]:
            fake.faults.pop(0)
            self._answer({}, 503)
        elif fake.fault == "stops" and fake.calls > fake.after:
            self._answer({}, 503)
        else:
            with fake.guard:
                self._answer(fake.server_info() if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if not self._may():
            return
        if self.path == "/set_internal_state":
            self.fake.pattern = next(iter(body["server_args"])).partition("=")[2]
            self._answer([True])
        elif self.path != "/generate":
            self._answer({})
        elif body.get("stream"):
            self._stream(body, self.fake.next_fault())
        else:
            self._generate(body)

    def _may(self) -> bool:
        """Apply the rules of ``sglang.srt.utils.auth``, or of a proxy that forbids everything."""
        key = self.fake.api_key
        if self.path.startswith(("/set_internal_state", "/flush_cache")):
            key = self.fake.admin_api_key or key
        if self.fake.fault == "forbidden":
            self._answer({"error": "Forbidden"}, 403)
        elif (
            key
            and not self.path.startswith("/health")
            and self.headers["Authorization"] != f"Bearer {key}"
        ):
            self._answer({"error": "Unauthorized"}, 401)
        else:
            return True
        return False

    def _generate(self, body: dict[str, Any]) -> None:
        fake = self.fake
        fake.gather(1)
        with fake.guard:  # one batch after the other, as a card would
            fake.bodies.append(body)
            fault = fake.next_fault()
            if fault == "restart":
                fake.fault = ""
                fake.restart()
            if fault == "another checkpoint":
                fake.overrides["checkpoint_pattern"] = "F" + "S" * (len(fake.pattern) - 1)
            time.sleep(fake.seconds)
            replies = [fake.reply(body, n, fault) for n in range(len(body["input_ids"]))]
            fake.gather(-1)  # before the answer, which may be followed by a call
        if fault == "slow":
            time.sleep(1.0)
        if fault.isdigit():
            self._answer({"error": "a fault"}, int(fault))
        elif fault == "one context" and len(body["input_ids"][0]) % 4 == 0:
            self._answer({"error": "too hard"}, 500)
        elif fault in ("reset", "cut", "half json"):
            self._half(replies, with_length=fault != "half json", reset=fault == "reset")
        else:
            self._answer(*REFUSALS.get(fault, (replies,)))

    def _stream(self, body: dict[str, Any], fault: str) -> None:
        fake = self.fake
        pattern = fake.pattern_of(body, 0, fault)
        fake.count(pattern)
        if fault in REFUSALS:
            self._answer(*REFUSALS[fault])
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        prompts, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        fake.spend("prefill", fake.prefill * sum(map(len, prompts)))
        if fault == "early end" and count > 4:
            count = 3
        for token in [count] if fault == "one lump" else range(1, count + 1):
            for index, prompt in enumerate(prompts):
                reason = {"type": "length", "length": token} if token == count else None
                meta = {
                    "prompt_tokens": len(prompt) - (fault == "truncation"),
                    "cached_tokens": 0,
                    "completion_tokens": token,
                    "finish_reason": reason,
                    **fake.answer_fields(pattern, fault),
                    **(OF_AN_ANSWER.get(fault, {}) if reason else {}),
                }
                chunk = {"index": index, "meta_info": meta}
                if fault == "stream error":
                    chunk = {"error": {"message": "CUDA out of memory"}}
                fake.clock.sent.append(fake.clock.now)
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.flush()
            if fault == "death" and token == 2 and count > 4:
                self.connection.close()
                return
            fake.spend("decode", fake.step)
        self.wfile.write(b"data: [DONE]\n\n")

    def _half(self, data: Any, *, with_length: bool, reset: bool) -> None:
        text = json.dumps(data).encode()
        self.send_response(200)
        self.send_header(*(("Content-Length", str(len(text))) if with_length else ("X", "")))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text[: len(text) // 2])
        self.wfile.flush()
        if reset:
            now = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        self.close_connection = True

    def _answer(self, data: Any, status: int = 200) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def http_server(fake: FakeServer, port: int = 0) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (Handler,), {"fake": fake}))
    server.daemon_threads = True
    return server


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """Serve until the block ends; yield the URL."""
    server = http_server(fake)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    given_port, layers, given_seconds = sys.argv[1:]
    fake = FakeServer("F" * int(layers), "live", seconds=float(given_seconds))
    http_server(fake, int(given_port)).serve_forever()
