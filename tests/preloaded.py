"""Start SGLang servers by forking a process that has imported SGLang.

Each of a server's three or more processes needs ten seconds of a core to import what SGLang
imports, of about twelve until it is ready; tests start over a hundred servers. So a *template*
imports once and waits. ``PreloadedServer`` asks it for a fork, which runs ``sglang.launch_server``
as ``python -m`` would. Where that process lets multiprocessing spawn another, a companion that was
forked before anything ran gives a fork as clean as a new interpreter, reparented to who asked.

SGLang applies plugins to modules that are imported already, so the order does not matter to it;
tests of launching, stopping and of commands start servers as users do.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any, cast

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import Server, die_with_parent

PRELOADED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)
ROOT = Path(__file__).parents[1]
_PORT_TAKEN = re.compile("address already in use|port .*is used by a process", re.IGNORECASE)
_LONGEST_MESSAGE = 1 << 18
_MOST_DESCRIPTORS = 64
_PR_SET_CHILD_SUBREAPER = 36
_ABOVE_ALL = 512
"""Descriptors from here on are free while others are put in their places."""

Job = dict[str, Any]


class PreloadedServer(Server):
    """A server whose processes are forks of one that has imported SGLang.

    Args:
        late: of the environment, what may differ from the template's: nothing reads it while it is
            imported, or a fork reads it again.
    """

    def __init__(self, *args: Any, late: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late = late

    def start(self) -> None:
        forked = Template.of(self._env).fork(self.command[2:], self.log, environment=self._late)
        self._process = cast("subprocess.Popen[bytes]", forked)

    def wait_until_ready(self, timeout: float = 600.0) -> Client:
        """Wait as the parent does; start elsewhere once more if a port that it derived is taken.

        SGLang looks for free ports, or adds to the one it is given, long before it listens there.
        """
        try:
            return super().wait_until_ready(timeout)
        except ServerError:
            if not _PORT_TAKEN.search(self.log.read_text(errors="replace")):
                raise
        self.stop(grace=0)
        elsewhere = Server(self.command[3:-2], self.log)
        self.port, self.command, self.client = elsewhere.port, elsewhere.command, elsewhere.client
        self.start()
        return super().wait_until_ready(timeout)


class Template:
    """The process that has imported SGLang under one environment, seen from the tests."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                cwd=ROOT,
                preexec_fn=die_with_parent,
            )
        atexit.register(self._process.kill)

    @staticmethod
    def of(environment: Mapping[str, str]) -> Template:
        """Return the template of this environment, made when first asked for."""
        lasting = sorted({*environment} - {"PYTEST_CURRENT_TEST"})
        return _template(tuple((key, environment[key]) for key in lasting))

    def fork(
        self,
        arguments: Sequence[str],
        log: Path,
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> Forked:
        """``python -m MODULE ...`` of ``arguments`` in a session of its own, printing to ``log``.

        Args:
            environment: what differs from the template's, for variables that are read late.
        """
        job = {
            "module": arguments[0],
            "argv": list(arguments),
            "cwd": str(cwd),
            "environment": dict(environment or {}),
            "fds": [1, 2],
        }
        with log.open("wb") as output:
            pid = self.ask(job, output.fileno(), output.fileno())["pid"]
        return Forked(self, pid)

    def ask(self, job: Job, *descriptors: int) -> Job:
        socket.send_fds(self._requests, [json.dumps(job).encode()], descriptors)
        answer = self._requests.recv(_LONGEST_MESSAGE)
        if not answer:
            raise RuntimeError("the process that has imported SGLang ended")
        return dict(json.loads(answer))


@cache
def _template(environment: tuple[tuple[str, str], ...]) -> Template:
    return Template(dict(environment))


class Forked:
    """The part of ``subprocess.Popen`` that is used, for a process that is a template's child."""

    def __init__(self, template: Template, pid: int) -> None:
        self.template = template
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.template.ask({"wait": self.pid})["status"]
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked server", timeout)
            time.sleep(0.05)
        return status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


# ---- From here on: what runs in the template and in its forks.


def _wait_for_a_job(requests: socket.socket, *, adopted: bool) -> tuple[Job, list[int]]:
    """Fork for each request; returns in the forks only, with a job and the descriptors for it.

    Args:
        adopted: a fork becomes the child of the nearest ancestor that takes orphans.
    """
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _LONGEST_MESSAGE, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        job = json.loads(message)
        if "wait" in job:
            pid, status = os.waitpid(job["wait"], os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else None
            requests.send(json.dumps({"status": code}).encode())
            continue
        if child := _fork(requests, adopted=adopted):
            for descriptor in descriptors:
                os.close(descriptor)
            if not adopted:
                requests.send(json.dumps({"pid": child}).encode())
            continue
        requests.close()
        return job, descriptors


def _fork(requests: socket.socket, *, adopted: bool) -> int:
    """``os.fork``; if ``adopted``, by a process in between that ends: the fork tells its pid."""
    if not (child := os.fork()):
        if adopted:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            requests.send(json.dumps({"pid": os.getpid()}).encode())
        else:
            os.setsid()
            die_with_parent()
    elif adopted:
        os.waitpid(child, 0)
    return child


def _put_in_place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    for moved, number in zip([*map(_moved_up, descriptors)], numbers, strict=True):
        os.dup2(moved, number)
        os.close(moved)


def _moved_up(descriptor: int) -> int:
    """Return the same file, out of the way of the numbers that a job wants."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_ALL)
    os.close(descriptor)
    return moved


def _run(job: Job, descriptors: Sequence[int]) -> None:
    """Do what a new interpreter with these arguments and open files would do."""
    util.spawnv_passfds = _Companion(descriptors).spawn  # type: ignore[assignment]
    _put_in_place(descriptors, job["fds"])
    os.chdir(job["cwd"])
    if "code" in job:
        os.environ.clear()
    os.environ.update(job["environment"])
    _read_environment_again()
    sys.argv = list(job["argv"])
    if "module" in job:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(job["code"], vars(main))


def _read_environment_again() -> None:
    """Set what SGLang's modules took from the environment when the template imported them."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import schedule_policy, scheduler

    schedule_policy.CLIP_MAX_NEW_TOKENS = envs.SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION.get()
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


class _Companion:
    """A fork that has run nothing yet, and gives more of its kind to the process that made it."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            ours.close()
            for descriptor in descriptors:  # who waits for the end of a pipe must not wait for us
                os.close(descriptor)
            _run(*_wait_for_a_job(theirs, adopted=True))
            sys.exit()
        theirs.close()
        self._requests = socket.socket(fileno=_moved_up(ours.detach()))

    def spawn(self, path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        """Replace ``multiprocessing.util.spawnv_passfds``: fork, and return the process id."""
        at = list(arguments).index("-c")
        files = [0, 1, 2, *descriptors]
        job = {
            "code": arguments[at + 1],
            "argv": ["-c", *arguments[at + 2 :]],
            "cwd": os.getcwd(),
            "environment": dict(os.environ),
            "fds": files,
        }
        socket.send_fds(self._requests, [json.dumps(job).encode()], files)
        return int(json.loads(self._requests.recv(_LONGEST_MESSAGE))["pid"])


def main() -> None:
    """Run the template: import, then fork."""
    # What imports leave open must not have the numbers under which a fork is handed its files.
    low = [os.open(os.devnull, os.O_RDONLY) for _ in range(_ABOVE_ALL // 2)]
    for module in PRELOADED:
        import_module(module)
    for descriptor in low:
        os.close(descriptor)
    # It looks for its memory once, and finds none after anything has set a variable.
    import_module("setproctitle").getproctitle()
    gc.collect()
    gc.freeze()  # else the collector would write to, and so copy, every page
    requests = socket.socket(fileno=int(sys.argv[1]))
    _run(*_wait_for_a_job(requests, adopted=False))


if __name__ == "__main__":
    main()
