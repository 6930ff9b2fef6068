"""The cycle model on listings written by hand; every number of clocks was counted by hand."""

import pytest

from benchmarks.kernels.cycles import DISCIPLINES, Clocks, Follower, simulate
from benchmarks.kernels.machine import blocks_of_an_sm, pipe_of, product_clocks
from benchmarks.kernels.sass import Instruction, innermost, loops, mix, parse
from sglang_indexcache.errors import KernelError
from tests.benchmarks.sass_text import code, listing

QGMMA = "QGMMA.64x256x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def run(trace: list[Instruction], warps: int = 1, **options: object) -> Clocks:
    return simulate([lambda: trace] * warps, **options)  # type: ignore[arg-type]


# -- reading ---------------------------------------------------------------------------------------


def test_control_words() -> None:
    """Those of a load and of its use, as nvcc 13.0 wrote them."""
    text = """
\t\tFunction : _Z11some_kernelv
        /*0030*/                   LDS R4, [R2] ;            /* 0x0000000002047984 */
                                                             /* 0x000e220000000800 */
        /*0040*/              @!P0 FADD R5, R4, R4 ;         /* 0x0000000404058221 */
                                                             /* 0x001fca0000000000 */
"""
    (load, use) = parse(text)["some_kernel"]
    assert (load.address, load.opcode, load.stall, load.sets, load.waits) == (48, "LDS", 1, 0, 0)
    assert (use.name, use.stall, use.sets, use.waits) == ("FADD", 5, 7, 1)


def test_a_listing_written_here_is_read_back() -> None:
    wrote = code(("LDS R1, [R2]", {"stall": 3, "sets": 2, "frees": 1}), ("EXIT", {"waits": 4}))
    assert parse(listing(*wrote)) == {"some_kernel": wrote}


SPIN_AND_SLOT = code(
    "MOV R1, 0x1",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R2",  # 0x10: the loop
    "@!P0 BRA 0xb0",
    "FADD R1, R1, R1",
    "@P1 BRA 0x70",
    "STG.E [R4], R1",
    "STG.E [R5], R1",
    "IADD3 R6, R6, 0x1, RZ",  # 0x70
    "@P2 BRA 0x10",
    "EXIT",
    "NOP",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R2",  # 0xb0: asks again and again
    "@!P0 BRA 0xb0",
    "BRA 0x30",
)


def test_loops_and_iterations() -> None:
    inner, outer = loops(SPIN_AND_SLOT)
    assert [SPIN_AND_SLOT[i].address for i in sorted(inner.body)] == [0xB0, 0xC0]
    assert outer.header == 1
    assert {SPIN_AND_SLOT[i].address for i in outer.body} == {
        *range(0x10, 0x90, 16),
        0xB0,
        0xC0,
        0xD0,
    }
    longest = [one.address for one in outer.iteration(lambda: True)]
    assert longest == list(range(0x10, 0x90, 16)), "the mbarrier is ready: no spinning"
    shortest = [one.address for one in outer.iteration(lambda: False)]
    assert shortest == [0x10, 0x20, 0x30, 0x40, 0x70, 0x80]


ROLES = code(
    "ISETP.NE.AND P1, PT, R7, UR4, PT",  # the loop
    "@P1 BRA 0x60",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT",
    "@P2 BRA 0x50",
    "FMUL R1, R1, R2",  # seldom
    "BRA.DIV UR5, 0xc0",
    "BAR.SYNC.DEFER_BLOCKING 0x1, 0x100",  # 0x60
    "@!P1 BRA 0x90",
    "LDS R3, [R4]",  # the other role
    "STS [R4], R3",  # 0x90
    "@P3 BRA 0x0",
    "EXIT",
    "WARPSYNC.COLLECTIVE R9, 0xd0",  # 0xc0: never
    "NOP",
    "BRA 0x60",
)


def test_iterations_of_each_role() -> None:
    loop = innermost(ROLES, {"HGMMA": 1})

    def addresses(trace: list[Instruction]) -> list[int]:
        return [one.address for one in trace]

    own, other = loop.through("HGMMA"), loop.through("LDS")
    assert addresses(own) == [0, 0x10, 0x20, 0x30, 0x50, 0x60, 0x70, 0x90, 0xA0]
    assert addresses(other) == [0, 0x10, 0x60, 0x70, 0x80, 0x90, 0xA0]
    both = addresses(loop.through("HGMMA", longest=True))
    assert both == [*range(0, 0xB0, 16)]
    alone = loop.through("HGMMA", longest=True, without=set(other) - set(own))
    assert addresses(alone) == [0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x90, 0xA0]
    with pytest.raises(KernelError, match="no iteration of the loop executes MUFU"):
        loop.through("MUFU")


def test_the_smallest_loop_that_holds() -> None:
    assert innermost(SPIN_AND_SLOT, {"STG": 2}).header == 1
    assert innermost(SPIN_AND_SLOT, {"SYNCS": 1}).header == 11
    with pytest.raises(KernelError, match="no loop of the kernel holds"):
        innermost(SPIN_AND_SLOT, {"QGMMA": 4})


def test_what_is_rare_is_left_out() -> None:
    """A branch over an inner loop: the longest iteration goes through it, unless that is rare."""
    lines = ["LDG R1, [R2]", "@P1 BRA 0x40", "POPC R3, R1", "@P2 BRA 0x20", "FADD R4, R4, R1"]
    (loop,) = [one for one in loops(code(*lines, "@P0 BRA 0x0", "EXIT")) if one.header == 0]

    def longest(*rare: str) -> list[str]:
        return [one.opcode for one in loop.without(rare).iteration(lambda: True)]

    assert longest() == ["LDG", "BRA", "POPC", "BRA", "FADD", "BRA"]
    assert longest("MUFU") == longest()
    assert longest("POPC") == ["LDG", "BRA", "FADD", "BRA"]


def test_pipes() -> None:
    found = mix(code("FMNMX R1, R1, R2, !PT", "@P0 IMAD R1, R1, R2, R3", "UIADD3 UR1, UR1, 1",
                     "BRA 0x0", QGMMA, "SHFL.BFLY PT, R1, R2, 0x1, 0x1f", "MUFU.EX2 R1, R1"),
                pipe_of)  # fmt: skip
    assert found == {
        "ALU": 1,
        "IMAD": 1,
        "uniform": 1,
        "control": 1,
        "tensor": 1,
        "LSU": 1,
        "XU": 1,
    }


# -- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "clocks"),
    [
        (["FFMA R1, R1, R1, R1"] * 4, 4),  # one a clock: two halves, two clocks each
        (["FMNMX R1, R1, R1, !PT"] * 4, 8),  # two clocks each
        (["IMAD R1, R1, R1, R1"] * 4, 8),  # only one half
        (["FMNMX R1, R1, R1, !PT", "FFMA R1, R1, R1, R1"] * 4, 8),  # side by side
        (["MUFU.EX2 R1, R1"] * 2, 16),
        (["UIADD3 UR1, UR1, 0x1, URZ"] * 5, 5),
        ([("FADD R1, R1, R1", {"stall": 6}), "FADD R2, R2, R2"], 7),
        # A load's result after 33 clocks, its use, and the next load.
        ([("LDS R1, [R2]", {"sets": 0}), ("FADD R3, R1, R1", {"waits": 1})], 34),
        # The product arrives after 8, takes 128, and the wait ends 24 later; then one more issue.
        ([QGMMA, WAIT], 8 + 128 + 24 + 1),
        # Four products in a row.
        ([QGMMA] * 4 + [WAIT], 8 + 4 * 128 + 24 + 1),
    ],
)
def test_clocks_of_one_warp(lines: list[str | tuple[str, dict[str, int]]], clocks: float) -> None:
    assert run(code(*lines)).iteration == pytest.approx(clocks, rel=0.01)


def test_two_warps_share_the_pipes() -> None:
    """Two of four ALU instructions each: 16 clocks, so an iteration ends every 8."""
    assert run(code(*["FMNMX R1, R1, R1, !PT"] * 4), 2).iteration == pytest.approx(8, rel=0.01)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_two_warps_fill_the_tensor_cores(discipline: str) -> None:
    """One's wait is the other's product: the products alone count."""
    found = run(code(QGMMA, WAIT), 2, discipline=discipline)
    assert found.iteration == pytest.approx(128, rel=0.01)
    assert found.tensor == pytest.approx(1, abs=0.02)


def test_batches_keep_warps_out_of_phase() -> None:
    """Products of 512 clocks and 300 of other work. In phase both products end together, after
    1024; in batches one's work lies under the other's products."""
    work = [("NOP", {"stall": 15})] * 20
    trace = code(*[QGMMA] * 4, WAIT, *work)
    turns = run(trace, 2, discipline="by turns", clocks=100_000).iteration * 2
    batches = run(trace, 2, discipline="in batches", clocks=100_000).iteration * 2
    # The last product of the first ends at 1024 - 128, that of the second at 1024.
    assert turns > 1024 + 128
    assert batches == pytest.approx(1024, rel=0.01)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_turns_keep_warps_out_of_phase(discipline: str) -> None:
    """The same work; a warp's turn is over when its products are: 512 clocks, the wait of 24, the
    barrier of 22, and what begins a product, whatever the tensor cores would do with two."""
    work = [("NOP", {"stall": 15})] * 20
    turn, passed = "BAR.SYNC.DEFER_BLOCKING R3, 0x100", "BAR.ARV R4, 0x100"
    trace = code(turn, *[QGMMA] * 4, WAIT, passed, *work)
    found = run(trace, 2, discipline=discipline, clocks=100_000).iteration
    assert 512 + 24 + 22 <= found <= 512 + 24 + 22 + 20


def test_a_role_that_follows() -> None:
    """It holds the others up where its work takes longer, and costs little where it does not."""
    math = code(("FADD R1, R1, R1", {"stall": 15})) * 10  # 150 clocks
    for count, expected in ((4, 150), (60, 450)):
        slow = code(("FADD R2, R2, R2", {"stall": 15})) * count
        follower = Follower(lambda trace=slow: trace, 0.5, 2)  # type: ignore[misc]
        found = simulate([lambda: math, lambda: math], follower=follower, clocks=60_000)
        # One of its iterations, 60 or 900 clocks, for two of theirs.
        assert found.iteration * 2 == pytest.approx(expected, rel=0.05)


def test_a_barrier_waits_for_the_last() -> None:
    """22 clocks behind the slower's arrival, which comes after a stall of 10."""
    slow = code(("FADD R1, R1, R1", {"stall": 10}), "BAR.SYNC.DEFER_BLOCKING 0x1, 0x40")
    fast = code(("FADD R1, R1, R1", {"stall": 2}), "BAR.SYNC.DEFER_BLOCKING 0x1, 0x40")
    found = simulate([lambda: slow, lambda: fast])
    assert found.iteration * 2 == pytest.approx(10 + 22, rel=0.01)


def test_a_barrier_of_one_warpgroup_waits_for_nobody_else() -> None:
    slow = code(("FADD R1, R1, R1", {"stall": 10}), "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80")
    fast = code(("FADD R1, R1, R1", {"stall": 2}), "BAR.SYNC.DEFER_BLOCKING 0x3, 0x80")
    found = simulate([lambda: slow, lambda: fast])
    assert found.iteration == simulate([lambda: fast]).iteration, "the fast one goes on as if alone"


def test_loads_take_what_is_assumed() -> None:
    trace = code(("LDG.E R1, [R2]", {"sets": 0}), ("FADD R3, R1, R1", {"waits": 1}))
    for clocks in (300, 600):
        assert run(trace, load_clocks=clocks).iteration == pytest.approx(clocks + 1, rel=0.01)


@pytest.mark.parametrize(
    ("text", "clocks"),
    [
        (QGMMA, 128),
        ("HGMMA.64x32x16.F32.BF16 R152, gdesc[UR4], RZ, !UPT", 24),  # 3 KB at 128 bytes a clock
        ("HGMMA.64x64x16.F32.BF16 R152, gdesc[UR4], RZ, !UPT", 32),
        ("HGMMA.64x32x16.F32.BF16 R152, R24, gdesc[UR4], R152", 16),  # A lies in registers
        ("FFMA R1, R1, R1, R1", 0),
    ],
)
def test_products(text: str, clocks: float) -> None:
    assert product_clocks(code(text)[0]) == clocks


def test_occupancy() -> None:
    assert blocks_of_an_sm(384, 168, 185_344) == 1
    assert blocks_of_an_sm(384, 72, 60_416) == 2  # 27648 of 65536 registers each
    assert blocks_of_an_sm(1024, 56, 99_336) == 1
    assert blocks_of_an_sm(128, 32, 100 * 1024) == 2  # and 1 KB of the system's each
    assert blocks_of_an_sm(128, 32, 227 * 1024) == 1
