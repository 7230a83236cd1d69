"""What the lanes of a warp do together: shfl, vote, match, redux, elect, activemask."""

import functools
import operator
import random
import struct

import pytest
import torch
from assembly import SEEDS, elements, kernel, refused, reports

from ptxkit.launches import launch

pytestmark = pytest.mark.simulated


def run(body, *inputs, outputs=1, target="sm_90a", **options):
    """Run one warp with inputs[n] in %r10+n; return what it leaves in %r20, %r21, ... and the Run."""
    given = torch.tensor([*inputs, [0] * 32], dtype=torch.int64).to(torch.uint32).view(torch.int32)
    out = torch.full((outputs, 32), -1, dtype=torch.int32)
    loads = "".join(f"ld.global.u32 %r{10 + n}, [%rd10+{128 * n}];\n" for n in range(len(inputs)))
    stores = "".join(f"st.global.u32 [%rd11+{128 * n}], %r{20 + n};\n" for n in range(outputs))
    text = kernel(elements(2) + loads + body + stores, pointers=2, target=target)
    result = launch(text, grid=1, block=32, args=[given, out], **options)
    rows = [[x & 0xFFFFFFFF for x in row] for row in out.tolist()]
    return (rows[0] if outputs == 1 else rows), result


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


# ---- shfl


def shfl(mode, b, c, values=range(32)):
    """Return (value, in range) for each lane, of `mode` with these b and c."""
    body = f"""
    shfl.sync.{mode}.b32 %r20|%p1, %r10, %r11, %r12, -1;
    selp.u32 %r21, 1, 0, %p1;
"""
    b, c = ([x] * 32 if isinstance(x, int) else x for x in (b, c))
    (value, inside), result = run(body, list(values), b, c, outputs=2)
    assert not result.findings
    return list(zip(value, inside))


@pytest.mark.parametrize(("arguments", "lanes"), [
    (("down", 2, 7171), {0: (2, 1), 1: (3, 1), 2: (2, 0), 3: (3, 0), 4: (6, 1), 5: (7, 1)}),
    (("up", 1, 0), {0: (0, 0), 1: (0, 1), 31: (30, 1)}),
    (("idx", 35, 31), {5: (3, 1)}),
    (("idx", 5, 0x1807), {9: (13, 1)}),
    (("bfly", 1, 31, range(100, 132)), {n: (100 + (n ^ 1), 1) for n in range(32)}),
], ids=["down stays within groups of four", "up leaves the first lanes their own value", "an index wraps at 32",
        "an index counts within the segment", "a butterfly exchanges neighbours"])
def test_a_shuffle_worked_out_by_hand(arguments, lanes):
    got = shfl(*arguments)
    assert {n: got[n] for n in lanes} == lanes


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_every_shift_clamp_and_segment_follows_the_rule(mode):
    rng = random.Random(mode)
    for _ in range(20):
        c = rng.choice([31, 0, 7171, 0x1807, 0x1E01, 0x100F, 0x181F])
        b = [rng.randrange(64) for _ in range(32)]
        clamp, segment = c & 31, c >> 8 & 31
        for lane, (value, inside) in enumerate(shfl(mode, b, c, range(200, 232))):
            by, low, high = b[lane] & 31, lane & segment, lane & segment | clamp & ~segment
            source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | by & ~segment}[mode]
            fits = source >= high if mode == "up" else source <= high
            assert (value, inside) == (200 + (source if fits else lane), int(fits))


def test_the_result_may_replace_the_value():
    got, _ = run("shfl.sync.bfly.b32 %r10, %r10, 16, 31, -1;\n mov.u32 %r20, %r10;\n", range(32))
    assert got == [n ^ 16 for n in range(32)]


@pytest.mark.parametrize(("body", "says"), [
    ("setp.lt.u32 %p2, %r0, 16;\n @%p2 shfl.sync.idx.b32 %r20, %r0, 20, 31, 65535;\n", "reads lane 20"),
    ("setp.eq.u32 %p2, %r0, 31;\n @%p2 exit;\n shfl.sync.idx.b32 %r20, %r0, 31, 31, -1;\n", ""),
    ("vote.sync.any.pred %p2, %p1, 1;\n", ""),
], ids=["a lane outside the mask is read", "a lane that has exited is read", "a lane outside its own mask votes"])
def test_a_lane_that_does_not_take_part_is_found(body, says):
    reports(run("mov.u32 %r20, 0;\n" + body)[1], ["lane"], says)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_of_one_mask_meet_from_two_branches(seed):
    body = """
    and.b32 %r2, %r0, 1;
    setp.eq.u32 %p1, %r2, 0;
    mov.u32 %r3, 7;
    @%p1 bra ON;
    add.u32 %r3, %r0, 1000;
ON:
    shfl.sync.bfly.b32 %r20, %r3, 1, 31, -1;
"""
    got, result = run(body, schedule=seed)
    assert got == [1000 + (n ^ 1) if n % 2 == 0 else 7 for n in range(32)]
    assert not result.findings


# ---- vote, elect, activemask


def test_votes_are_over_the_lanes_of_the_mask():
    body = """
    setp.ne.u32 %p1, %r10, 0;
    vote.sync.all.pred %p2, %p1, -1;
    vote.sync.any.pred %p3, %p1, -1;
    vote.sync.uni.pred %p4, %p1, -1;
    vote.sync.ballot.b32 %r23, %p1, -1;
    vote.sync.all.pred %p5, !%p1, -1;
    selp.u32 %r20, 1, 0, %p2;
    selp.u32 %r21, 1, 0, %p3;
    selp.u32 %r22, 1, 0, %p4;
    selp.u32 %r24, 1, 0, %p5;
"""
    for votes in ([0] * 32, [1] * 32, [int(n == 5) for n in range(32)], [n % 2 for n in range(32)]):
        rows, result = run(body, votes, outputs=5)
        ballot = sum(v << n for n, v in enumerate(votes))
        expected = (all(votes), any(votes), len(set(votes)) == 1, ballot, not any(votes))
        assert [row[0] for row in rows] == [int(e) for e in expected]
        assert all(len(set(row)) == 1 for row in rows)
        assert not result.findings


def test_a_ballot_leaves_out_lanes_outside_the_mask_and_lanes_that_exited():
    body = """
    setp.ge.u32 %p2, %r0, 24;
    @%p2 exit;
    setp.lt.u32 %p1, %r0, 32;
    mov.u32 %r20, 0;
    setp.lt.u32 %p3, %r0, 8;
    @%p3 vote.sync.ballot.b32 %r20, %p1, 255;
    @!%p3 vote.sync.ballot.b32 %r20, %p1, 0xffffff00;
"""
    got, result = run(body)
    assert got[:24] == [0xFF] * 8 + [0xFFFF00] * 16
    assert not result.findings


def test_one_lane_is_elected_and_all_know_it():
    body = """
    elect.sync %r20|%p1, -1;
    selp.u32 %r21, 1, 0, %p1;
    setp.ge.u32 %p3, %r0, 12;
    mov.u32 %r22, 0;
    @!%p3 bra OUT;
    elect.sync _|%p2, 0xfffff000;
    selp.u32 %r22, 1, 0, %p2;
OUT:
"""
    (leader, elected, later), result = run(body, outputs=3)
    assert leader == [0] * 32 and elected == [1] + [0] * 31
    assert later == [int(n == 12) for n in range(32)]
    assert not result.findings


def test_activemask_sees_the_lanes_of_a_branch():
    body = """
    setp.lt.u32 %p1, %r0, 5;
    mov.u32 %r20, 0;
    @%p1 activemask.b32 %r20;
"""
    got, _ = run(body)
    assert got == [31] * 5 + [0] * 27


# ---- match


@pytest.mark.parametrize(("body", "values"), [
    ("match.any.sync.b32 %r20, %r10, -1;\n", [n % 5 for n in range(32)]),
    ("cvt.u64.u32 %rd4, %r10;\n shl.b64 %rd4, %rd4, 33;\n match.any.sync.b64 %r20, %rd4, -1;\n",
     [n // 16 for n in range(32)]),
], ids=["b32", "all bits of b64"])
def test_match_any_groups_equal_values(body, values):
    assert run(body, values)[0] == [sum(1 << m for m in range(32) if values[m] == v) for v in values]


@pytest.mark.parametrize("odd", [None, 3])
def test_match_all_is_all_or_nothing(odd):
    body = "match.all.sync.b32 %r20|%p1, %r10, -1;\n selp.u32 %r21, 1, 0, %p1;\n"
    rows, _ = run(body, [int(n == odd) for n in range(32)], outputs=2)
    assert rows == ([[0xFFFFFFFF] * 32, [1] * 32] if odd is None else [[0] * 32, [0] * 32])


# ---- redux


def signed(values):
    return [v - (v >> 31 << 32) for v in values]


REDUCTIONS = {
    "add.u32": sum, "add.s32": sum, "min.u32": min, "max.u32": max,
    "min.s32": lambda values: min(signed(values)), "max.s32": lambda values: max(signed(values)),
    **{f"{op}.b32": functools.partial(functools.reduce, getattr(operator, name))
       for op, name in (("and", "and_"), ("or", "or_"), ("xor", "xor"))},
}


@pytest.mark.parametrize("form", REDUCTIONS)
def test_a_reduction_reaches_every_lane(form):
    values = [random.Random(form).getrandbits(32) | n for n in range(32)]
    values = [(v * (2 * n + 1)) & 0xFFFFFFFF for n, v in enumerate(values)]
    got, result = run(f"redux.sync.{form} %r20, %r10, -1;\n", values)
    assert got == [REDUCTIONS[form](values) & 0xFFFFFFFF] * 32
    assert not result.findings


def test_a_reduction_takes_only_the_lanes_of_its_mask():
    body = """
    setp.lt.u32 %p1, %r0, 4;
    @%p1 redux.sync.add.u32 %r20, %r10, 15;
    @!%p1 redux.sync.add.u32 %r20, %r10, 0xfffffff0;
"""
    got, _ = run(body, range(32))
    assert got == [6] * 4 + [sum(range(4, 32))] * 28


NAN = 0x7FC00001


@pytest.mark.parametrize("form, values, expected", [
    ("max", [bits(float(n)) for n in range(32)], bits(31.0)),
    ("min", [bits(-float(n)) for n in range(32)], bits(-31.0)),
    ("max", [bits(-float(n) - 1) for n in range(32)], bits(-1.0)),
    ("max.abs", [bits(-float(n)) for n in range(32)], bits(31.0)),
    ("min", [0x80000000] + [0] * 31, 0x80000000),
    ("max", [0x80000000] * 31 + [0], 0),
    ("max", [NAN] + [bits(2.0)] * 31, bits(2.0)),
    ("max.NaN", [bits(2.0)] * 31 + [NAN], 0x7FFFFFFF),
    ("min", [NAN] * 32, 0x7FFFFFFF),
])
def test_a_float_reduction_orders_zeros_and_leaves_out_nans(form, values, expected):
    got, result = run(f"redux.sync.{form}.f32 %r20, %r10, -1;\n", values, target="sm_100a")
    assert got == [expected] * 32
    assert not result.findings


# ---- what is refused


@pytest.mark.parametrize("instruction, says", [
    ("shfl.idx.b32 %r2, %r0, 0, 31;", "shfl.sync with a mask"),
    ("vote.all.pred %p1, %p2;", "vote.sync with a mask"),
    ("shfl.sync.left.b32 %r2, %r0, 0, 31, -1;", "up, down, bfly, idx"),
    ("shfl.sync.idx.b32 %r2, %r0, 0, -1;", "membermask"),
    ("redux.sync.mul.u32 %r2, %r0, -1;", "add, min, max"),
    ("redux.sync.max.f32 %f2, %f0, -1;", "sm_100a"),
    ("match.any.sync.b16 %r2, %r0, -1;", "b32, b64"),
])
def test_a_form_that_is_not_there_is_refused(instruction, says):
    text = refused(instruction)
    assert says in text and instruction.rstrip(";") in text


def test_elect_is_refused_before_sm_90():
    assert "sm_90 and later" in refused("elect.sync %r2|%p1, -1;", target="sm_80")
