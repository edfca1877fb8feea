"""What ST and STB take on Hopper: tensor cores, no spills, room in shared memory. Needs a compiler, but no GPU."""

import pytest

from stateflow_kernels.aot import overwritten
from stateflow_kernels.assembler import touched, undefined, under_way
from tests.kernels.aot_testing import TRITONS, archs_of, compile_ahead, takes_gluon

pytestmark = pytest.mark.slow
SHARED_BYTES = 227 * 1024  # of a program on sm_90


@pytest.fixture(scope="module", params=TRITONS)
def reports(request) -> list[dict]:
    return compile_ahead(request.param, "gated_delta_aot")


def test_every_kernel_compiles_for_every_architecture(reports):
    names = {(r["case"].split(",")[0], r["arch"]) for r in reports}
    kernels = {"transition", "transition_backward", "pre", "out", "out_backward"}
    kernels |= {"query_backward", "solve_backward", "key_backward", "compose"}
    specialised = {"transition_kernel", "transition_backward_kernel", "transition_out_kernel", "gradients_kernel"}
    specialised |= {"pre_kernel", "transition_maps_kernel", "transition_backward_maps_kernel"}
    specialised = specialised if takes_gluon(reports) else set()
    expected = {(kernel, arch) for kernel in kernels for arch in archs_of(reports)}
    assert names == expected | {(kernel, 90) for kernel in specialised}


def test_the_walks_use_tensor_cores_without_spilling(reports):
    walks = [r for r in reports if r["case"].startswith("transition") and r["arch"] == 90]
    walks = [r for r in walks if "specialised" not in r["case"]]
    assert len(walks) == 6 and all(r["num_warps"] == 4 for r in walks)
    assert not [r for r in walks if not r["wgmma"] or r["spill_bytes"] or r["shared_bytes"] > SHARED_BYTES]


def test_the_kernels_in_gluon_spill_next_to_nothing(reports):
    """They take so much shared memory that local memory has no cache: a load of a spilled register takes 450 cycles."""
    walks = [r for r in reports if "specialised" in r["case"] and r["case"].startswith("transition")]
    assert len(walks) == 11 * takes_gluon(reports)
    assert not [(r["case"], r["spill_bytes"]) for r in walks if r["spill_bytes"]]
    gradients = [r for r in reports if r["case"].startswith("gradients_kernel")]
    assert not [(r["case"], r["spill_bytes"]) for r in gradients if r["spill_bytes"] > 16]


def test_pre_spills_nothing(reports):
    """A program has 4 warps: four fit a multiprocessor with 128 registers a thread and this much shared memory."""
    prepares = [r for r in reports if r["case"].split(",")[0] == "pre_kernel"]
    assert len(prepares) == 4 * takes_gluon(reports)
    assert not [
        r for r in prepares if r["spill_bytes"] or r["registers"] > 128 or r["shared_bytes"] > SHARED_BYTES // 4
    ]


def test_no_product_reads_a_buffer_that_is_being_filled(reports):
    assert not [r for r in reports if r["overwritten"]]


def test_no_register_is_read_that_nothing_wrote(reports):
    assert not [(r["case"], r["undefined"]) for r in reports if r["undefined"]]


def test_a_register_that_nothing_wrote_is_found():
    """As ptxas 12.8.93 assembled a product of 64 x 32 and 32 x 64: the low half of the left descriptor is never set."""
    lines = """
        /*1b60*/                   UIADD3 UR4, UR24, 0x1000, URZ ;             /* 0x0000100018047890 */
        /*1bf0*/                   USGXT.U32 UR30, UR4, 0xe ;                  /* 0x0000000e041e789a */
        /*1d00*/                   UIADD3 UR7, UP0, UR6, 0x2, URZ ;            /* 0x0000000206077890 */
        /*1d60*/              @UP1 UIADD3.X UR5, UR6, -0x7fffffe0, URZ, UP0, !UPT ;
        /*1da0*/                   UIADD3.64 UR8, UR4, 0x2, URZ ;
        /*1e20*/                   HGMMA.64x64x16.F32.BF16 R56, R40, gdesc[UR6], R56, gsb0 ;
        /*1e30*/                   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR6], R56, gsb0 ;
        /*1e40*/                   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR32], R56, gsb0 ;"""
    start = "        /*0010*/                   UMOV UR24, 0x400 ;"
    assert undefined(start + lines) == ["1d00 UIADD3 UR6", "1e40 HGMMA.64x64x16.F32.BF16 UR32"]
    assert undefined(start + start.replace("UR24", "UR6") + lines) == ["1e40 HGMMA.64x64x16.F32.BF16 UR32"]


def test_no_accumulator_is_touched_under_its_products(reports):
    assert not [(r["case"], r["touched"]) for r in reports if r["touched"]]


@pytest.mark.parametrize(
    ("instruction", "found"),
    [
        ("FMUL R3, R60, R3", ["R60"]),
        ("LDS.64 R54, [R10+0x40]", []),
        ("LDS.64 R55, [R10+0x40]", ["R56"]),
        ("LDS.64 R54, [R87+0x40]", ["R87"]),
        ("STSM.16.M88.4 [R10+0x20000], R53", ["R56"]),
        ("FMUL R24, R24, R88", []),  # of the group that has been waited for
    ],
)
def test_an_accumulator_that_is_touched_under_its_products_is_found(instruction, found):
    """Two groups are under way, one has been waited for; at the end all have been."""
    lines = """
        /*2220*/                   HGMMA.64x64x16.F32 R24, gdesc[UR12], RZ, !UPT ;
        /*2260*/                   HGMMA.64x64x16.F32 R24, gdesc[UR52], R24, gsb0 ;
        /*2280*/                   HGMMA.64x64x16.F32 R56, gdesc[UR44].tnspB, R56 ;
        /*22d0*/                   HGMMA.64x64x16.F32 R56, gdesc[UR24].tnspB, R56, gsb0 ;
        /*23a0*/                   HGMMA.64x64x16.F32 R56, gdesc[UR44].tnspA.tnspB, R56, gsb0 ;
        /*2780*/                   WARPGROUP.DEPBAR.LE gsb0, 0x2 ;
        /*2790*/                   INSTRUCTION ;
        /*33a0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*33b0*/                   FMUL R56, R56, R57 ;"""
    operation = instruction.split()[0]
    expected = [f"2790 {operation} {register}" for register in found]
    assert touched(lines.replace("INSTRUCTION", instruction)) == expected
    assert touched(lines.replace("INSTRUCTION", "NOP").replace("DEPBAR.LE gsb0, 0x0", "ARRIVE")) == ["33b0 FMUL R56"]


def test_no_tile_is_given_back_while_loads_of_it_are_under_way(reports):
    assert not [(r["case"], r["under_way"]) for r in reports if r["under_way"]]


def _encoded(address: int, instruction: str, releases: int = 7, waits: int = 0) -> str:
    """An instruction with the scoreboard that its result releases and a mask of those that it waits for."""
    word = releases << 46 | waits << 52 | 0x000E000000000000 & ~(7 << 46)
    return f"  /*{address:04x}*/         {instruction} ;  /* 0x0000000000007918 */\n   /* 0x{word:016x} */\n"


LOAD = ("LDSM.16.M88.4 R64, [R128+UR28+0x1a000]", 4)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ([LOAD], True),
        ([LOAD, ("FMUL R2, R64, R3", 7, 1 << 4)], False),  # waited for
        ([LOAD, ("FMUL R2, R3, R3", 7, 1 << 2)], True),  # something else was
        (
            [("LDSM.16.M88.4 R64, [R128]", 7), ("SHFL.BFLY PT, R7, R6, 0x1, 0x1f", 1), ("FADD R1, R7, R1", 7, 1 << 1)],
            False,
        ),
        ([("SHFL.BFLY PT, R7, R6, 0x1, 0x1f", 1), LOAD, ("FADD R1, R7, R1", 7, 1 << 1)], True),
        ([("LDS R64, [R128+0x1a000]", 4)], False),  # a number, not a tile
    ],
)
def test_a_load_under_way_where_its_place_is_given_back_is_found(code, found):
    """As the last use of k was assembled for K = 64, V = 128 and float16."""
    code = [*code, ("BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", 7)]
    told = [*code, ("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR28+0x270a0], RZ", 7)]
    told, only_barrier = ("".join(_encoded(16 * i, *one) for i, one in enumerate(lines)) for lines in (told, code))
    places = [
        f"{16 * i:04x} {LOAD[0].split()[0]}, barrier {16 * len(code) - 16:04x}"
        for i, one in enumerate(code)
        if one == LOAD
    ]
    assert under_way(told) == (places if found else [])
    assert under_way(only_barrier) == []  # nothing is given back


def test_a_single_buffer_under_products_in_flight_is_found():
    lines = """
        %a_1 = ttg.local_alloc : () -> !ttg.memdesc<1x64x64xbf16, #shared, #smem, mutable>
        %b_2 = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xbf16, #shared, #smem, mutable>
        %r:2 = scf.for %i = %c0 to %c2 step %c1 iter_args(%acc = %zero) -> (tensor<64x64xf32, #mma>) : i32 {
          %a_3 = ttg.memdesc_index %a_1[%j] : !ttg.memdesc<1x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
          %b_4 = ttg.memdesc_index %b_2[%j] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
          %b_5 = ttg.memdesc_trans %b_4 {order = array<i32: 1, 0>}
          %d_6 = ttng.warp_group_dot %a_3, %b_5, %acc {inputPrecision = 0 : i32, isAsync = true}
          %d_7:3 = ttng.warp_group_dot_wait %d_6, %a_3, %b_5 {pendings = PENDING : i32}
          scf.yield %d_7#0
        }"""
    assert overwritten(lines.replace("PENDING", "1")) == ["%a_1"]
    assert overwritten(lines.replace("PENDING", "0")) == []
    assert overwritten(lines.replace("PENDING", "1").replace("<1x", "<2x")) == []


def test_all_fit_into_shared_memory(reports):
    assert not [r for r in reports if r["arch"] == 90 and r["shared_bytes"] > SHARED_BYTES]
