"""What the cycle model assumes of Hopper, each number with where it is from.

*Data sheet* and *published* numbers name their source. *Assumed* ones are of the order that
microbenchmarks of Hopper and its predecessors give; nothing here was measured by this project, and
the forecast's range is wider than what they can change.
"""

from __future__ import annotations

import re
from functools import cache

from benchmarks.kernels.sass import Instruction

MULTIPROCESSORS = 132
"""H100 and H200 SXM (data sheet)."""
CLUSTERS = {1: 132, 2: 66, 4: 31, 8: 15, 16: 7}
"""Clusters of so many blocks, one an SM, that run at once. 15 of 8: published for H100 SXM
(accel-sim gpu-app-collection #87; cuBLAS's grid of 120 in cutlass #1921); 31 of 4, 7 of 16: assumed
(GPCs of 16 and 18 SMs and one smaller). The kernels ask the driver."""
MEMORY_BYTES_PER_SECOND = 4.8e12
"""H200 (data sheet)."""
GATHER_BYTES_PER_SECOND = {"optimistic": 6.0e12, "central": 5.3e12, "pessimistic": 4.5e12}
"""Rows that all SMs together gather from L2. 5.3: what FlashMLA's published 640 TFLOPS imply, at
73,728 bytes a step of 64 rows; the others: assumed, about what is reported for reads of L2."""
GATHER_START = {"optimistic": 600.0, "central": 900.0, "pessimistic": 1300.0}
"""Clocks until the first rows of a step are there, from memory in decode: assumed."""
PORT_BYTES_PER_CLOCK = 64
"""That one SM takes from L2: assumed."""
SHARED_BYTES_PER_CLOCK = 128
"""Of an SM (CUDA programming guide: 32 banks of 4 bytes)."""
SHARED_LIMIT = 227 * 1024
"""Dynamic shared memory of a block, bytes (CUDA programming guide, compute capability 9.0)."""
SHARED_OF_AN_SM = 228 * 1024
SHARED_RESERVED = 1024
"""By the system, for each block (CUDA programming guide)."""
REGISTERS_OF_AN_SM = 65536
THREADS_OF_AN_SM = 2048

GHZ = {"optimistic": 1.83, "central": 1.70, "pessimistic": 1.60}
"""The clock under a load of tensor products: assumed; 1.4 to 1.98 is what the card allows."""
SILICON = {"optimistic": 1.0, "central": 1.10, "pessimistic": 1.25}
"""Clocks of the indexer's main loop on a card over those of the model: assumed. DeepGEMM's own
published time is 1.2 to 1.6 times its modelled clocks (``calibration`` in the result says how much
at which clock), so these favour us; the pessimistic end of the range is about what it gets."""

PIPE_CLOCKS = {"ALU": 2, "FMA": 2, "IMAD": 2, "XU": 8, "LSU": 4}
"""Clocks for which one warp instruction keeps a sub-partition's pipe: 16 lanes of the ALU, twice 16
of FMA of which one half does IMAD, 4 lanes of XU (CUDA programming guide, throughput of
instructions, 9.0); LSU and shuffles have 32 lanes for the four sub-partitions."""
LSU_QUEUE = 12
"""Clocks of work that may wait at the LSU before issue stops: assumed."""
OPERANDS_READ = 12
"""Until a memory instruction has read its registers: assumed."""
LOAD_CLOCKS = 300
"""Of a load from L2: assumed; 600 under load."""
PRODUCT_START, PRODUCT_WAIT = 8, 24
"""From issue to the tensor cores, and from their end to the waiting warp: assumed."""
BARRIER_CLOCKS = 22
"""From the last arrival at a named barrier to the first instruction behind it: assumed."""
FENCE_CLOCKS = 30
"""A MEMBAR of the block: assumed, 30 to 100."""
LATENCY = {
    "LDS": 33, "SHFL": 24, "ATOMS": 64, "MUFU": 28, "I2F": 24, "F2I": 24, "S2R": 30, "S2UR": 30,
    "SYNCS": 24, "LDC": 40, "MATCH": 30, "REDUX": 30,
}  # fmt: skip
"""Clocks from issue to result, where a scoreboard is waited for: assumed."""
OTHER_LATENCY = 20

_PIPES = {
    "ALU": """FMNMX FSEL FSETP ISETP LOP3 LEA IADD3 VIADD VIMNMX VIADDMNMX SEL SHF PLOP3 P2R R2P
        PRMT IABS MOV FSET BMSK SGXT VABSDIFF F2FP CS2R FCHK IMNMX""",
    "FMA": "FFMA FMUL FADD HFMA2 HADD2 HMUL2",
    "IMAD": "IMAD",
    "XU": "MUFU I2F F2I F2F POPC FLO I2I FRND",
    "LSU": """LDS STS ATOMS LDG STG SHFL LDGSTS LDSM STSM LDC MATCH REDUX LD ST ATOMG RED SYNCS BAR
        ATOM S2R""",
    "tensor": "QGMMA HGMMA IGMMA",
}
PIPE_OF = {opcode: pipe for pipe, opcodes in _PIPES.items() for opcode in opcodes.split()}
_PRODUCT = re.compile(r"[QHI]GMMA\.64x(\d+)x\d+")


def pipe_of(instruction: Instruction) -> str:
    """Where an instruction executes; "uniform" and "control" take an issue slot and no more."""
    opcode = instruction.opcode
    if opcode in PIPE_OF:
        return PIPE_OF[opcode]
    return "uniform" if opcode.startswith("U") or opcode == "R2UR" else "control"


def latency(instruction: Instruction) -> int:
    """Clocks from issue to result."""
    return LATENCY.get(instruction.opcode, OTHER_LATENCY)


def product_clocks(instruction: Instruction) -> float:
    """Clocks of the SM's tensor cores for one WGMMA of 64 rows; 0 for anything else.

    N / 2 at the data sheet's rate (64 x N x 32 e4m3 or 64 x N x 16 bfloat16), or what reading the
    operands from shared memory takes: 64 rows of A, if they are not in registers, and N of B, 32
    bytes each.
    """
    return _product_clocks(instruction.text) if pipe_of(instruction) == "tensor" else 0.0


@cache
def _product_clocks(text: str) -> float:
    found = _PRODUCT.search(text)
    if found is None:
        return 0.0
    columns = int(found[1])
    rows = 0 if re.search(r"GMMA\S*\s+R\d+, R\d+, gdesc", text) else 64
    return max(columns / 2, (rows + columns) * 32 / SHARED_BYTES_PER_CLOCK)


def blocks_of_an_sm(threads: int, registers: int, shared: int) -> int:
    """Blocks that are resident on an SM.

    Args:
        threads: of a block.
        registers: of a thread, allocated by eights.
        shared: bytes of a block, static and dynamic.
    """
    by_registers = REGISTERS_OF_AN_SM // (threads * -(-registers // 8) * 8)
    by_shared = SHARED_OF_AN_SM // (shared + SHARED_RESERVED)
    return min(THREADS_OF_AN_SM // threads, by_registers, by_shared)
