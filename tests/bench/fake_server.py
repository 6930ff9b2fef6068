"""An HTTP server that answers as SGLang with IndexCache does, and misbehaves on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_indexcache.ask.protocol import PATTERN_OF_REQUEST as NAME
from tests.fakes import state


@dataclass
class Behaviour:
    """What the server is and what it does wrong.

    Attributes:
        pattern: what it says that it serves.
        really: what its layers do; the same unless it lies.
        prefill: seconds a prompt token.
        step: seconds a decode step.
        fault: "", or one of the faults of :class:`Handler`.
        version: of the plugin.
        role: its side of a disaggregated service.
        plugins: whether each data-parallel rank has loaded the plugin; () if all have.
        launched: whether its launcher has.
        api_key: what it wants on ordinary routes.
        admin_api_key: what it wants to be switched or flushed; without one, ``api_key``.
    """

    pattern: str
    really: str = ""
    prefill: float = 1e-5
    step: float = 2e-3
    capacity: int = 4096
    dp: int = 1
    mode: str = "static"
    architecture: str = "GlmMoeDsaForCausalLM"
    fault: str = ""
    version: str = "0.1.0"
    role: str = "null"
    plugins: tuple[bool, ...] = ()
    launched: bool = True
    api_key: str = ""
    admin_api_key: str = ""
    indexer_share: float = 0.0
    requests: int = 0
    runs: list[int] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})

    def __post_init__(self) -> None:
        self.really = self.really or self.pattern
        self.runs = [0] * len(self.pattern)
        self.reuses = [0] * len(self.pattern)

    def switch(self, pattern: str) -> None:
        self.pattern = self.really = pattern

    def serve(self, name: str | None) -> str:
        """Count what the layers do for a request that names a pattern, or none; what it tells."""
        if self.fault == "deaf to names":
            name = None
        self.count(name)
        return name or self.pattern

    def count(self, name: str | None = None) -> None:
        self.requests += 1
        for layer, kind in enumerate(name or self.really):
            (self.runs if kind == "F" else self.reuses)[layer] += 1

    def rank(self, number: int) -> dict[str, Any]:
        state = self.state()
        if self.plugins and not self.plugins[number]:
            del state["indexcache"]
        if self.fault == "no report":
            state["indexcache"] = {"error": "KeyError: 'x'"}
        return state

    def state(self) -> dict[str, Any]:
        said = state(
            self.pattern,
            self.mode,
            architecture=self.architecture,
            version=self.version,
            forwards=self.requests,
            indexer_selections=list(self.runs),
            index_reuses=list(self.reuses),
            index_k_bytes_per_token=132 * self.pattern.count("F"),
            indexer_seconds=self.spent | {f"{k}_processor": v for k, v in self.spent.items()},
        )
        indexcache = said.to_json()
        return {"memory_usage": {"token_capacity": self.capacity}, "indexcache": indexcache}


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the chunks arrive in lumps

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._may():
            return
        info = {
            "device": "cpu",
            "tp_size": self.behaviour.dp,
            "dp_size": 1,  # as SGLang says under dp_attention
            "enable_dp_attention": self.behaviour.dp > 1,
            "chunked_prefill_size": 512,
            "page_size": 64,
            "version": "0.5.23",
            "disaggregation_mode": self.behaviour.role,
            "json_model_override_args": '{"indexcache": {}}' if self.behaviour.launched else "{}",
            "internal_states": [self.behaviour.rank(i) for i in range(self.behaviour.dp)],
        }
        self._reply(200, info if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if not self._may():
            return
        if self.path == "/set_internal_state":
            [key] = body["server_args"]
            self.behaviour.switch(key.partition("=")[2])
            self._reply(200, [True])
        elif self.path == "/generate":
            self._generate(body)
        else:
            self._reply(200, {})

    def _may(self) -> bool:
        """The rules of ``sglang.srt.utils.auth``, and of a proxy that forbids everything."""
        me = self.behaviour
        wanted = me.api_key
        if self.path.startswith(("/set_internal_state", "/flush_cache")):
            wanted = me.admin_api_key or wanted
        if self.path.startswith("/health"):
            wanted = ""
        if me.fault == "forbidden":
            self._reply(403, {"error": "Forbidden"})
        elif wanted and self.headers["Authorization"] != f"Bearer {wanted}":
            self._reply(401, {"error": "Unauthorized"})
        else:
            return True
        return False

    def _generate(self, body: dict[str, Any]) -> None:
        me = self.behaviour
        self.told = me.serve(body["sampling_params"].get("custom_params", {}).get(NAME))
        if me.fault == "status":
            self._reply(500, {"error": "out of memory"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        prompts, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        seconds = me.prefill * sum(map(len, prompts))
        time.sleep(seconds)
        me.spent["prefill"] += me.indexer_share * seconds
        if me.fault == "early end" and count > 4:
            count = 3
        for token in [count] if me.fault == "one lump" else range(1, count + 1):
            for index, prompt in enumerate(prompts):
                self._chunk(index, prompt, token, token == count)
            if me.fault == "death" and token == 2 and count > 4:
                self.connection.close()
                return
            time.sleep(me.step)
            me.spent["decode"] += me.indexer_share * me.step
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(self, index: int, prompt: list[int], token: int, is_last: bool) -> None:
        fault = self.behaviour.fault
        reason: dict[str, Any] | None = {"type": "length", "length": token} if is_last else None
        if fault == "abort" and is_last:
            reason = {"type": "abort", "message": "the input is too long"}
        if fault == "no end":
            reason = None
        if fault == "nan" and is_last:
            reason = {"type": "stop", "matched": "NaN happened"}
        meta = {
            "prompt_tokens": len(prompt) - (fault == "truncation"),
            "cached_tokens": 64 if fault == "cache" else 0,
            "completion_tokens": token,
            "finish_reason": reason,
            "num_retractions": int(fault == "retraction"),
            NAME: [self.told],
        }
        data = {"index": index, "meta_info": meta}
        if fault == "stream error":
            data = {"error": {"message": "CUDA out of memory"}}
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def _reply(self, status: int, data: Any) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def fake_server(behaviour: Behaviour) -> Iterator[str]:
    """The server's URL."""
    handler = type("Bound", (Handler,), {"behaviour": behaviour})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
