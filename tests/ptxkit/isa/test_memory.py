"""Loads, stores, atomics: every width and space, and accesses that must not be."""

import functools
import operator
import pathlib
import re
import struct

import pytest
import torch
from assembly import SEEDS, kernel, refused, reports

from ptxkit.launches import LaunchError, launch
from ptxkit.naming import span

pytestmark = pytest.mark.simulated

MY = """
    mul.wide.u32 %rd9, %r0, {n};
    add.s64 %rd10, %rd1, %rd9;
    add.s64 %rd11, %rd2, %rd9;
"""


REGISTERS = {  # two sets for each type
    "u8": ("%h1", "%h2"), "b16": ("%h1", "%h2"), "u32": ("%r2", "%r12"), "b64": ("%rd5", "%rd15"),
    "v2.u32": ("{%r2, %r3}", "{%r12, %r13}"), "v4.b32": ("{%r2, %r3, %r4, %r5}", "{%r12, %r13, %r14, %r15}"),
    "v2.b64": ("{%rd5, %rd6}", "{%rd15, %rd16}"),
}
SPACES = {  # what makes an address, if any is made, and the address
    "global": ("", "%rd11"),
    "shared": ("cvt.u32.u64 %r20, %rd9; mov.u32 %r21, smem; add.u32 %r20, %r20, %r21;", "%r20"),
    "local": ("", "depot+16"),
    "generic": ("mov.u64 %rd20, smem; cvta.shared.u64 %rd20, %rd20; add.s64 %rd20, %rd20, %rd9;", "%rd20"),
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("type_, size", [
    ("u8", 1), ("b16", 2), ("u32", 4), ("b64", 8), ("v2.u32", 8), ("v4.b32", 16), ("v2.b64", 16),
])
def test_bytes_go_through_every_space_unchanged(space, type_, size):
    (one, other), (before, place) = REGISTERS[type_], SPACES[space]
    of_space = f".{space}.{type_}".replace(".generic", "")
    body = ".local .align 16 .b8 depot[64];" + MY.format(n=size) + f"""
    ld.global.{type_} {one}, [%rd10];
    {before}
    st{of_space} [{place}], {one};
    ld{of_space} {other}, [{place}];
    st.global.{type_} [%rd11], {other};
"""
    source = torch.randint(0, 256, (32 * size,), dtype=torch.uint8)
    out = torch.zeros_like(source)
    result = launch(kernel(body, pointers=2), grid=1, block=32, args=[source, out])
    assert torch.equal(out, source)
    assert not result.findings


@pytest.mark.parametrize("type_, expected", [("s8", -3), ("u8", 253), ("s16", -3), ("u16", 65533)])
def test_small_loads_extend_as_their_type_says(type_, expected):
    body = f"""
    ld.global.{type_} %r2, [%rd1];
    st.global.u32 [%rd2], %r2;
    ld.global.{type_} %rd5, [%rd1];
    st.global.u64 [%rd2+8], %rd5;
"""
    source = torch.full((8,), -3, dtype=torch.int16 if "16" in type_ else torch.int8)
    out = torch.zeros(2, dtype=torch.int64)
    launch(kernel(body, pointers=2), grid=1, block=1, args=[source, out])
    assert out.tolist() == [expected & 0xFFFFFFFF, expected]


def test_stores_take_the_low_bits_of_wider_registers():
    body = """
    ld.global.u64 %rd5, [%rd1];
    cvt.u64.u32 %rd6, %r0;
    add.s64 %rd5, %rd5, %rd6;
    mul.wide.u32 %rd9, %r0, 8;
    add.s64 %rd9, %rd2, %rd9;
    st.global.b32 [%rd9], %rd5;
    st.global.b16 [%rd9+4], %rd5;
    st.global.u8 [%rd9+6], %r0;
"""
    out = torch.zeros(32, dtype=torch.int64)
    launch(kernel(body, pointers=2), grid=1, block=32, args=[torch.tensor([0x1234567890ABCD00]), out])
    wanted = [0x90ABCD00 + n | (0xCD00 + n) << 32 | n << 48 for n in range(32)]
    assert out.tolist() == wanted


@pytest.mark.parametrize("what, kind, says", [
    ("ld.global.u32 %r2, [%rd1+256];", "out-of-bounds",
     "256 bytes into p1 (int32 [64], argument 0), which has 256 bytes"),
    ("st.global.u32 [%rd1+-4], 1;", "out-of-bounds", "writes 4 bytes"),
    ("ld.global.v4.u32 {%r2,%r3,%r4,%r5}, [%rd1+248];", "out-of-bounds", "reads 16 bytes"),
    ("ld.global.u32 %r2, [%rd1+2];", "misaligned", "not a multiple of 4"),
    ("ld.global.v2.u32 {%r2,%r3}, [%rd1+4];", "misaligned", "not a multiple of 8"),
    ("st.shared.u32 [smem+4096], 1;", "out-of-bounds", "shared address"),
    ("ld.shared.u32 %r2, [smem+2];", "misaligned", "shared address"),
    ("ld.shared.u32 %r2, [smem];", "uninitialised", "was never written"),
    ("st.shared.u16 [smem], %h1; ld.shared.u32 %r2, [smem];", "uninitialised", "was never written"),
    (".local .align 4 .b8 depot[16]; st.local.u32 [depot+16], 1;", "out-of-bounds", "local address"),
])
def test_an_access_that_must_not_be_is_reported_and_goes_nowhere(what, kind, says):
    data = torch.arange(64, dtype=torch.int32)
    reports(launch(kernel(what), grid=1, block=1, args=[data]), {kind}, says)
    assert data.tolist() == list(range(64))


@pytest.mark.parametrize("what, says", [
    ("ld.global.u32 %r2, [%rd1+400];", "384 bytes into part (int32 [10]), which has 40 bytes"),
    ("ld.global.u32 %r2, [%rd1+-4];", "no memory below it"),
], ids=["behind", "before"])
def test_memory_without_a_layout_is_called_as_the_last_tensor_that_lies_in_it(what, says):
    whole = torch.arange(100, dtype=torch.int32)
    known = [span(whole[4:14], "part"), (whole.data_ptr(), 400, "storage 0"), span(whole[:2], "head")]
    result = launch(kernel(what), grid=1, block=1, args=struct.pack("Q", whole.data_ptr()), memory=known)
    assert says in result.findings[0].says


def test_a_launch_may_raise_its_errors():
    from ptxkit.findings import SimulationError

    with pytest.raises(SimulationError, match="out-of-bounds"):
        launch(kernel("ld.global.u32 %r2, [%rd1+256];"), grid=1, block=1, args=[torch.zeros(64)], raises=True)


def test_the_memory_of_a_launch_does_not_grow_with_its_grid():
    """Each CTA leaves thousands of words that several warps have read."""
    body = """
    shl.b32 %r10, %r0, 2;
    mov.u32 %r11, smem;
    add.u32 %r12, %r11, %r10;
    st.shared.u32 [%r12], %r0;
    bar.sync 0;
    xor.b32 %r13, %r12, 128;
    ld.shared.u32 %r14, [%r13];
    xor.b32 %r13, %r12, 256;
    ld.shared.u8 %r14, [%r13];
"""

    def peak(grid):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        assert not launch(kernel(body), grid=grid, block=1024, args=[torch.zeros(1)]).findings
        return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

    assert peak(1500) - peak(10) < 20_000  # KiB; it was 100 for each CTA when those of readers were kept


def parted(first, second, then=""):
    """The first CTA runs one instruction, the second one another; then both may do more."""
    return f"""
    mov.u32 %r2, %ctaid.x;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 {first}
    @!%p1 {second}
    {then}
"""


READ, SEVEN, FIVE = "ld.global.u32 %r3, [%rd1];", "st.global.u32 [%rd1], 7;", "st.global.u32 [%rd1], 5;"
WRITES = {  # to where 7 was: what runs, in how many CTAs of how many threads, and what is found
    "two CTAs write": ("mov.u32 %r2, %ctaid.x; st.global.u32 [%rd1], %r2;", 2, 1, ["race-write-write"]),
    "all write one value": (FIVE, 2, 64, []),
    "one writes the value that is there, before another reads": (parted(SEVEN, READ), 2, 1, []),
    "one writes the value that is there, after another reads": (parted(READ, SEVEN), 2, 1, []),
    "both write the value that is there and read": (parted(SEVEN, SEVEN, READ), 2, 1, []),
    "both write another value and read": (parted(FIVE, FIVE, READ), 2, 1, []),
    "one writes the value that is there and one another": (parted(SEVEN, FIVE), 2, 1, ["race-write-write"]),
    "lanes write, and one the value that is there":
        ("add.u32 %r2, %r0, 7; st.global.u32 [%rd1], %r2;", 1, 2, ["race-lanes"]),
}


@pytest.mark.parametrize("seed", [0, *SEEDS])
@pytest.mark.parametrize(("body", "ctas", "threads", "found"), WRITES.values(), ids=WRITES)
def test_different_values_at_one_place_race_and_equal_ones_do_not(body, ctas, threads, found, seed):
    data = torch.full((1,), 7, dtype=torch.int32)
    reports(launch(kernel(body), grid=ctas, block=threads, args=[data], schedule=seed), found)


def test_one_launch_is_ordered_after_another():
    data = torch.zeros(1, dtype=torch.int32)
    for n in range(2):
        assert not launch(kernel(f"st.global.u32 [%rd1], {n};"), grid=1, block=1, args=[data]).findings


ATOMICS = [
    ("add.u32", torch.int32, 3, lambda xs, x0: x0 + sum(xs)),
    ("min.s32", torch.int32, 3, lambda xs, x0: min(x0, *xs)),
    ("max.s32", torch.int32, 3, lambda xs, x0: max(x0, *xs)),
    ("or.b32", torch.int32, 3, lambda xs, x0: functools.reduce(operator.or_, xs, x0)),
    ("add.u64", torch.int64, 1 << 40, lambda xs, x0: x0 + sum(xs)),
    ("add.f32", torch.float32, 0.5, lambda xs, x0: x0 + sum(xs)),
    ("add.f64", torch.float64, 0.5, lambda xs, x0: x0 + sum(xs)),
]


@pytest.mark.parametrize("seed", [0, *SEEDS])
@pytest.mark.parametrize("op, dtype, start, expected", ATOMICS, ids=[a[0] for a in ATOMICS])
def test_atomics_of_all_warps_add_up(op, dtype, start, expected, seed):
    type_ = op.split(".")[1]
    register = {"u64": "%rd5", "f32": "%f1", "f64": "%fd1"}.get(type_, "%r2")
    body = MY.format(n=dtype.itemsize) + f"""
    ld.global.{type_} {register}, [%rd11];
    red.global.{op} [%rd1], {register};
"""
    out, xs = torch.full((1,), start, dtype=dtype), torch.arange(128).to(dtype)
    result = launch(kernel(body, pointers=2), grid=2, block=64, args=[out, xs], schedule=seed)
    numbers = xs[:64].tolist() * 2
    assert out.item() == expected(numbers, torch.tensor(start, dtype=dtype).item())
    assert not result.findings


COUNTED_UNDER_A_LOCK = """
TAKE:
    atom.acquire.gpu.global.cas.b32 %r2, [%rd1], 0, 1;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra TAKE;
    ld.global.u32 %r3, [%rd1+4];
    add.u32 %r3, %r3, 1;
    st.global.u32 [%rd1+4], %r3;
    st.release.gpu.global.u32 [%rd1], 0;
"""


def test_a_lock_by_compare_and_swap_keeps_its_data():
    body = "setp.ne.u32 %p1, %r0, 0; @%p1 bra END;" + COUNTED_UNDER_A_LOCK + "END:\n"
    for seed in (0, *SEEDS):
        data = torch.zeros(2, dtype=torch.int32)
        result = launch(kernel(body), grid=6, block=32, args=[data], schedule=seed)
        assert data.tolist() == [0, 6]
        assert not result.findings, result.findings[0]


def test_a_lock_let_go_without_a_release_is_a_race():
    body = COUNTED_UNDER_A_LOCK.replace("st.release", "st.relaxed")
    result = launch(kernel(body), grid=3, block=1, args=[torch.zeros(2, dtype=torch.int32)])
    assert any(f.kind.startswith("race") for f in result.findings)


def test_bank_conflicts_are_counted_by_pass():
    def body(stride):
        return f"""
    mul.lo.u32 %r2, %r0, {stride};
    mov.u32 %r3, smem;
    add.u32 %r3, %r3, %r2;
    st.shared.u32 [%r3], %r0;
"""

    for stride, passes in ((4, 1), (8, 2), (128, 32), (132, 1)):
        result = launch(kernel(body(stride), pointers=0, shared=8192), grid=1, block=32, args=[])
        assert result.counters["shared_wavefronts"] == passes
        assert result.counters["bank_conflicts"] == passes - 1


def test_global_bytes_are_counted_and_compared_with_what_was_touched():
    body = MY.format(n=4) + "ld.global.u32 %r2, [%rd10]; ld.global.u32 %r3, [%rd10]; st.global.u32 [%rd11], %r2;"
    a, b = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    result = launch(kernel(body, pointers=2), grid=1, block=256, args=[a, b])
    assert result.counters["global_bytes_read"] == 2048
    assert 1024 <= result.counters["global_floor_read"] <= 1024 + 32
    assert "2.00 times" in result.report() or "1.9" in result.report()
    name, result.kernel = result.kernel, "k" * 300                             # as mangled names are
    heading, *others = result.report().splitlines()
    assert heading == f"{'k' * 80}... on sm_90" and max(map(len, others)) <= 80
    result.kernel = name
    assert result.report().splitlines()[1:] == others


def test_sectors_that_a_launch_reads_writes_or_both_are_told_apart():
    body = MY.format(n=4) + "ld.global.u32 %r2, [%rd10]; st.global.u32 [%rd11], %r2; {more}"
    for more, flag in (("", 2), ("ld.global.u32 %r3, [%rd11];", 3)):
        a, b = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        ptx, how = kernel(body.format(more=more), pointers=2), dict(grid=1, block=64, args=[a, b])
        found = dict(launch(ptx, accesses=True, **how).sectors)
        assert [set(found[x.data_ptr()][1:7]) for x in (a, b)] == [{1}, {flag}]
        assert not launch(ptx, **how).sectors


# ---- arguments


@pytest.mark.parametrize("args, says", [
    ([], "has 1"),
    ([torch.zeros(1), 2], "has 1"),
    ([[1, 2]], "pass a CPU tensor, a number"),
    ([1.5], "not a whole number"),
    ([torch.zeros(1, device="meta")], "needs CPU tensors"),
    (b"1234", "needs 8"),
    (torch.zeros(1), r"args=\[x\]"),
    ([torch.zeros(1).to_sparse()], "no address"),
    ([1 << 64], "does not fit into 8 bytes"),
])
def test_wrong_arguments_say_what_is_wanted(args, says):
    with pytest.raises(LaunchError, match=says):
        launch(kernel(""), grid=1, block=32, args=args)


@pytest.mark.parametrize("shape, says", [
    (dict(grid=1, block=1025), "1 to 1024"),
    (dict(grid=3, block=32, cluster=2), "not a multiple"),
    (dict(grid=1, block=0), "1 to 1024"),
    (dict(grid=1, block=32, dynamic_shared=300_000), "a CTA of sm_90 has"),
    (dict(grid=1, block=32, arch="sm_70"), "is not simulated"),
    (dict(grid="1", block=32), "whole numbers"),
    (dict(grid=1.0, block=32), "whole numbers"),
    (dict(grid=(), block=32), "whole numbers"),
    (dict(grid=1 << 31, block=32), "whole numbers"),
    (dict(grid=1, block=32, schedule="x"), "seed"),
    (dict(grid=1, block=32, early="no"), "True or False"),
    (dict(grid=1, block=32, clock=["h200"]), "name of a chip"),
    (dict(grid=1, block=32, timeline=True), "without a clock"),
])
def test_a_launch_that_cannot_be_says_why(shape, says):
    with pytest.raises(LaunchError, match=says):
        launch(kernel(""), args=[torch.zeros(1)], **shape)


@pytest.mark.parametrize("ptx", [None, b".version 8.0"], ids=["None", "bytes"])
def test_what_is_no_text_is_no_module(ptx):
    with pytest.raises(LaunchError, match="ptx must be the text"):
        launch(ptx, grid=1, block=32)


def test_an_empty_grid_runs_nothing():
    result = launch(kernel("trap;"), grid=0, block=32, args=[torch.zeros(1)])
    assert result.counters["warp_instructions"] == 0 and not result.findings


def test_an_unknown_instruction_quotes_its_line():
    assert re.search(r"line \d+.*frobnicate", refused("frobnicate.u32 %r1, %r2;"))


RESET = """
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra END;
    mov.u32 %r2, %ctaid.x;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra LAST;
    {before}
    red.relaxed.gpu.global.add.u32 [%rd1], 1;
    bra END;
LAST:
SPIN:
    {read}
    setp.ne.u32 %p3, %r3, 1;
    @%p3 bra SPIN;
    st.global.u32 [%rd1], 0;
    st.global.u32 [%rd1+4], 0;
END:
"""


@pytest.mark.parametrize("seed", [0, *SEEDS])
@pytest.mark.parametrize(("read", "before", "found"), [
    ("ld.acquire.gpu.global.u32 %r3, [%rd1];", "fence.acq_rel.gpu;", []),
    ("ld.relaxed.gpu.global.u32 %r3, [%rd1];", "", []),
    ("ld.relaxed.cta.global.u32 %r3, [%rd1];", "", ["race-write-write"]),
    ("mov.u32 %r3, 1;", "", ["race-write-write"]),
    ("ld.acquire.gpu.global.u32 %r3, [%rd1];", "fence.acq_rel.gpu; st.global.u32 [%rd1+4], 7;", ["race-write-write"]),
    ("ld.acquire.gpu.global.u32 %r3, [%rd1];", "st.global.u32 [%rd1+4], 7; fence.acq_rel.gpu;", []),
])
def test_who_has_seen_a_write_by_a_strong_read_may_overwrite_it(read, before, found, seed):
    """Observation orders that write alone: what its thread wrote behind its fence is not ordered."""
    body = RESET.format(read=read, before=before)
    result = launch(kernel(body), grid=2, block=32, args=[torch.zeros(2, dtype=torch.int32)], schedule=seed)
    assert set(found) <= {f.kind for f in result.findings} and (found or not result.findings)
