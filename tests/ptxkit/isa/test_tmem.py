"""Tensor memory from the side of the warps: who gets which columns, what ld and st move, and what their waits order."""

import itertools

import pytest
import torch
from assembly import kernel, kinds, reports
from tensor_core import LOADED, SEEDS, STORED, UNDER_ANY_SCHEDULE, float_bits, pattern, run, vector

from ptxkit.launches import launch
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

QUIET = {"commit": "", "wait": ""}  # nothing for the tensor core to do

# shape -> (lanes, columns of a repeat, registers of a repeat, (thread, register) -> (lane, column))
SHAPES = {
    "32x32b": (32, 1, 1, lambda t, r: (t, r)),
    "16x64b": (16, 2, 1, lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r)),
    "16x128b": (16, 4, 2, lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2))),
    "16x256b": (16, 8, 4, lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4))),
    "16x32bx2": (16, 1, 1, lambda t, r: (t % 16, r)),
}
MOVES = [(shape, 1 << n) for shape in SHAPES for n in range(8) if SHAPES[shape][2] << n <= 128]


def cells_of(shape, repeat, packed=False, imm=0):
    """[thread][register] -> its cells (lane, column), relative to the address."""
    spot, registers = SHAPES[shape][3], SHAPES[shape][2] * repeat
    table = []
    for t in range(32):
        half = imm if shape == "16x32bx2" and t >= 16 else 0
        spots = [spot(t, r) for r in range(registers)]
        pairs = [[(lane, half + 2 * c), (lane, half + 2 * c + 1)] for lane, c in spots]
        table.append(pairs if packed else [[(lane, half + c)] for lane, c in spots])
    return table


def spelled(what, shape, repeat, packed, imm, address="%r9"):
    registers = vector(0, SHAPES[shape][2] * repeat)
    modifier = {"ld": ".pack::16b", "st": ".unpack::16b"}[what] if packed else ""
    second = f", {imm}" if shape == "16x32bx2" else ""
    name = f"tcgen05.{what}.sync.aligned.{shape}.x{repeat}{modifier}.b32"
    return f"{name} {registers}, [{address}]{second};" if what == "ld" else f"{name} [{address}]{second}, {registers};"


def rows(verb, count, base):
    """Move registers of this thread from or to its row in global memory."""
    quads = [(".v4.b32", vector(n, 4), n) for n in range(0, count - 3, 4)]
    moves = quads + [(".b32", f"%x{n}", n) for n in range(count // 4 * 4, count)]
    if verb == "ld":
        return "\n".join(f"ld.global{kind} {registers}, [{base}+{4 * n}];" for kind, registers, n in moves)
    return "\n".join(f"st.global{kind} [{base}+{4 * n}], {registers};" for kind, registers, n in moves)


def columns_for(shape, repeat, packed, imm=0):
    wanted = SHAPES[shape][1] * repeat * (2 if packed else 1) + imm
    return max(32, 1 << (wanted - 1).bit_length(), 1 << (SHAPES[shape][2] * repeat - 1).bit_length())


CASES = [(s, n, p) for (s, n), p in itertools.product(MOVES, (False, True)) if SHAPES[s][1] * n * (1 + p) <= 256]


def test_cells_worked_out_by_hand():
    assert cells_of("32x32b", 8)[9][5] == [(9, 5)]
    assert cells_of("16x64b", 4)[7][3] == [(9, 7)]
    assert cells_of("16x128b", 4)[13][5] == [(11, 9)]
    assert cells_of("16x256b", 4)[13][11] == [(11, 19)]
    assert cells_of("16x32bx2", 4, imm=32)[21][3] == [(5, 35)]
    assert cells_of("16x32bx2", 4, packed=True, imm=8)[21][3] == [(5, 14), (5, 15)]


def signed(x):
    return x - 2**32 if x >= 2**31 else x


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("shape, repeat, packed", CASES)
def test_ld_gives_each_register_its_cells(shape, repeat, packed):
    imm = SHAPES[shape][1] * repeat * (1 + packed) if shape == "16x32bx2" else 0
    columns, table = columns_for(shape, repeat, packed, imm), cells_of(shape, repeat, packed, imm)
    before = pattern(1, columns)[0].tolist()
    for half in (0, 16)[: 1 + (SHAPES[shape][0] == 16)]:
        ld = spelled("ld", shape, repeat, packed, imm, f"%r9+{half << 16}")
        out, _ = run("", columns=columns, load=ld + LOADED + rows("st", len(table[0]), "%rd7"), **QUIET)
        for warp, t in itertools.product(range(4), (0, 1, 2, 5, 15, 16, 21, 31)):
            cells = [[before[32 * warp + half + lane][c] for lane, c in spots] for spots in table[t]]
            wanted = [signed(x[0] & 0xFFFF | (x[1] & 0xFFFF) << 16) if packed else x[0] for x in cells]
            assert out[0, 32 * warp + t, : len(wanted)].tolist() == wanted


@pytest.mark.spread(every=3, first=1)
@pytest.mark.parametrize("shape, repeat, packed", CASES)
def test_st_gives_each_cell_its_register(shape, repeat, packed):
    imm = SHAPES[shape][1] * repeat * (1 + packed) if shape == "16x32bx2" else 0
    columns, table = columns_for(shape, repeat, packed, imm), cells_of(shape, repeat, packed, imm)
    st = spelled("st", shape, repeat, packed, imm)
    out, _ = run("", columns=columns, stored=STORED + rows("ld", len(table[0]), "%rd6") + st + STORED, **QUIET)
    before = pattern(1, columns)[0].tolist()
    wanted = pattern(1, columns)[0].tolist()
    for warp, t in itertools.product(range(4), range(32)):
        for r, spots in enumerate(table[t]):
            value = before[32 * warp + t][r]
            for n, (lane, column) in enumerate(spots):  # unpacked: poison above the half
                wanted[32 * warp + lane][column] = (value >> 16 * n & 0xFFFF) - 65536 if packed else value
    assert out[0].tolist() == wanted


def test_what_pack_takes_apart_unpack_puts_together():
    move = spelled("ld", "16x128b", 8, True, 0) + LOADED + spelled("st", "16x128b", 8, False, 0) + STORED
    out, _ = run("", stored=STORED + move, **QUIET)
    before = pattern(1, 64)[0, :, :64]
    packed = (before[:, ::2] & 0xFFFF) | before[:, 1::2] << 16
    wanted = before.clone()
    for warp in range(4):
        wanted[32 * warp : 32 * warp + 16, :32] = packed[32 * warp : 32 * warp + 16, :32]
    assert torch.equal(out[0], wanted)


# ---- ld.red


@pytest.mark.parametrize("target", ["sm_103a", "sm_110a"])
@pytest.mark.parametrize("op, type_, flags, expected", [
    ("min", "u32", "", lambda x: x.view(torch.uint32).to(torch.int64).amin(-1)),
    ("max", "u32", "", lambda x: x.view(torch.uint32).to(torch.int64).amax(-1)),
    ("min", "s32", "", lambda x: x.amin(-1)),
    ("max", "s32", "", lambda x: x.amax(-1)),
    ("min", "f32", "", lambda x: float_bits(x.view(torch.float32).nan_to_num(nan=9e9).amin(-1))),
    ("max", "f32", "", lambda x: float_bits(x.view(torch.float32).nan_to_num(nan=-9e9).amax(-1))),
    ("max", "f32", ".abs", lambda x: float_bits(x.view(torch.float32).nan_to_num(nan=0).abs().amax(-1))),
    ("max", "f32", ".NaN", lambda x: float_bits(x.view(torch.float32).amax(-1))),
])
def test_ld_red_also_reduces_what_it_loads(op, type_, flags, expected, target):
    cells = float_bits(torch.randn(1, 128, 64, generator=torch.Generator().manual_seed(1)))
    if type_ == "f32":
        cells[0, 5, 2] = cells[0, 77, 7] = 0x7FC00000
    ld = f"tcgen05.ld.red.sync.aligned.32x32b.x8.{op}{flags}.{type_} {vector(0, 8)}, %x8, [%r9];"
    out, _ = run("", cells=cells, load=ld + LOADED + rows("st", 9, "%rd7"), target=target, **QUIET)
    assert torch.equal(out[0, :, :8], cells[0, :, :8])
    wanted = expected(cells[0, :, :8].contiguous()).to(torch.int64).to(torch.int32)
    if flags == ".NaN":
        wanted[[5, 77]] = 0x7FFFFFFF
    assert torch.equal(out[0, :, 8], wanted)


def test_minus_zero_is_less_than_zero():
    cells = torch.zeros(1, 128, 64, dtype=torch.int32)
    cells[0, :, 1] = -(2**31)
    for op, wanted in (("min", -(2**31)), ("max", 0)):
        ld = f"tcgen05.ld.red.sync.aligned.32x32b.x2.{op}.f32 {vector(0, 2)}, %x2, [%r9];"
        out, _ = run("", cells=cells, load=ld + LOADED + rows("st", 3, "%rd7"), target="sm_103a", **QUIET)
        assert out[0, :, 2].eq(wanted).all()


@pytest.mark.parametrize("target, instruction, says", [
    ("sm_100a", "ld.red.sync.aligned.32x32b.x2.max.f32 {%x0, %x1}, %x2, [%r9];", "sm_103a"),
    ("sm_103a", "ld.red.sync.aligned.16x32bx2.x2.max.f32 {%x0, %x1}, %x2, [%r9], 2;", "ld.red.32x32b"),
    ("sm_103a", "ld.red.sync.aligned.32x32b.x1.max.f32 {%x0}, %x2, [%r9];", ".x2 and more"),
    ("sm_103a", "ld.red.sync.aligned.32x32b.x2.max.abs.s32 {%x0, %x1}, %x2, [%r9];", ".abs or .NaN with .s32"),
    ("sm_100a", "ld.sync.aligned.32x32b.x2.b32 {%x0, %x1, %x2}, [%r9];", "2 for .32x32b.x2"),
    ("sm_100a", f"ld.sync.aligned.16x256b.x64.b32 {vector(0, 128)}, [%r9];", "of at most 128"),
    ("sm_100a", "ld.sync.aligned.16x32bx2.x2.b32 {%x0, %x1}, [%r9];", "an immediate after the address"),
    ("sm_100a", "ld.sync.aligned.16x512b.x2.b32 {%x0, %x1}, [%r9];", "16x32bx2"),
    ("sm_100a", "ld.sync.aligned.32x32b.x2.unpack::16b.b32 {%x0, %x1}, [%r9];", "unpack::16b"),
    ("sm_100a", "alloc.cta_group::3.sync.aligned.b32 [smem], 32;", "cta_group::1"),
])
def test_forms_that_do_not_exist_are_refused(target, instruction, says):
    with pytest.raises(PtxError) as caught:
        run("", load="tcgen05." + instruction, target=target, **QUIET)
    assert says in str(caught.value)


# ---- what the waits order


AGAIN = f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r9], {vector(0, 32)};"
LOAD = f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {vector(32, 32)}, [%r9];"


ORDERS = {
    "st, wait::st, ld": (STORED + LOAD + LOADED, []),
    "st, ld": (LOAD + LOADED + STORED, ["race-write-read"]),
    "st, wait::ld, ld": (LOADED + LOAD + LOADED + STORED, ["race-write-read"]),
    "st, wait::st, st": (STORED + AGAIN + STORED, []),
    "st, st": (AGAIN + STORED, ["race-write-write"]),
    "ld, wait::ld, st": (STORED + LOAD + LOADED + AGAIN + STORED, []),
    "ld, st": (STORED + LOAD + AGAIN + STORED, ["race-read-write"]),
    "ld, wait::st, st": (STORED + LOAD + STORED + AGAIN + STORED, ["race-read-write"]),
    "ld, use, st": (STORED + LOAD + "add.u32 %x0, %x63, 1;" + AGAIN + STORED, []),
}


def quiet(strict=False, **parts):
    """Return the Run of warps that only move what is in tensor memory."""
    return run("", strict=strict, **QUIET, **parts)[1]


@UNDER_ANY_SCHEDULE
@pytest.mark.parametrize("stored, expected", ORDERS.values(), ids=ORDERS)
def test_a_warps_own_accesses_are_ordered_by_their_waits_alone(stored, expected, schedule):
    reports(quiet(stored=stored, **schedule), expected)


ALLOC = "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 64;"
FREE = "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 64;"


def ld(shape, registers, address, second=""):
    return f"tcgen05.ld.sync.aligned.{shape}.b32 {vector(0, registers)}, [{address}]{second}; {LOADED}"


SLAB = "warp 3 of the CTA may touch lanes 96 to 127, from lane 96"
REACH = [  # what warp 3 may not touch
    ("xor.b32 %r10, %r9, 2097152;", "32x32b.x1", f"lane 64: {SLAB}"),
    ("add.u32 %r10, %r9, 1048576;", "32x32b.x1", f"lane 112: {SLAB}"),
    ("add.u32 %r10, %r9, 524288;", "16x64b.x1", f"{SLAB} or 16 more"),
    ("add.u32 %r10, %r9, 64;", "32x32b.x1", "columns 512 to 512"),
    ("add.u32 %r10, %r9, 63;", "16x64b.x1", "columns 511 to 512"),
    ("add.u32 %r10, %r8, 6225920;", "32x32b.x1", "lane 95: warp 3"),
]
PART = "setp.eq.u32 %p7, %r0, 3;\n @{}%p7 {}"
FAULTS = {
    "a race names both instructions": (
        dict(stored=LOAD + LOADED + STORED), ["race-write-read"],
        dict(says="an asynchronous read of tensor memory", place="tcgen05.ld", other="tcgen05.st"),
    ),
    "and what the other one is":
        (dict(stored=LOAD + LOADED + STORED), ["race-write-read"], dict(says="a tcgen05.st of warp")),
    "a load without a wait is not over when its columns are freed":
        (dict(load=ld("32x32b.x1", 1, "%r9").removesuffix(LOADED)), ["race-read-write"], dict(place=FREE)),
    "new columns hold nothing":
        (dict(alloc=ALLOC, columns=32, load=LOAD.replace("[%r9]", "[%r9+32]") + LOADED, end="bar.sync 0;" + FREE),
         ["uninitialised"], {}),
    "the second half is not allocated":
        (dict(load=ld("16x32bx2.x2", 2, "%r9", ", 63")), ["tmem"], dict(says="second half takes columns 511 to 512")),
    "the second half lies in another lane":
        (dict(load=ld("16x32bx2.x2", 2, "%r9", ", 65536")), ["unsupported"], dict(says="another lane")),
    "lanes differ in the address":
        (dict(load="add.u32 %r10, %r9, %r0;" + ld("32x32b.x1", 1, "%r10")), ["tmem"],
         dict(says="the lanes differ in the address")),
    "a lane has exited": (dict(load=PART.format("", "exit;\n" + LOAD)), ["tmem"], dict(says="lanes fffffff7 do")),
    "a lane does not take part": (dict(load=PART.format("!", LOAD)), {"diverged"}, {}),
    **{f"{shape} {change}": (
        dict(load=f"setp.eq.u32 %p7, %r2, 3; {change} @%p7 " + ld(shape, 1, "%r10")), ["tmem"], dict(says=says)
    ) for change, shape, says in REACH},
}


@pytest.mark.parametrize("parts, found, named", FAULTS.values(), ids=FAULTS)
def test_what_a_warp_does_wrong_is_found(parts, found, named):
    reports(quiet(**parts), found, **named)


@UNDER_ANY_SCHEDULE
@pytest.mark.parametrize("end, found", [
    ("bar.sync 0;" + FREE, []), (FREE, {"race-read-write", "race-write-write", "tmem"}),
], ids=["a barrier", "no barrier"])                                            # a slower warp may find its columns gone
def test_columns_are_freed_after_the_other_warps_have_read_them(end, found, schedule):
    reports(quiet(end=end, **schedule), found)


REUSED = """
    setp.lt.u32 %p4, %r0, 32;
    setp.eq.u32 %p5, %r0, 32;
    @%p5 mbarrier.init.shared::cta.b64 [smem+16], 1;
    @%p5 fence.mbarrier_init.release.cluster;
    @%p4 {write}
    {before}
    ld.shared.u32 %r8, [smem];
    {between}
    @%p5 mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem+16], 16;
    @%p5 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [smem], [%rd1], 16, [smem+16];
WAIT:
    @%p5 mbarrier.try_wait.parity.shared::cta.b64 %p6, [smem+16], 0;
    @!%p5 setp.eq.u32 %p6, 0, 0;
    @!%p6 bra WAIT;
    @%p4 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
"""
WRITTEN_AGAIN = "bar.warp.sync 0xffffffff; @%p2 ld.shared.u32 %r8, [smem]; @%p2 st.shared.u32 [smem], %r8;"
ALLOCATED = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32;"


@UNDER_ANY_SCHEDULE
@pytest.mark.parametrize(("write", "before", "between", "found"), [
    (ALLOCATED, "bar.sync 0;", "bar.sync 0;", set()),
    (f"{ALLOCATED} {WRITTEN_AGAIN}", "bar.sync 0;", "bar.sync 0;", {"proxy"}),
    (ALLOCATED, "bar.sync 0;", "", {"race-read-write"}),
])
def test_a_copy_to_where_an_allocation_has_left_its_address_needs_no_proxy_fence(
    write, before, between, found, schedule
):
    """Triton gives the word to a buffer as soon as all warps have read it: a barrier orders the two."""
    body = "setp.eq.u32 %p2, %r0, 0;\n" + REUSED.format(write=write, before=before, between=between)
    result = launch(kernel(body, target="sm_100a"), grid=1, block=64, args=[torch.zeros(64)], **schedule)
    assert set(kinds(result)) == found


def test_columns_forget_what_they_held_when_they_are_freed():
    load = f"bar.sync 0; {FREE} {ALLOC} bar.sync 0; {LOAD} {LOADED} st.global.v4.b32 [%rd7], {vector(32, 4)};"
    out, result = run("", load=load, strict=False, **QUIET)
    assert kinds(result) == ["uninitialised"] and out[0, :, :4].eq(-1).all()


@pytest.mark.parametrize("change, expected", [("mov.u32 %r10, %r8;", []), ("xor.b32 %r10, %r9, 2097152;", ["tmem"])])
def test_a_warp_stays_in_its_own_slab_which_lane_0_stands_for(change, expected):
    store = change + AGAIN.replace("%r9", "%r10")
    out, result = run("", stored=STORED + store + STORED, strict=False, **QUIET)
    assert kinds(result) == expected
    wanted = pattern(1, 64)
    wanted[0, :, :32] = wanted[0, :, 32:]  # the registers hold what was stored last
    assert torch.equal(out, wanted)


# ---- allocation


def alone(body, block=32, grid=1, cluster=1, target="sm_100a", shared=4096, **options):
    """Return a kernel of warps that allocate; `out` is written from %r20, %r21, ... of thread 0."""
    out = torch.full((grid, 16), -1, dtype=torch.int32)
    store = "".join(f"@%p2 st.global.u32 [%rd3+{4 * n}], %r{20 + n};\n" for n in range(8))
    ptx = kernel(f"""
    mov.u32 %r4, %ctaid.x;
    mul.wide.u32 %rd4, %r4, 64;
    add.s64 %rd3, %rd1, %rd4;
    shr.u32 %r2, %r0, 5;
    setp.eq.u32 %p1, %r2, 0;
    setp.eq.u32 %p2, %r0, 0;
    {"".join(f"mov.u32 %r{20 + n}, 0;" for n in range(8))}
    {body}
    {store}
""", target=target, shared=shared)
    return out[:, :8], launch(ptx, grid=grid, block=block, cluster=cluster, args=[out], **options)


def alloc(number, columns, group=1):
    """Put the address of new columns into %r<20 + number>."""
    return f"""tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [smem+{4 * number}], {columns};
    bar.warp.sync 0xffffffff;
    ld.shared.u32 %r{20 + number}, [smem+{4 * number}];
    """


def dealloc(number, columns, group=1):
    return f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r{20 + number}, {columns};\n"


GIVE_UP = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"


SIX = alloc(0, 128) + alloc(1, 64) + alloc(2, 32) + dealloc(1, 64)
SIX += alloc(3, 32) + alloc(4, 32) + alloc(5, 32) + GIVE_UP + dealloc(0, 128)
SIX += "".join(dealloc(n, 32) for n in (2, 3, 4, 5))


def test_allocations_take_the_last_block_of_those_that_are_as_small_as_can_be():
    out, result = alone(SIX)
    assert not result.findings
    assert out[0, :6].tolist() == [384, 320, 288, 256, 352, 320]
    assert result.counters["tmem_columns"] == 128 + 3 * 32 + 32


def test_a_seed_varies_where_columns_begin():
    starts = set()
    for seed in SEEDS:
        out, result = alone(SIX, schedule=seed)
        assert not result.findings and result.counters["tmem_columns"] == 128 + 3 * 32 + 32
        sizes = dict(zip(out[0, [0, 2, 3, 4, 5]].tolist(), (128, 32, 32, 32, 32)))  # those that were held together
        held = [range(first, first + size) for first, size in sizes.items()]
        assert len(set().union(*held)) == sum(map(len, held)) == 128 + 4 * 32
        assert all(block.start % len(block) == 0 and block.stop <= 512 for block in held)
        starts.add(out[0, 0].item())
    assert len(starts) > 1


@pytest.mark.parametrize("schedule", [{}, {"early": True}], ids=str)
def test_a_kernel_that_takes_its_columns_to_begin_at_0_is_found_out(schedule):
    reports(quiet(stored="sub.u32 %r9, %r9, %r8;" + AGAIN + STORED, **schedule), {"tmem"}, "takes columns 0 to 31")


def test_a_generic_address_takes_the_result_too():
    into = "tcgen05.alloc.cta_group::1.sync.aligned.b32 [%rd1+4], 32;\n bar.warp.sync 0xffffffff;\n"
    convert = "mov.u64 %rd2, smem;\n cvta.shared.u64 %rd1, %rd2;\n"
    out, result = alone(convert + into + "ld.shared.u32 %r20, [smem+4];\n" + dealloc(0, 32))
    assert not result.findings and out[0, 0] == 480
    elsewhere = "mov.u64 %rd1, %rd3;\n" + into + "mov.u32 %r20, 480;\n" + dealloc(0, 32)
    reports(alone(elsewhere)[1], ["out-of-bounds"], "is elsewhere")


@UNDER_ANY_SCHEDULE
def test_an_allocation_waits_until_there_is_room(schedule):
    body = f"""
    @!%p1 bra second;
    {alloc(0, 512)}
    bar.sync 1;
    nanosleep.u32 100;
    {dealloc(0, 512)}
    bra done;
second:
    bar.sync 1;
    {alloc(1, 256)}
    {dealloc(1, 256)}
done:
    """
    _, result = alone(body, block=64, **schedule)
    assert not result.findings and result.counters["tmem_columns"] == 512


def wait_for_room(n):
    store = f"st.global.u32 [%rd3+{4 * n}], %r{20 + n};\n"
    return f"bar.sync 1;\n {alloc(n, 256)} bar.sync 2, 64;\n {store} {dealloc(n, 256)} exit;\n"


@UNDER_ANY_SCHEDULE
def test_warps_that_wait_for_room_get_different_columns(schedule):
    body = f"""
    setp.eq.u32 %p4, %r2, 1;
    @%p4 bra second;
    @!%p1 bra third;
    {alloc(0, 512)}
    bar.sync 1;
    {dealloc(0, 512)}
    exit;
second:
    {wait_for_room(1)}
third:
    {wait_for_room(2)}
    """
    out, result = alone(body, block=96, **schedule)
    assert not result.findings and sorted(out[0, 1:3].tolist()) == [0, 256]


@pytest.mark.parametrize("body, says", [
    *((alloc(0, columns), f"asks for {columns} columns") for columns in (0, 16, 48, 1024)),
    (alloc(0, 32) + alloc(1, 64) + dealloc(0, 32) + dealloc(1, 64), "64 columns after 32: a CTA's allocations"),
    (alloc(0, 32) + GIVE_UP + alloc(1, 32) + dealloc(0, 32) + dealloc(1, 32), "after relinquish_alloc_permit"),
    (alloc(0, 32) + dealloc(0, 32) + dealloc(0, 32), "deallocates 32 columns at 0x1e0; an allocation of 0 columns"),
    (alloc(0, 64) + "mov.u32 %r21, 32;\n" + dealloc(1, 32) + dealloc(0, 64), "at 0x20; an allocation of 0 columns"),
    ("mov.u32 %r21, 7;\n" + alloc(0, 64) + dealloc(1, 64) + dealloc(0, 64), "at 0x7; an allocation of 0 columns"),
    (alloc(0, 64) + dealloc(0, 32) + dealloc(0, 64), "deallocates 32 columns at 0x1c0; an allocation of 64 columns"),
    (alloc(0, 32, 2), "has no peer"),
])
def test_misuse_of_the_allocator_is_described(body, says):
    _, result = alone(body)
    reports(result, ["tmem"], says)
    assert len(result.findings) == 1


def test_an_allocation_that_never_finds_room_is_a_deadlock():
    says = "waits for 32 columns of tensor memory; 512 of 512 are allocated"
    reports(alone(alloc(0, 512) + alloc(1, 32))[1], ["deadlock"], says)


def test_columns_left_at_the_end_are_a_leak():
    leak = alone(alloc(0, 128) + alloc(1, 32) + dealloc(1, 32))[1]
    reports(leak, ["tmem-leak"], "128 columns at 384 were never deallocated", place="tcgen05.alloc")


# ---- CTAs of an SM


@UNDER_ANY_SCHEDULE
def test_ctas_of_an_sm_take_turns_if_each_needs_all_columns(schedule):
    out, result = alone(alloc(0, 512) + GIVE_UP + dealloc(0, 512), grid=5, **schedule)
    assert not result.findings and out[:, 0].eq(0).all() and result.counters["tmem_columns"] == 512


def waits_for_its_neighbour(columns, relinquish=GIVE_UP):
    """Return the body of a CTA that allocates, sets its flag, and waits for the flag of the other one of two."""
    return f"""
    {alloc(0, columns)}
    {relinquish}
    xor.b32 %r6, %r4, 1;
    mul.wide.u32 %rd5, %r6, 64;
    add.s64 %rd5, %rd1, %rd5;
    @%p2 st.release.gpu.global.u32 [%rd3+32], 7;
AGAIN:
    ld.acquire.gpu.global.u32 %r7, [%rd5+32];
    setp.ne.u32 %p7, %r7, 7;
    @%p7 bra AGAIN;
    bar.warp.sync 0xffffffff;
    {dealloc(0, columns)}
    """


@UNDER_ANY_SCHEDULE
def test_ctas_that_are_on_an_sm_together_get_different_columns(schedule):
    out, result = alone(waits_for_its_neighbour(256), grid=2, **schedule)
    assert not result.findings and sorted(out[:, 0].tolist()) == [0, 256]
    assert result.counters["tmem_columns"] == 512


def test_a_clock_knows_that_ctas_of_an_sm_wait_for_columns():
    spin = "mov.u32 %r7, 2000;\nLOOP: sub.u32 %r7, %r7, 1; setp.ne.u32 %p7, %r7, 0; @%p7 bra LOOP;\n"
    clocks = {}
    for columns in (256, 512):                                                 # two CTAs an SM, at once or in turns
        body = alloc(0, columns) + GIVE_UP + spin + dealloc(0, columns)
        _, result = alone(body, grid=2 * 148, registers=32, clock=True)
        assert not result.findings
        clocks[columns] = result.clock.clocks
    assert clocks[512] > 1.8 * clocks[256]


STUCK = {
    "columns": (waits_for_its_neighbour(512), 0, "512 of 512 are allocated, 512 of them by CTA"),
    "the right to allocate": (waits_for_its_neighbour(32, ""), 1, "the right to allocate tensor memory, which CTA"),
}


@pytest.mark.parametrize("body, schedule, says", STUCK.values(), ids=STUCK)
def test_a_cta_that_waits_for_one_that_waits_for_its_columns_stops_a_full_gpu(body, schedule, says):
    """With an SM for each CTA both go on; a Thor has 20."""
    assert not alone(body, grid=2, schedule=schedule)[1].findings
    _, result = alone(body, grid=22, target="sm_110a", schedule=schedule, checks=False)
    assert result.incomplete and any(says in f.says for f in result.findings if f.kind == "deadlock")


@UNDER_ANY_SCHEDULE
def test_a_cta_that_keeps_its_columns_until_it_ends_does_not_keep_the_right_to_allocate(schedule):
    assert not alone(alloc(0, 128) + dealloc(0, 128), grid=6, **schedule)[1].findings


def held_in_two_ctas(columns, group=1):
    give_up = GIVE_UP.replace("group::1", f"group::{group}")
    return alloc(0, columns, group) + give_up + BOTH + dealloc(0, columns, group)


@pytest.mark.parametrize("columns, group, found", [(512, 1, ["deadlock"]), (256, 1, []), (512, 2, [])])
def test_two_clusters_that_hold_columns_of_one_sm_and_wait_for_those_of_another_are_a_deadlock(columns, group, found):
    """Some seed lets the one allocate first on one SM, and the other on the other; a pair gets its columns together."""
    runs = [alone(held_in_two_ctas(columns, group), grid=4, cluster=2, schedule=seed)[1] for seed in range(1, 25)]
    assert sorted({kind for result in runs for kind in kinds(result)}) == found
    if found:
        (result, *_) = (result for result in runs if result.findings)
        assert any("512 of 512 are allocated, 512 of them by CTA" in f.says for f in result.findings)


BOTH = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"


def test_clusters_that_do_not_fit_on_the_same_sms_do_not_share_columns():
    for seed in range(1, 25):
        assert not alone(held_in_two_ctas(512), grid=4, cluster=2, shared=120 << 10, schedule=seed)[1].findings


# ---- pairs


@UNDER_ANY_SCHEDULE
def test_a_pair_gets_the_same_columns_in_both_ctas(schedule):
    body = alloc(0, 128, 2) + alloc(1, 64, 2) + BOTH + dealloc(0, 128, 2) + dealloc(1, 64, 2)
    out, result = alone(body, grid=4, cluster=4, **schedule)
    assert not result.findings
    for one, other in out[:2, :2].tolist(), out[2:, :2].tolist():
        assert one == other and one[0] % 128 == 0 == one[1] % 64 and one[1] // 128 != one[0] // 128


def only(rank, text, label):
    return f"setp.ne.u32 %p3, %r4, {rank};\n @%p3 bra {label};\n {text}\n{label}:\n"


def test_the_pair_must_ask_together():
    one, other = only(0, alloc(0, 32, 2), "on"), only(1, alloc(1, 64, 2), "off")
    reports(alone(one, grid=2, cluster=2)[1], ["deadlock"], "the other CTA of the pair")
    reports(alone(one + other, grid=2, cluster=2)[1], ["tmem"], "must ask for the same: here")


def test_a_group_is_chosen_for_the_whole_kernel():
    with pytest.raises(PtxError, match="one of them for the whole kernel"):
        alone(alloc(0, 32, 2) + dealloc(0, 32, 1))
