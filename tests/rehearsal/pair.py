"""A server that prefills and one that decodes, asked as one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import free_port
from tests.rehearsal.conftest import Rehearse

_HERE = "127.0.0.1"


@contextmanager
def disaggregated(rehearse: Rehearse, *flags: str, **options: Any) -> Iterator[Pair]:
    """Yield two servers of the same flags, and what stands between them and a user."""
    port = free_port()
    prefill, decode = (
        (*flags, "--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(port))
        for role in ("prefill", "decode")
    )
    with rehearse(*prefill, **options) as first, rehearse(*decode, **options) as second:
        yield Pair(first, second, port)


class Pair(Client):
    """Two servers that both get each request, and meet over it by the number of a room."""

    def __init__(self, prefill: Client, decode: Client, port: int) -> None:
        super().__init__(decode.url)
        self._prefill, self._port = prefill, port
        self._rooms = itertools.count(1, 100)  # 0 stands for none

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        """Return the decoder's answer, with what the other said of the prompt."""
        meeting = {"bootstrap_host": _HERE, "bootstrap_port": self._port}
        body = {**body, **meeting, "bootstrap_room": next(self._rooms)}
        with ThreadPoolExecutor() as worker:
            prefilled = worker.submit(self._prefill.generate, timeout=timeout, **body)
            answer = super().generate(timeout=timeout, **body)
        if body.get("logprob_start_len") is not None:
            name = "input_token_logprobs"
            answer["meta_info"][name] = prefilled.result()["meta_info"][name]
        return answer

    def server_info(self) -> dict[str, Any]:
        """Return the decoder's, with the states of both."""
        first, second = self._prefill.server_info(), super().server_info()
        return second | {"internal_states": first["internal_states"] + second["internal_states"]}

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Empty both caches."""
        self._prefill.flush_cache(timeout)
        super().flush_cache(timeout)
