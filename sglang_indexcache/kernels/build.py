"""Compile ``csrc/`` for Hopper, and load it: one library a folder, cached by sources and flags.

A library is built on first use, or ahead of time by ``indexcache kernels build``; libraries that
were built ahead run on machines without nvcc. Building needs neither a GPU nor torch, because the
libraries use the apache-tvm-ffi ABI.
"""

import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from sglang_indexcache.errors import KernelError
from sglang_indexcache.library.writing import shipped

logger = logging.getLogger(__name__)

FOLDERS = ("topk", "indexer", "sparse_mla")
"""Folders of ``csrc/``, each of which becomes one library."""

ARCHITECTURE = "sm_90a"
FLAGS = (
    "-std=c++17",
    "-O3",
    # wgmma and setmaxnreg exist for sm_90a only; -arch=sm_90a would add a pass for sm_90.
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC",
)
OLDEST_NVCC = (12, 5)
"""Oldest nvcc with cudaGetDriverEntryPointByVersion; sm_90a itself needs only 12.0."""

DEFAULT_HOME = Path("/usr/local/cuda")
CACHE_VARIABLE = "INDEXCACHE_KERNEL_CACHE"

Version: TypeAlias = tuple[int, ...]
"""Version of nvcc or ptxas, for example ``(13, 0, 88)``."""

MISCOMPILES: dict[Version, str] = {
    (12, 8, 93): "gave wrong sums and wrote outside of shared memory",
    (13, 0, 88): "wrote outside of shared memory",
}
"""Builds of ptxas that were seen to make wrong code for Hopper, each with the effect
(fla-org/flash-linear-attention #1262). The next build may compile the same source correctly."""


@dataclass(frozen=True)
class BuiltKernels:
    """One built library, with nvcc's and ptxas's report: registers, spills, warnings."""

    path: Path
    log: Path
    fresh: bool

    @property
    def compiler(self) -> Version:
        """Version of the nvcc that made it, with which its folder's name ends."""
        _, _, end = self.path.parent.name.rpartition("-cuda")
        return tuple(map(int, re.findall(r"\d+", end)))


def source_folder() -> Path:
    """Return the folder ``csrc/``, from the checkout or from the installed wheel."""
    return shipped("csrc")


def cache_folder() -> Path:
    """Return the folder of libraries: ``$INDEXCACHE_KERNEL_CACHE``, or one in the user's cache."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang-indexcache" / "kernels"


def read_version(words: str) -> Version | None:
    """Return the version in what ``nvcc --version`` or ``ptxas --version`` prints, or None."""
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", words)
    return None if match is None else tuple(map(int, match.groups()))


def dotted(version: Version) -> str:
    """Return the version as text, such as ``13.0.88``."""
    return ".".join(map(str, version))


def warning_about(version: Version) -> str | None:
    """Return a warning if this version of nvcc is known to make wrong code, or None."""
    if version not in MISCOMPILES:
        return None
    return (
        f"nvcc {dotted(version)} has miscompiled kernels for Hopper: it {MISCOMPILES[version]} "
        "(fla-org/flash-linear-attention #1262); set CUDA_HOME to another toolkit"
    )


@cache
def find_nvcc() -> Path:
    """Find nvcc: in ``$CUDA_HOME``, else on the PATH, else in ``/usr/local/cuda``.

    Raises:
        KernelError: nvcc was not found.
    """
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(DEFAULT_HOME / "bin" / "nvcc")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise KernelError(
        "the CUDA kernels need nvcc, and none was found: install the CUDA toolkit "
        f"{OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} or later and set CUDA_HOME to it, or use another "
        "implementation"
    )


@cache
def nvcc_version() -> Version:
    """Return the compiler's full version, for example ``(13, 0, 88)``.

    Raises:
        KernelError: there is no nvcc, it does not run, or it is too old.
    """
    nvcc = find_nvcc()
    try:
        words = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise KernelError(f"{nvcc} does not run: {error}") from error
    version = read_version(words.stdout)
    if version is None:
        raise KernelError(f"{nvcc} --version names no release: {words.stdout.strip()!r}")
    if version < OLDEST_NVCC:
        raise KernelError(
            f"{nvcc} is CUDA {version[0]}.{version[1]}; the kernels need "
            f"{OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} or later: set CUDA_HOME to a newer toolkit"
        )
    return version


@cache
def constant(header: str, name: str) -> int:
    """Read ``constexpr int NAME = ...;`` from a header of ``csrc/``, the only place of the value.

    Raises:
        KernelError: the header has no such line.
    """
    found = re.search(rf"constexpr int {name} = (\d+);", (source_folder() / header).read_text())
    if found is None:
        raise KernelError(f"csrc/{header} does not say what {name} is; install the package again")
    return int(found[1])


def sources_of(folder: str) -> list[Path]:
    """Return the files that nvcc compiles for one library."""
    return sorted((source_folder() / folder).glob("*.cu"))


def build(folder: str, *, say: Callable[[str], None] | None = None) -> BuiltKernels:
    """Compile one folder of ``csrc/``, unless the cache has it.

    Several processes may call this at once (one per GPU): one compiles, the others wait.

    Raises:
        KernelError: there is no usable nvcc, the cache cannot be written, or the compilation
            failed; the message ends with the compiler's output.
    """
    from filelock import FileLock

    library = cached(folder)
    if library is not None:
        return library
    target = cache_folder() / f"{stem_of(folder)}{dotted(nvcc_version())}"
    _make_writable(target.parent)
    with FileLock(f"{target}.lock"):
        library = cached(folder)
        if library is not None:
            return library
        if say:
            say(f"compiling csrc/{folder} for {ARCHITECTURE}")
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            built.mkdir()
            _compile(folder, built)
            shutil.rmtree(target, ignore_errors=True)  # an incomplete folder, without a library
            # Renamed in one step: a process that looks without the lock sees a whole library or
            # none.
            built.rename(target)
    return _library(target, folder, fresh=True)


def cached(folder: str) -> BuiltKernels | None:
    """Return the cached library for these sources, or None.

    The build by this machine's nvcc is preferred, then the newest build of the same major version
    from elsewhere (an archive, a container's build stage). A build that may be miscompiled comes
    last, and only if this machine's nvcc made it. Without a usable nvcc the newest build is
    returned.
    """
    try:
        local = nvcc_version()
    except KernelError:
        local = None

    def fits(version: Version) -> bool:
        is_like_local = local is not None and version[0] == local[0] and version not in MISCOMPILES
        return local is None or version == local or is_like_local

    paths = cache_folder().glob(f"{stem_of(folder)}*")
    builds = (_library(path, folder, fresh=False) for path in paths)
    libraries = [library for library in builds if fits(library.compiler) and library.path.is_file()]

    def rank(library: BuiltKernels) -> tuple[bool, bool, Version]:
        version = library.compiler
        return version not in MISCOMPILES, version == local, version

    return max(libraries, key=rank, default=None)


@cache
def library(folder: str) -> Any:
    """Load the library of one folder of ``csrc/``; compile it first if the cache lacks it.

    Raises:
        KernelError: there is no nvcc, the compilation failed, or the library cannot be loaded.
    """
    import tvm_ffi

    built = build(folder)
    if warning := warning_about(built.compiler):
        logger.warning("IndexCache kernels, %s: %s", folder, warning)
    path = built.path
    try:
        return tvm_ffi.load_module(str(path))
    except (OSError, RuntimeError) as error:
        raise KernelError(
            f"{path} cannot be loaded: {error}; build the kernels with the CUDA toolkit whose "
            "major version torch has (indexcache kernels build)"
        ) from error


def unavailable() -> str | None:
    """Return why the kernels cannot be built or loaded on this machine, or None; needs no GPU."""
    try:
        import tvm_ffi  # noqa: F401

        if all(cached(folder) for folder in FOLDERS):
            for folder in FOLDERS:
                library(folder)
        else:
            nvcc_version()
    except (ImportError, KernelError) as error:
        return str(error)
    return None


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem: str | None = str(error)
    else:
        problem = None if os.access(folder, os.W_OK) else "no permission to write"
    if problem:
        raise KernelError(
            f"cannot keep built kernels in {folder}: {problem}; set {CACHE_VARIABLE} to a folder "
            "that can be written"
        )


def _library(target: Path, folder: str, *, fresh: bool) -> BuiltKernels:
    return BuiltKernels(target / f"{folder}.so", target / "build.log", fresh)


def stem_of(folder: str) -> str:
    """Return a build's name in the cache without the nvcc version at its end."""
    return f"{folder}-{_fingerprint(folder)}-cuda"


def _compile(folder: str, scratch: Path) -> None:
    """Compile objects in parallel, then link the library; write it and the log to ``scratch``."""
    sources = sources_of(folder)
    objects = [scratch / f"{source.stem}.o" for source in sources]
    commands = [
        [str(find_nvcc()), *FLAGS, *_includes(), "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        words = list(pool.map(_run, commands))
    (scratch / "build.log").write_text("".join(words))
    link = [str(find_nvcc()), "-shared", *map(str, objects), *_linked()]
    _run([*link, "-o", str(scratch / f"{folder}.so")])
    for path in objects:
        path.unlink()


def _run(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    words = process.stdout + process.stderr
    if process.returncode != 0:
        errors = [line for line in words.splitlines() if re.search(r"error|fatal|\bld: ", line)]
        message = "\n".join(errors[:20] or words.splitlines()[-20:])
        raise KernelError(f"`{' '.join(command)}` failed:\n{message}")
    return words


def _includes() -> list[str]:
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path

    return [
        f"-I{path}" for path in (source_folder(), find_include_path(), find_dlpack_include_path())
    ]


def _linked() -> list[str]:
    from tvm_ffi.libinfo import find_libtvm_ffi

    ours = Path(find_libtvm_ffi())
    # Linked by path: pip's CUDA packages have no lib64, and their library's name ends in a number.
    toolkit = find_nvcc().resolve().parent.parent
    runtimes = sorted(toolkit.glob("lib*/libcudart.so*"))
    runtime = ["-cudart=none", "-Xlinker", str(runtimes[0])] if runtimes else ["-cudart=shared"]
    return [f"-L{ours.parent}", "-ltvm_ffi", *runtime]


def _fingerprint(folder: str) -> str:
    """Digest everything that the library depends on except the compiler: sources, flags, ABI."""
    import tvm_ffi

    digest = hashlib.sha256()
    for part in (*FLAGS, tvm_ffi.__version__):
        digest.update(part.encode() + b"\0")
    root = source_folder()
    headers = [path for path in root.rglob("*") if path.suffix in {".h", ".cuh"}]
    for path in sorted([*headers, *sources_of(folder)]):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
