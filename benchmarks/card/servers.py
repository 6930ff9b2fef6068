"""Servers that import while another one is measured, with the caches of what they compile."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.caches import kept
from benchmarks.card import plugin
from benchmarks.kernels.machine import packed_file
from sglang_indexcache.lab.client.launch import Server
from sglang_indexcache.library.writing import replacing, write_json

CACHES = Path("/tmp/indexcache-caches")
"""Folder in which SGLang, Triton and DeepGEMM keep what they compile; it outlives a call."""
MANIFEST = "manifest.json"
_CACHE_VARIABLES = {
    "SGLANG_JIT_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "TRITON_CACHE_DIR": "triton",
}
_FITS = ("name", "python", "torch", "cuda", "nvcc", "triton", "sglang", "deep_gemm")
"""Facts of a machine that must be the same where compiled kernels are to be taken over."""
_LARGEST_ARCHIVE = 16 << 20
_MOST_SECONDS_TO_END, _MOST_SECONDS_TO_IMPORT = 20.0, 120.0
_HELD_PROCESSES = 2
"""A server's scheduler and its detokenizer; its main process has imported when it starts them."""
ENVIRONMENT = {
    # The carried sgl_kernel is older than SGLang asks for; benchmarks/card/pack.py says why.
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    # Dense attention of short prompts is FlashAttention 3's, which cannot be carried.
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
}


class HeldServer(Server):
    """A server that imports at once and loads when told (:mod:`benchmarks.card.plugin`).

    Args:
        folder: its own, for its log and what it is told; created if missing.
        fills: whether its KV pool is filled, for a decode without a prefill.

    Attributes:
        shared: variables that every such server beside it has, too.
        own: those that it has alone.
        begun: when it was told to load, by :func:`time.monotonic`.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, *, fills: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        path = (plugin.site(folder.parent / "site"), os.environ.get("PYTHONPATH", ""))
        self.shared = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, path))}
        self.own = {plugin.FOLDER: str(folder), plugin.FILL: "1" if fills else ""}
        self.begun = 0.0
        super().__init__(arguments, folder / "server.log", env={**self.shared, **self.own})

    @property
    def is_started(self) -> bool:
        """Whether it has a process, be it held or not."""
        return self._process is not None

    def wait_until_held(self) -> None:
        """Wait until it has imported and rests, or has ended."""
        ends = time.monotonic() + _MOST_SECONDS_TO_IMPORT
        while self._process is not None and self._process.poll() is None:
            held = len(list(self.folder.glob(f"{plugin.HELD}.*")))
            if held >= _HELD_PROCESSES or time.monotonic() > ends:
                return
            time.sleep(0.05)

    def begin(self) -> None:
        """Let it load, and all that follows."""
        self.begun = time.monotonic()
        (self.folder / plugin.BEGIN).touch()

    def stop(self, grace: float = 20.0) -> None:
        """Stop it, and wait for the end of all its processes, which hold the card's memory.

        The next server takes what is free when it loads for all that it can have.
        """
        super().stop(grace)
        ends = time.monotonic() + _MOST_SECONDS_TO_END
        while self._process is not None and _lives(self._process.pid) and time.monotonic() < ends:
            time.sleep(0.05)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have it look at its prefills, which takes time: nothing in the block is to be timed."""
        watch = self.folder / plugin.WATCH
        watch.touch()
        yield
        watch.unlink()

    def seen(self) -> dict[str, float]:
        """Return what it saw."""
        return dict(json.loads((self.folder / plugin.SEEN).read_text()))


def _lives(group: int) -> bool:
    """Return whether a process group has a process left that is neither a zombie nor dead."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                return True
    return False


@contextmanager
def lineup(servers: Sequence[HeldServer]) -> Iterator[Iterator[HeldServer]]:
    """Yield the servers one by one, each begun and the one before it ended.

    While one loads, the next one imports, and then rests until its turn: a server is yielded when
    the next one rests, so no import runs while a request is timed.
    """
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop, grace=0)
        yield _in_turn(servers)


def _in_turn(servers: Sequence[HeldServer]) -> Iterator[HeldServer]:
    for server, upcoming in zip(servers, [*servers[1:], None], strict=False):  # none, or one more
        if not server.is_started:
            server.start()
        server.begin()
        if upcoming is not None:
            upcoming.start()
            upcoming.wait_until_held()
        yield server
        server.stop(grace=0)


def keep_caches(machine: Mapping[str, Any]) -> str:
    """Send what servers compile to :data:`CACHES`, after what was carried there, if it fits.

    Returns:
        What was found.
    """
    for variable, name in _CACHE_VARIABLES.items():
        os.environ[variable] = str(CACHES / name)
    if CACHES.exists():
        return "kernels that an earlier call compiled are there"
    carried = packed_file(f"{CACHES.name}/{MANIFEST}")
    if carried is None:
        return "no compiled kernels were carried"
    facts = json.loads(carried.read_text())
    if differ := [name for name in _FITS if facts.get(name) != machine.get(name)]:
        return f"the carried kernels are for another machine: {', '.join(differ)} differ"
    kept(CACHES, lambda part: shutil.copytree(carried.parent, part))
    return "carried kernels are taken"


def pack_caches(machine: Mapping[str, Any], out: Path) -> str:
    """Write :data:`CACHES` into an archive that unpacks beside the kit; return what was done."""
    if not CACHES.exists():
        return "nothing was compiled"
    write_json(CACHES / MANIFEST, {name: machine.get(name) for name in _FITS})
    with replacing(out) as part, tarfile.open(part, "w:xz", preset=1) as archive:
        archive.add(CACHES, CACHES.name)
    if (size := out.stat().st_size) > _LARGEST_ARCHIVE:
        out.unlink()
        return f"{size:,} bytes of compiled kernels are too many to carry"
    return f"{out.name}: {size:,} bytes; lay it beside the archives of the pack"
