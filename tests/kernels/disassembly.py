"""The compiler's output for the kernels: registers and spills (its log), instructions (SASS)."""

import hashlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.build import find_nvcc

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_NAME = re.compile(r"(?<=\d)([a-z_]+_kernel)(?:I((?:L[ib]\d+E)+)E)?")
_FUNCTION = re.compile(r"Function : (\w+)")
_LINE = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+([^;]+?)\s*;", re.MULTILINE)
_JUMP = re.compile(r"\bBRA\S*\s.*?(0x[0-9a-f]+)$")
_NUMBER = re.compile(r"(?<=[\s,])-?0x[0-9a-f]+\b")
_NAME_OF_INSTRUCTION = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class Usage:
    """Resources of a thread that one kernel takes.

    Attributes:
        kernel: name and template arguments, for example ``select_kernel<32, 8>``.
        registers: at entry; roles that call for more (setmaxnreg) have more.
        stack: bytes of local memory a thread.
        spills: bytes of spill stores and loads.
        shared: bytes of static shared memory a block.
    """

    kernel: str
    registers: int
    stack: int
    spills: int
    shared: int = 0


def readable(symbol: str) -> str:
    """Return ``select_kernel<32, 8>`` from its mangled name."""
    match = _NAME.search(symbol)
    if match is None:
        return symbol
    arguments = re.findall(r"L[ib](\d+)E", match[2] or "")
    return f"{match[1]}<{', '.join(arguments)}>" if arguments else match[1]


def usage(log: str) -> list[Usage]:
    """Return every kernel that a build log (``ptxas -v``) tells of."""
    kernels = []
    for part in log.split("Compiling entry function ")[1:]:
        symbol = re.match(r"'(\w+)'", part)
        stack, registers = _STACK.search(part), _REGISTERS.search(part)
        if symbol is None or stack is None or registers is None:
            raise KernelError(f"ptxas says nothing known of a kernel: {part[:200]!r}")
        spills = int(stack[2]) + int(stack[3])
        shared = _SHARED.search(part)
        sizes = int(registers[1]), int(stack[1]), spills, int(shared[1]) if shared else 0
        kernels.append(Usage(readable(symbol[1]), *sizes))
    return kernels


def complaints(log: str) -> list[str]:
    """Warnings, and ptxas's notes on lost performance (serialised wgmma, ignored setmaxnreg)."""
    return [line for line in log.splitlines() if "warning" in line or re.search(r"\(C\d+\)", line)]


def find_cuobjdump() -> Path | None:
    """Find a disassembler: the toolkit's, one on the PATH, or the one that Triton ships."""
    candidates = [find_nvcc().parent / "cuobjdump"]
    on_path = shutil.which("cuobjdump")
    candidates += [Path(on_path)] if on_path else []
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        candidates.append(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")
    return next((path for path in candidates if path.is_file()), None)


def listing(library: Path) -> str:
    """Return cuobjdump's text of a built library or a cubin: instructions and their encodings.

    Raises:
        KernelError: no cuobjdump, or it fails.
    """
    tool = find_cuobjdump()
    if tool is None:
        raise KernelError("no cuobjdump: install the CUDA toolkit's or Triton")
    process = subprocess.run([tool, "-sass", library], capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise KernelError(f"{tool} -sass {library} failed: {process.stderr.strip()}")
    return process.stdout


def functions(text: str) -> dict[str, str]:
    """Return the part of a listing that belongs to each kernel, by its readable name."""
    parts = _FUNCTION.split(text)[1:]
    return {readable(symbol): body for symbol, body in zip(parts[::2], parts[1::2], strict=True)}


def disassemble(library: Path) -> dict[str, list[tuple[int, str]]]:
    """Return the SASS of each kernel of a built library: addresses and instructions, in order.

    Raises:
        KernelError: no cuobjdump, or it fails.
    """
    return {
        kernel: [(int(line[1], 16), line[2]) for line in _LINE.finditer(body)]
        for kernel, body in functions(listing(library)).items()
    }


def instructions(code: list[tuple[int, str]]) -> Counter[str]:
    """Count each instruction of a kernel, without its predicate and operands."""
    return Counter(name for name in _names(code) if name)


def _names(code: list[tuple[int, str]]) -> list[str]:
    matches = (_NAME_OF_INSTRUCTION.match(line) for _, line in code)
    return [match[1] if match else "" for match in matches]


def innermost(code: list[tuple[int, str]], holds: Mapping[str, int]) -> list[tuple[int, str]]:
    """Return the shortest loop that holds what it must.

    Args:
        code: of one kernel.
        holds: instructions that it has at least so many of, by how their names begin.

    Raises:
        KernelError: there is no such loop.
    """
    index = {address: at for at, (address, _) in enumerate(code)}
    names = _names(code)

    def fits(loop: slice) -> bool:
        inside = names[loop]
        return all(sum(x.startswith(name) for x in inside) >= n for name, n in holds.items())

    jumps = ((at, address, _JUMP.search(line)) for at, (address, line) in enumerate(code))
    loops = (
        slice(index[int(jump[1], 16)], at + 1)
        for at, address, jump in jumps
        if jump and int(jump[1], 16) < address
    )
    loop = min(filter(fits, loops), key=lambda loop: loop.stop - loop.start, default=None)
    if loop is None:
        raise KernelError(f"no loop holds {holds}")
    return code[loop]


def fingerprint(code: list[tuple[int, str]], *, values: bool = False) -> str:
    """Return the number of instructions and a digest of them, in their order.

    What registers are called and where the code lies does not show, so that a change elsewhere in
    the kernel leaves it as it is, if the compiler does.

    Args:
        code: a part of a kernel.
        values: whether numbers among the operands count, too: limits, shifts.
    """
    words = _names(code)
    if values:
        plain = ("" if "BRA" in line else re.sub(r"\[.*?\]", "", line) for _, line in code)
        words = [" ".join([w, *_NUMBER.findall(p)]) for w, p in zip(words, plain, strict=True)]
    return f"{len(words)}, {hashlib.sha256(' '.join(words).encode()).hexdigest()[:12]}"
