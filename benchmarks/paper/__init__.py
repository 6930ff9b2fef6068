"""Scripts for those tables and figures of the paper that one ``indexcache`` command does not make.

Each has a small form for a laptop (``--quick``) and, where the paper used a node, takes a model and
servers of your own. ``docs/reproducing.md`` is the map.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_indexcache.cli import app
from sglang_indexcache.lab.client.launch import Server
from sglang_indexcache.lab.demo import shipped_checkpoint

SMALL = shipped_checkpoint()
"""The small trained model, where none is named."""


def indexcache(*arguments: str | Path) -> None:
    """Print one ``indexcache`` command and run it in this process.

    Raises:
        SystemExit: it failed; it has told why.
    """
    words = [str(word) for word in arguments]
    print(f"$ indexcache {shlex.join(words)}", flush=True)
    try:
        app(words)
    except SystemExit as end:
        if end.code:
            raise


def repeated(option: str, values: list[str]) -> list[str]:
    """Return ``--option a --option b``."""
    return [word for value in values for word in (option, value)]


@contextmanager
def live_server(model: Path, log: Path) -> Iterator[str]:
    """Start a server on this machine's CPU in which each request has its own pattern."""
    arguments = [
        *("--model-path", str(model), "--attention-backend", "indexcache"),
        *("--indexcache-mode", "live", "--dtype", "float32", "--max-total-tokens", "16384"),
    ]
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as sockets:
        environment = {"TMPDIR": sockets, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        server = Server(arguments, log, env=environment)
        server.start()
        try:
            yield server.wait_until_ready().url
        finally:
            server.stop(1.0)
