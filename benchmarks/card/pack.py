"""Pack what a bare machine with a card needs besides this checkout, into an archive of packages.

    python -m benchmarks.card.pack [--wheels FOLDER]

``.card/packages.tar.xz`` unpacks into a folder for PYTHONPATH: SGLang and its kernels, our kernels
compiled (a verdict on them should not be one on that machine's compiler) and apache-tvm-ffi. Pack
it where SGLang is installed. The card's machine (``machine.txt``) has another Python and another
torch than SGLang is built for and no network: SGLang's own Python is copied from here, everything
compiled is downloaded for that machine, and what cannot travel gets a stub that says so when it is
called. ``card-manifest.json`` says what is carried, and beside which sources.
"""

import argparse
import hashlib
import importlib.metadata
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sglang_indexcache.kernels import build
from sglang_indexcache.lab.runs.provenance import commit

ROOT = Path(__file__).parents[2]
PYTHON = "3.12"
PLATFORMS = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5", "2_31", "2_34", "2_39")
"""glibc versions of wheels that the machine can load; pip wants each by name."""
MANIFEST = "card-manifest.json"
KERNELS = "indexcache-kernels.tar.gz"
"""Name of the archive of our compiled kernels, inside of ours."""
BUILT = ROOT / "build" / "archive" / "kernels.tar.gz"
PACKAGES_BYTES = 44 << 20
TRAVEL_BYTES = 64 << 20
"""Largest load that a call takes along: the checkout's tracked files, and the archives."""
SOURCES = ("sglang_indexcache", "patterns", "csrc", "tests", "benchmarks")
MACHINE = Path(__file__).parent / "machine.txt"


@dataclass(frozen=True)
class Distribution:
    """One distribution of the archive.

    Attributes:
        name: of the distribution.
        why: what breaks without it.
        version: to take; None is the one installed here.
        here: copy the files installed here instead of downloading; for pure Python only.
        keep: patterns of the paths to take; all if empty.
        drop: patterns of the paths to leave behind.
    """

    name: str
    why: str
    version: str | None = None
    here: bool = False
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stub:
    """A module that stands where one cannot travel."""

    module: str
    why: str


TORCH_ABI = "the last one built for torch 2.11: newer ones miss symbols there, and TensorImpl moved"
CARRIED = (
    Distribution("apache-tvm-ffi", "loads our CUDA kernels and SGLang's"),
    Distribution(
        "sglang",
        "the engine",
        here=True,
        keep=("sglang/*", "*.dist-info/*"),
        drop=(
            "*.so",
            "*.co",
            "sglang/test/*",
            "sglang/multimodal_gen/*",
            "sglang/benchmark/*",
            "sglang/kernels/jit/benchmark/*",
        ),
    ),
    Distribution(
        "sglang-kernel",
        f"sgl_kernel, which models import; {TORCH_ABI}",
        version="0.4.5",
        keep=("sgl_kernel/*.py", "sgl_kernel/*/*.py", "sgl_kernel/sm90/*", "*.dist-info/*"),
    ),
    Distribution(
        "sgl-deep-gemm",
        f"the engine's index logits; {TORCH_ABI}",
        version="0.1.5.post1",
    ),
    Distribution("sgl-flash-mla", "the engine's sparse attention; Hopper's is in its _C_legacy"),
    Distribution("transformers", "SGLang and the checkpoints of hf.py are of this version"),
    *(
        Distribution(name, "imported by SGLang's processes")
        for name in (
            "annotated-types",
            "compressed-tensors",
            "dill",
            "distro",
            "fastapi",
            "gguf",
            "interegular",
            "jiter",
            "jsonschema",
            "jsonschema-specifications",
            "loguru",
            "msgspec",
            "openai",
            "openai-harmony",
            "opentelemetry-api",
            "orjson",
            "partial-json-parser",
            "pybase64",
            "pydantic",
            "pydantic-core",
            "python-multipart",
            "pyzmq",
            "referencing",
            "rpds-py",
            "setproctitle",
            "sniffio",
            "starlette",
            "typing-inspection",
            "uvicorn",
            "watchfiles",
        )
    ),
)
STUBS = (
    Stub("IPython.display", "for notebooks"),
    Stub("soundfile", "for speech"),
    Stub("xgrammar", "large, and for constrained output: serve with --grammar-backend none"),
    Stub("xgrammar.structural_tag", "the same"),
    Stub("zstandard", "large, and for compressed requests"),
)


def on_machine() -> dict[str, str]:
    """Return normalised names of the card's machine's distributions, and versions if known."""
    lines = (line.partition("#")[0].strip() for line in MACHINE.read_text().splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {normalised(name): version for name, _, version in pairs}


def normalised(name: str) -> str:
    """Return a distribution's name as comparisons want it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def files_here(distribution: Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an installed distribution.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    for file in importlib.metadata.distribution(distribution.name).files or []:
        if file.suffix != ".pyc" and ".." not in file.parts:
            yield file.as_posix(), Path(str(file.locate())).read_bytes()


def files_of_wheel(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a wheel as they lie in a site folder."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            # What a wheel installs elsewhere (scripts, headers) nobody imports.
            if not info.is_dir() and ".data/" not in info.filename:
                yield info.filename, archive.read(info)


def download(distribution: Distribution, folder: Path) -> Path:
    """Get the wheel for the card's machine, by pip; one that lies in ``folder`` is taken as it is.

    Raises:
        SystemExit: there is none.
    """
    version = distribution.version or importlib.metadata.version(distribution.name)
    name = distribution.name.replace("-", "_")
    wheels = sorted(folder.glob(f"{name}-{version}-*.whl"))
    if not wheels:
        platforms = [f"--platform=manylinux_{p}_x86_64" for p in PLATFORMS]
        platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", f"--python-version={PYTHON}", *platforms]
        command += ["--dest", str(folder), f"{distribution.name}=={version}"]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(
                f"error: no wheel of {distribution.name} {version} fits the card's machine"
            )
        wheels = sorted(folder.glob(f"{name}-{version}-*.whl"))
    return wheels[0]


def is_included(path: str, distribution: Distribution) -> bool:
    """Return whether a distribution's file travels."""
    is_kept = not distribution.keep or any(fnmatch(path, pattern) for pattern in distribution.keep)
    return is_kept and not any(fnmatch(path, pattern) for pattern in distribution.drop)


def misfit(path: str) -> str | None:
    """Say why a compiled file cannot be loaded by the card's Python, or None."""
    tag = re.search(r"\.(cpython-\d+)[-.]", path)
    if tag and tag[1] != "cpython-" + PYTHON.replace(".", ""):
        return f"{path} is for {tag[1]}"
    return None


def stub_source(stub: Stub) -> str:
    """Write a module whose names can be imported, and say when used why they are missing."""
    return f'''"""Stands where {stub.module} could not travel: {stub.why}."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise ImportError("{stub.module}." + name + " was not carried: {stub.why}")

    anything = classmethod(lambda *_: {{"type": "any"}})  # it may be a field's type
    return type(name, (), {{"__init__": missing, "__get_pydantic_core_schema__": anything}})
'''


def own_metadata() -> dict[str, bytes]:
    """Make the repository an installed package: SGLang finds plugins by entry points."""
    installed = importlib.metadata.distribution("sglang-indexcache")
    folder = f"sglang_indexcache-{installed.version}.dist-info"
    names = ("METADATA", "entry_points.txt")
    return {f"{folder}/{name}": (installed.read_text(name) or "").encode() for name in names}


def collect(
    distributions: Iterable[Distribution], wheels: Path
) -> tuple[dict[str, bytes], list[Any]]:
    """Return every file of the archive, and the manifest's rows.

    Raises:
        SystemExit: a distribution that the machine has, or a compiled file that does not fit it.
    """
    files: dict[str, bytes] = {}
    rows: list[Any] = []
    on_card = on_machine()
    for distribution in distributions:
        version = distribution.version or importlib.metadata.version(distribution.name)
        if on_card.get(normalised(distribution.name)) in ("", version):
            raise SystemExit(f"error: the card's machine has {distribution.name} already")
        if distribution.here:
            source = files_here(distribution)
        else:
            source = files_of_wheel(download(distribution, wheels))
        included = {path: data for path, data in source if is_included(path, distribution)}
        if misfits := [why for why in map(misfit, included) if why]:
            raise SystemExit(
                f"error: {distribution.name}: {misfits[0]}, the machine has Python {PYTHON}"
            )
        files |= included
        rows.append({"name": distribution.name, "version": version, "why": distribution.why})
    return files, rows


def write_archive(files: dict[str, bytes], out: Path) -> None:
    """Write an archive: the same files give the same bytes."""
    with (
        lzma.open(out, "wb", preset=9) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in sorted(files):
            entry = tarfile.TarInfo(path)
            entry.size = len(files[path])
            archive.addfile(entry, io.BytesIO(files[path]))


def sources() -> str:
    """Return a digest of this checkout's code: a copy of it may know no commit."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cu", ".cuh", ".yaml"):
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def tracked_bytes() -> int:
    """Return how much of the checkout travels beside the archives."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True
    )
    files = [ROOT / path for path in listed.stdout.decode().split("\0") if path]
    return sum(file.stat().st_size for file in files if file.exists())


def check_kernels(kernels: Path) -> None:
    """Refuse an archive of our kernels that the card's machine would build again by its own nvcc.

    Raises:
        SystemExit: it is missing, or was built from other sources.
    """
    if not kernels.exists():
        raise SystemExit(f"error: {kernels} is missing: run .ci/archive")
    with tarfile.open(kernels) as packed:
        names = packed.getnames()
    stems = [build.stem_of(folder) for folder in build.FOLDERS]
    if missing := [stem for stem in stems if not any(name.startswith(stem) for name in names)]:
        raise SystemExit(
            f"error: {kernels} has no {', '.join(missing)}: it was built from other sources or for "
            "another apache-tvm-ffi; run .ci/archive again"
        )


def packages(wheels: Path) -> dict[str, bytes]:
    """Return the files of the archive.

    Raises:
        SystemExit: our compiled kernels are not there, or are of other sources.
    """
    check_kernels(BUILT)
    files, rows = collect(CARRIED, wheels)
    files |= {f"{s.module.replace('.', '/')}/__init__.py": stub_source(s).encode() for s in STUBS}
    files |= own_metadata() | {KERNELS: BUILT.read_bytes()}
    machine = {"python": PYTHON, "torch": on_machine()["torch"]}
    beside = {"commit": commit(), "sources": sources()}
    stubs = {stub.module: stub.why for stub in STUBS}
    manifest = {**machine, **beside, "carried": rows, "stubs": stubs}
    return files | {MANIFEST: (json.dumps(manifest, indent=1) + "\n").encode()}


def main() -> None:
    """Pack, and say what weighs how much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, help="where wheels are kept between calls")
    options = parser.parse_args()
    out = ROOT / ".card" / "packages.tar.xz"
    out.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheels = options.wheels or Path(temporary)
        wheels.mkdir(parents=True, exist_ok=True)
        write_archive(packages(wheels), out)
    archives = {file: file.stat().st_size for file in sorted(out.parent.glob("*.tar.xz"))}
    total = tracked_bytes() + sum(archives.values())
    for file, size in archives.items():
        print(f"{size:12,}  {file}")
    print(f"{total:12,}  travel, of {TRAVEL_BYTES:,}")
    if total > TRAVEL_BYTES:
        raise SystemExit(
            "error: that is more than a call takes: leave caches.tar.xz out, or packages that "
            "nothing asks for"
        )


if __name__ == "__main__":
    main()
