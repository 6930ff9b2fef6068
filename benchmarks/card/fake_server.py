"""Stands for SGLang in a dry run of check 8: answers over HTTP, by a rule instead of a model."""

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import RankState
from sglang_indexcache.pattern import Pattern


class FakeServer:
    """As :class:`sglang_indexcache.ask.launch.Server`, in this process.

    Attributes:
        pattern: what its answers depend on; from the flags, or the override of stock SGLang.
    """

    def __init__(self, arguments: Sequence[str], log: Path, *, env: Any = None) -> None:
        given = dict(pairwise(arguments))
        override = json.loads(given.get("--json-model-override-args", "{}"))
        if types := override.get("indexer_types"):
            self.pattern = Pattern.from_indexer_types(types)
        else:
            self.pattern = Pattern(given["--indexcache-pattern"])
        self.switches = self.forwards = 0

    def __enter__(self) -> "FakeServer":
        handler = type("Bound", (Handler,), {"server_state": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def wait_until_ready(self, timeout: float) -> Client:
        """At once."""
        return Client(f"http://127.0.0.1:{self._http.server_port}")

    def tokens(self, ids: list[int], count: int) -> list[int]:
        """The answer to a prompt; another pattern gives another."""
        self.forwards += count
        seed = f"{ids} {self.pattern}"
        return [crc32(f"{seed} {number}".encode()) % 500 for number in range(count)]

    def switch(self, pattern: str) -> None:
        """As live mode does."""
        self.pattern, self.forwards = Pattern(pattern), 0
        self.switches += 1

    def state(self) -> dict[str, Any]:
        """What ``/server_info`` says of IndexCache."""
        is_full = [self.pattern.is_full(layer) for layer in range(len(self.pattern))]
        return RankState(
            version="0",
            pattern=str(self.pattern),
            policy=str(self.pattern),
            source="a dry run",
            mode="live",
            architecture="",
            checkpoint_pattern="F" * len(is_full),
            switches=self.switches,
            forwards=self.forwards,
            indexer_selections=[self.forwards * full for full in is_full],
            index_reuses=[self.forwards * (not full) for full in is_full],
            index_key_writes=[0] * len(is_full),
            index_k_bytes_per_token=132 * sum(is_full),
        ).to_json()


class Handler(BaseHTTPRequestHandler):
    """The routes that the check uses."""

    server_state: FakeServer

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """``/server_info``."""
        self._answer({"internal_states": [{"indexcache": self.server_state.state()}]})

    def do_POST(self) -> None:
        """``/generate``, ``/set_internal_state`` and ``/flush_cache``."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.path.startswith("/flush_cache"):
            self._answer({})
        elif self.path == "/set_internal_state":
            (key,) = body["server_args"]
            self.server_state.switch(key.partition("=")[2])
            self._answer([True])
        else:
            count = body["sampling_params"]["max_new_tokens"]
            self._answer({"output_ids": self.server_state.tokens(body["input_ids"], count)})

    def _answer(self, data: Any) -> None:
        text = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
