"""cuobjdump's listing of a kernel, from instructions that a test writes down."""

from benchmarks.kernels.sass import Instruction


def listing(*instructions: Instruction, kernel: str = "some_kernel") -> str:
    """With the control words encoded as in Hopper's 128-bit instructions."""
    lines = [f"\t\tFunction : _Z{len(kernel)}{kernel}v"]
    for one in instructions:
        control = one.stall | one.sets << 5 | one.frees << 8 | one.waits << 11
        lines.append(f"        /*{one.address:04x}*/   {one.text} ;   /* 0x0000000000000000 */")
        lines.append(f"             /* 0x{control << 41:016x} */")
    return "\n".join(lines) + "\n"


def code(*lines: str | tuple[str, dict[str, int]]) -> list[Instruction]:
    """Instructions 16 bytes apart; beside the text what its control word says (stall 1)."""
    found = []
    for index, line in enumerate(lines):
        text, control = (line, {}) if isinstance(line, str) else line
        found.append(Instruction(16 * index, text, **control))
    return found
