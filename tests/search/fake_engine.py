"""A server in live mode whose losses follow a formula: in this process, or one to be killed.

python -m tests.search.fake_engine PORT LAYERS SECONDS
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_indexcache.ask.protocol import PATTERN_OF_REQUEST
from tests.fakes import state


@dataclass
class Engine:
    """What SGLang with IndexCache would say.

    Attributes:
        layers: length of its pattern.
        seconds: that a call takes.
        mode: of the plugin.
        checkpoint_pattern: which layers have an indexer; all by default.
        faults: what goes wrong with the calls to come, one each; see :class:`Handler`.
        facts: what else ``/server_info`` says.
        gathers: its first calls wait for each other until so many are under way.
        calls: how many it was asked to score.
        most_at_once: of those that were under way together.
        priorities: that the calls named.
    """

    layers: int
    seconds: float = 0.0
    mode: str = "live"
    checkpoint_pattern: str = ""
    faults: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    gathers: int = 1
    calls: int = 0
    most_at_once: int = 0
    priorities: set[int | None] = field(default_factory=set)
    pattern: str = ""

    def __post_init__(self) -> None:
        self.checkpoint_pattern = self.checkpoint_pattern or "F" * self.layers
        self.pattern = "F" * self.layers
        self.guard = threading.Lock()
        self.counting = threading.Condition()
        self.under_way = 0

    def state(self) -> dict[str, Any]:
        own = self.checkpoint_pattern
        return state(self.pattern, self.mode, checkpoint_pattern=own).to_json()

    def count(self, more: int) -> None:
        with self.counting:
            self.under_way += more
            self.most_at_once = max(self.most_at_once, self.under_way)
            self.counting.notify_all()
            self.counting.wait_for(lambda: self.most_at_once >= self.gathers, 30.0)

    def restart(self) -> None:
        self.pattern = "F" * self.layers

    def reply(self, ids: list[int], pattern: str) -> dict[str, Any]:
        """A layer that shares costs more on some tokens than on others."""
        shared = [layer for layer, kind in enumerate(pattern) if kind == "S"]
        weights = [(layer * 7919 % 13 + 1) / 200 for layer in shared]
        flat, tilted = (
            sum(weights),
            sum(w * (i % 3) / 10 for i, w in zip(shared, weights, strict=True)),
        )
        losses = [1 + t % 7 / 7 + flat + tilted * (t % 5) for t in ids]
        entries = [[-loss, t, None] for loss, t in zip(losses, ids, strict=True)]
        entries[0][0] = None
        said = {"input_token_logprobs": entries, "cached_tokens": 0, "prompt_tokens": len(ids)}
        return {"meta_info": {**said, PATTERN_OF_REQUEST: [pattern]}}


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.engine.faults[:1] == ["deaf"]:
            self.engine.faults.pop(0)
            self._answer({}, 503)
        else:
            states = [{"indexcache": self.engine.state()}]
            self._answer({**self.engine.facts, "internal_states": states})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.engine.count(1)
        with self.engine.guard:  # one batch after the other, as a card would
            self.engine.calls += 1
            self.engine.priorities.add(body.get("priority"))
            fault = self.engine.faults.pop(0) if self.engine.faults else ""
            time.sleep(self.engine.seconds)
            self.engine.count(-1)  # before the answer, which may be followed by a call
        self._score(body, fault)

    def _score(self, body: dict[str, Any], fault: str) -> None:
        pattern = body["sampling_params"][0]["custom_params"][PATTERN_OF_REQUEST]
        replies = [self.engine.reply(ids, pattern) for ids in body["input_ids"]]
        if fault.isdigit():
            self._answer({"error": "a fault"}, int(fault))
        elif fault == "slow":
            time.sleep(1.0)
        elif fault in ("reset", "cut"):
            self._half(replies, with_length=True, reset=fault == "reset")
        elif fault == "half json":
            self._half(replies, with_length=False, reset=False)
        elif fault == "abort":
            replies[-1]["meta_info"]["finish_reason"] = {"type": "abort", "message": "shut down"}
            self._answer(replies)
        else:
            if fault == "restart":
                self.engine.restart()
            if fault == "another checkpoint":
                self.engine.restart()
                self.engine.checkpoint_pattern = "F" + "S" * (self.engine.layers - 1)
            if fault == "another pattern":
                replies = [self.engine.reply(ids, self.engine.pattern) for ids in body["input_ids"]]
            self._answer(replies)

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


def http_server(engine: Engine, port: int = 0) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (Handler,), {"engine": engine}))
    server.daemon_threads = True
    return server


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The engine's URL."""
    server = http_server(engine)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    given_port, given_layers, given_seconds = sys.argv[1:]
    http_server(Engine(int(given_layers), float(given_seconds)), int(given_port)).serve_forever()
