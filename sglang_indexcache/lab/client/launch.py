"""Start and stop a real SGLang server from Python: for the demo, tests and benchmarks.

The server has its own process group and dies with its parent, however the parent dies: on Linux the
kernel sends the signal, so nothing is left behind even after kill -9.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client

_MODULE = "sglang.launch_server"
_PR_SET_PDEATHSIG = 1
_PORTS = range(12_000, 22_000)  # SGLang draws its own from 22,000 on
_PORT_TAKEN = "address already in use"
_claims: list[socket.socket] = []


class Server:
    """One ``python -m sglang.launch_server`` process; use it as a context manager."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        self.log = log
        self.command = [
            *(sys.executable, "-m", _MODULE),
            *arguments,
            *("--port", str(self.port)),
        ]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.client = Client(f"http://127.0.0.1:{self.port}")

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server's main process."""
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process.pid

    def start(self) -> None:
        """Start the process and return at once."""
        if _MODULE in self.command and find_spec("sglang") is None:
            raise ModuleNotFoundError("SGLang is not installed", name="sglang")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def wait_until_ready(self, timeout: float = 600.0) -> Client:
        """Wait until the server answers.

        Raises:
            ServerError: the server died or took too long; the message has the end of its log.
        """
        started = time.monotonic()
        while time.monotonic() - started < timeout:
            if self._process is None or self._process.poll() is not None:
                code = None if self._process is None else self._process.returncode
                raise ServerError(f"the server ended with exit code {code}:\n{self.log_tail()}")
            if _PORT_TAKEN in self.log_tail():
                # SGLang would not end, and the other process on the port would answer in its place.
                self.stop()
                raise ServerError(f"port {self.port} is in use; give the server another one")
            if self.client.is_ready():
                return self.client
            time.sleep(0.5)
        self.stop()
        raise ServerError(f"the server was not ready after {timeout:.0f} s:\n{self.log_tail()}")

    def wait(self, timeout: float) -> int:
        """Wait until the process ends by itself, and return its exit code."""
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process.wait(timeout)

    def stop(self, grace: float = 20.0) -> None:
        """Stop the whole process group; safe to call twice.

        SGLang gets ``grace`` seconds to finish running requests and end its processes; 0 kills at
        once.
        """
        if self._process is None:
            return
        if grace:
            # Signal only the first process: SGLang takes a signal to its other processes for a
            # crash, and waits for them to settle.
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of the server's log, with very long lines (arguments) shortened."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(line[:500] for line in text.splitlines()[-lines:])


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """Return a port that is free now, and that nothing is likely to take before it is used.

    No outgoing connection gets it, nor does any process that asks this function while this process
    lives: a server of gigabytes listens minutes after it is given its port.
    """
    # Not from the seeded generator: processes with the same seed would all try the same ports at
    # once.
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                _claim(port)
            except OSError:
                continue
        return port
    raise ServerError(f"found no free port from {_PORTS.start} to {_PORTS.stop - 1}")


def _claim(port: int) -> None:
    """Hold a name for ``port`` until this process ends; on Linux only.

    Such a name belongs to a network namespace, as ports do, and goes with its process.

    Raises:
        OSError: a process holds it.
    """
    if sys.platform == "linux":
        _claims.append(socket.socket(socket.AF_UNIX))
        _claims[-1].bind(f"\0sglang-indexcache-port-{port}")
