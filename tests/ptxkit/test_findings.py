"""What findings say: planted races whose messages are quoted in full, names of memory and warps, one finding a site."""

from types import SimpleNamespace

import pytest
import torch
from assembly import kernel

from kda.backends.common.cute.fields import Struct, StructField
from ptxkit.findings import Finding, FindingPlace, folded
from ptxkit.launches import launch
from ptxkit.naming import ElementLayout, span

pytestmark = pytest.mark.simulated

HANDOVER = """
    shl.b32 %r10, %r0, 2;
    mov.u32 %r11, smem;
    add.u32 %r12, %r11, %r10;
    xor.b32 %r13, %r10, 128;
    add.u32 %r13, %r13, %r11;
    st.shared.u32 [%r12], %r0;
    ld.shared.u32 %r14, [%r13];
"""


def found(body, *args, dynamic=False, **options):
    """Return what a launch of that body finds."""
    text = kernel(body, pointers=len(args), dynamic=dynamic)
    options = dict(grid=1, block=32, dynamic_shared=4096 * dynamic, strict=True) | options
    return launch(text, args=args, **options).findings


def test_a_race_in_shared_memory_names_variable_warps_and_what_orders_them():
    (race,) = [f for f in found(HANDOVER, block=64) if f.kind == "race-write-read"]
    assert str(race) == (
        "race-write-read: k, CTA 0, warp 1, lane 0: reads smem (shared memory at 0x400), which warp 0 wrote: nothing "
        "orders this read after that write, 128 times\n"
        "    at PTX line 18: ld.shared.u32 %r14, [%r13];\n"
        "    and PTX line 17: st.shared.u32 [%r12], %r0;\n"
        "    to fix it: warp 0 and warp 1 meet at a barrier (bar.sync), or warp 0 arrives on an mbarrier "
        "(mbarrier.arrive) and warp 1 waits for that phase (mbarrier.try_wait)"
    )
    assert not found(HANDOVER.replace("ld.shared", "bar.sync 0; ld.shared"), block=64)


def test_a_kernels_configuration_names_warps_and_fields_of_shared_memory():
    config = SimpleNamespace(
        roles={"LOAD": range(1), "MATH": range(1, 2)},
        struct=Struct(16, full=StructField("int64", (2,), 8), tile=StructField("float32", (256,), 16)),
    )
    body = HANDOVER.replace("[%r12]", "[%r12+16]").replace("[%r13]", "[%r13+16]")
    (race,) = [f for f in found(body, block=64, config=config, dynamic=True) if f.kind == "race-write-read"]
    assert "warp 1 (MATH), lane 0: reads tile (shared memory at 0x410), which warp 0 (LOAD) wrote" in str(race)
    assert race.role == "MATH" and race.by.role == "LOAD" and race.memory.variable == "tile"


def test_a_race_of_ctas_names_the_element_of_the_tensor():
    body = "mov.u32 %r2, %ctaid.x;\nst.global.u32 [%rd1+36], %r2;"
    (race,) = found(body, torch.zeros(2, 3, 4, dtype=torch.int32), grid=2)
    assert str(race) == (
        "race-write-write: k, CTA 1, warp 0, lane 0: writes p1[0, 2, 1] (int32 [2, 3, 4], argument 0), which warp 0 of "
        "CTA 0 wrote: nothing orders the two\n"
        "    at PTX line 13: st.global.u32 [%rd1+36], %r2;\n"
        "    and PTX line 13: st.global.u32 [%rd1+36], %r2;\n"
        "    to fix it: warp 0 of CTA 0 releases a flag in global memory (st, red or atom with .release.gpu) and warp "
        "0 of CTA 1 acquires it (ld or atom with .acquire.gpu) until it is set; or, where a number is read, changed "
        "and written back, one atomic (red, atom) does that; or the two go into kernels that run one after the other; "
        "or, where each should have an element of its own, the index is corrected"
    )
    assert race.memory.index == (0, 2, 1) and race.by.cta == 0
    assert not found(body.replace("st.global.u32", "red.global.add.u32"), torch.zeros(24, dtype=torch.int32), grid=2)


def test_a_race_in_a_cluster_names_the_rank_and_the_clusters_barrier():
    body = """
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r11, smem;
    setp.eq.u32 %p1, %r2, 0;
    mapa.shared::cluster.u32 %r12, %r11, 1;
    @%p1 st.shared::cluster.u32 [%r12+8], %r2;
    @!%p1 st.shared.u32 [%r11+8], 7;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""
    (race,) = found(body, grid=4, cluster=2, block=1)
    assert str(race).splitlines()[0] == (
        "race-write-write: k, CTA 1, warp 0, lane 0: writes smem + 8 (shared memory at 0x408 of CTA rank 1), which "
        "warp 0 of CTA 0 wrote: nothing orders the two, 2 times"
    )
    assert race.advice == (
        "warp 0 of CTA 0 and warp 0 of CTA 1 meet at the cluster's barrier (barrier.cluster.arrive.release, then "
        "barrier.cluster.wait.acquire), or warp 0 of CTA 0 arrives on an mbarrier with .release.cluster and warp 0 of "
        "CTA 1 waits for that phase with .acquire.cluster"
    )


def test_a_cp_async_that_nobody_waits_for_is_told_to_wait():
    body = """
    mov.u32 %r11, smem;
    cp.async.ca.shared.global [%r11], [%rd1], 4;
    {wait}
    ld.shared.u32 %r12, [%r11];
"""
    data = torch.zeros(4, dtype=torch.int32)
    unwritten, race = found(body.format(wait=""), data, block=1)
    assert unwritten.advice == "write it first; if a copy or another warp fills it, wait for that before this"
    assert race.kind == "race-read-write" and race.advice == "warp 0 runs cp.async.commit_group and cp.async.wait_group"
    assert not found(body.format(wait="cp.async.commit_group; cp.async.wait_group 0;"), data, block=1)


PROXY = """
    setp.eq.u32 %p2, %r0, 0;
    mov.u32 %r11, smem;
    @%p2 st.shared.v4.u32 [%r11], {%r0, %r0, %r0, %r0};
    FENCE
    bar.sync 0;
    setp.eq.u32 %p1, %r0, 32;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r11], 16;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
"""


def test_a_bulk_copy_of_what_threads_wrote_is_told_who_fences():
    data = torch.zeros(4, dtype=torch.int32)
    (proxy,) = found(PROXY.replace("FENCE", ""), data, block=64)
    assert str(proxy) == (
        "proxy: k, CTA 0, warp 1, lane 0: the async proxy reads smem (shared memory at 0x400), which warp 0 wrote "
        "through the generic proxy: fence.proxy.async is missing between, 16 times\n"
        "    at PTX line 19: @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r11], 16;\n"
        "    and PTX line 15: @%p2 st.shared.v4.u32 [%r11], {%r0, %r0, %r0, %r0};\n"
        "    to fix it: warp 0 runs fence.proxy.async after its write and before what orders the two (a barrier, an "
        "arrival)"
    )
    assert not found(PROXY.replace("FENCE", "fence.proxy.async;"), data, block=64)


@pytest.mark.parametrize("early", [False, True])
def test_an_access_of_asynchronous_work_may_be_the_one_that_should_come_first(early):
    """The copy runs late by default, after the store that should have waited for it."""
    body = PROXY.replace("FENCE", "fence.proxy.async;").replace("@%p1 cp.async.bulk.wait_group 0;", "")
    late = "bar.sync 0;\n@%p2 st.shared.v4.u32 [%r11], {%r0, %r0, %r0, %r1};\n"
    wait = "@%p1 cp.async.bulk.wait_group.read 0;\n"
    data = torch.zeros(4, dtype=torch.int32)
    (race,) = found(body + late + wait, data, block=64, early=early)
    completes = (
        "the thread of warp 1 that started the copy runs cp.async.bulk.commit_group and cp.async.bulk.wait_group.read; "
        "then warp 1 and warp 0 meet at a barrier (bar.sync), or warp 1 arrives on an mbarrier (mbarrier.arrive) and "
        "warp 0 waits for that phase (mbarrier.try_wait)"
    )
    assert race.kind == ("race-read-write" if early else "race-write-read")
    assert race.advice == (completes if early else (
        "if that access should come first: warp 0 runs fence.proxy.async after its write; then warp 0 and warp 1 meet "
        "at a barrier (bar.sync), or warp 0 arrives on an mbarrier (mbarrier.arrive) and warp 1 waits for that phase "
        f"(mbarrier.try_wait); if this one should: {completes}"
    ))
    assert not found(body + wait + late, data, block=64, early=early)


def test_lanes_are_told_to_meet_or_to_part():
    body = "mov.u32 %r11, smem;\nsetp.eq.u32 %p1, %r0, 0;\n"
    turns = body + "@%p1 st.shared.u32 [%r11], 1;\n{}@!%p1 ld.shared.u32 %r12, [%r11];"
    (race,) = found(turns.format(""))
    assert str(race) == (
        "race-lanes: k, CTA 0, warp 0, lane 1: reads smem (shared memory at 0x400), which another lane of the same "
        "warp used: nothing orders the two, 124 times\n"
        "    at PTX line 14: @!%p1 ld.shared.u32 %r12, [%r11];\n"
        "    and PTX line 13: @%p1 st.shared.u32 [%r11], 1;\n"
        "    to fix it: run bar.warp.sync (__syncwarp) between the two"
    )
    assert not found(turns.format("bar.warp.sync -1;\n"))
    (race,) = found(body + "st.shared.u32 [%r11], %r0;")
    assert race.place == race.other
    assert race.advice == "give each lane an address of its own, or let one lane do it"


def test_one_finding_stands_for_all_of_its_kind_at_an_instruction():
    """Lane n of warp 1 overwrites the word that the nth instruction of warp 0 has read."""
    reads = "\n".join(f"ld.shared.u32 %r9, [%r13+{4 * n}];" for n in range(9))
    lane = "mov.u32 %r12, %laneid;\nshl.b32 %r12, %r12, 2;\nadd.u32 %r12, %r12, %r13;\n"
    lane += ".reg .pred %late;\nsetp.ge.u32 %late, %r0, 32;\n@%late st.shared.u32 [%r12], %r0;\n"
    (race,) = [f for f in found("mov.u32 %r13, smem;\n" + reads + lane, block=64) if f.kind == "race-read-write"]
    assert len(race.alike) == 8 and {f.kind for f in race.alike} == {"race-read-write"}
    assert str(race).splitlines()[-1] == (
        "    8 more of this kind at this instruction: against PTX line 13; PTX line 14; PTX line 15; PTX line 16; ..."
    )


def test_one_instruction_does_not_use_up_the_room_for_findings():
    """Warp 1 overwrites in one instruction what 300 instructions of warp 0 have read, and one more word in another."""
    loop = """
    setp.ge.u32 %p1, %r0, 32;
    mov.u32 %r11, smem;
    and.b32 %r12, %r0, 31;
    shl.b32 %r12, %r12, 2;
    add.u32 %r12, %r12, %r11;
    add.u32 %r14, %r12, 1280;
    @%p1 bra WRITE;
FILL:
    st.shared.u32 [%r12], 0;
    add.u32 %r12, %r12, 128;
    setp.lt.u32 %p2, %r12, %r14;
    @%p2 bra FILL;
    st.shared.u32 [%r11+1284], 0;
    bar.warp.sync -1;
    ld.shared.u32 %r9, [%r11+1284];
    READS
    bra END;
WRITE:
    mov.u32 %r2, 0;
DELAY:
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, 1000;
    @%p2 bra DELAY;
AGAIN:
    st.shared.u32 [%r12], 1;
    add.u32 %r12, %r12, 128;
    setp.lt.u32 %p2, %r12, %r14;
    @%p2 bra AGAIN;
    st.shared.u32 [%r11+1284], 1;
END:
"""
    reads = "\n".join(f"ld.shared.u32 %r9, [%r11+{4 * n}];" for n in range(301))
    races = [f for f in found(loop.replace("READS", reads), block=64) if f.kind == "race-read-write"]
    assert [f.place.ptx for f in races] == ["st.shared.u32 [%r12], 1;", "st.shared.u32 [%r11+1284], 1;"]
    assert len(races[0].alike) == 15 and sum(f.count for f in (races[0], *races[0].alike)) == 4 * 301


def test_findings_are_folded_by_kind_and_instruction():
    def finding(kind, line, warp):
        return Finding(kind, "says", "k", 0, warp, 0, FindingPlace(line, "st", None), None, 1)

    many = [finding("deadlock", line, warp) for warp in range(6) for line in (7, 8)]
    one = finding("barrier", 7, 0)
    first, second, third = folded([*many, one])
    assert [f.warp for f in first.alike] == [1, 2, 3, 4, 5] and second.place.line == 8 and third is one
    assert str(first).endswith("5 more of this kind at this instruction: in CTA 0, warp 1; CTA 0, warp 2; "
                               "CTA 0, warp 3; CTA 0, warp 4; ...")


@pytest.mark.parametrize("view, index", [
    (lambda x: x, (1, 2, 3)), (lambda x: x.permute(2, 0, 1), (3, 1, 2)), (lambda x: x[:, :, 1:], (1, 2, 2)),
    (lambda x: x[:, ::2], (1, 1, 3)), (lambda x: x[1:, :, None], (0, 2, 0, 3)), (lambda x: x[:, 1], None),
    (lambda x: x[:, 2:].expand(2, 5, 4), (1, 0, 3)),
])
def test_an_address_is_an_element_of_every_view_that_has_it(view, index):
    x = torch.zeros(2, 3, 4)
    seen = view(x)
    assert span(seen).layout.index(x.data_ptr() + 4 * (12 + 8 + 3) + 1 - seen.data_ptr()) == index


def test_a_layout_without_dimensions_has_one_element():
    assert ElementLayout("float32", (), (), 4).index(3) == () and ElementLayout("float32", (), (), 4).index(4) is None


def test_many_findings_of_one_kind_hide_no_others():
    """Three hundred places read memory that was never written, then one store misses its tensor."""
    reads = "".join(f"ld.shared.u32 %r11, [smem + {4 * n}];\n" for n in range(300))
    all_of_them = found(reads + "st.global.u32 [%rd1 + 4096], %r0;\n", torch.zeros(4))
    assert [f.kind for f in all_of_them].count("uninitialised") == 200
    assert "out-of-bounds" in {f.kind for f in all_of_them}
