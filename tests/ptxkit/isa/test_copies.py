"""What cp.async, cp.async.bulk, st.async and clusterlaunchcontrol bring, and the faults that are found."""

import numpy as np
import pytest
import torch
import transfers as tr
from assembly import kinds, reports

from ptxkit.launches import launch

pytestmark = pytest.mark.simulated

RACES = {"race-write-read", "race-read-write", "race-write-write"}
everywhere = pytest.mark.parametrize("options", tr.SCHEDULES)


def run(text, *args, grid=1, block=tr.THREADS, **options):
    return launch(text, grid=grid, block=block, args=list(args), **options)


# ---- cp.async

# %r10: this thread's place in shared memory; %rd9: its source in %rd1; %rd10: its place in the result %rd2
SPOTS = """
    shl.b32 %r9, %r0, 4;
    add.u32 %r10, %r20, %r9;
    cvt.u64.u32 %rd8, %r9;
    add.s64 %rd9, %rd1, %rd8;
    add.s64 %rd10, %rd2, %rd8;
"""
SHOW = "ld.shared.v4.u32 {%r11, %r12, %r13, %r14}, [%r10];\nst.global.v4.u32 [%rd10], {%r11, %r12, %r13, %r14};\n"
BY_NEIGHBOURS = "xor.b32 %r15, %r10, 512;\n" + SHOW.replace("[%r10]", "[%r15]")  # what the other warp's thread brought


def cp_async(copies, after=SHOW, target="sm_80", **options):
    source, out = tr.noise(16 * tr.THREADS), torch.zeros(16 * tr.THREADS, dtype=torch.uint8)
    result = run(tr.frame(SPOTS + copies + after, pointers=2, target=target), source, out, **options)
    return source.reshape(tr.THREADS, 16), out.reshape(tr.THREADS, 16), result


@pytest.mark.parametrize(("kind", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
@everywhere
def test_cp_async_brings_4_8_or_16_bytes(kind, size, options):
    pieces = "".join(
        f"cp.async.{kind}.shared.global.L2::128B [%r10+{n}], [%rd9+{n}], {size};\n" for n in range(0, 16, size)
    )
    source, out, result = cp_async(pieces + "cp.async.commit_group;\ncp.async.wait_group 0;\n", **options)
    assert not result.findings
    assert torch.equal(out, source)


THREAD, BYTE = torch.arange(tr.THREADS)[:, None], torch.arange(16).expand(tr.THREADS, 16)
SHORTER = "mov.u32 %r17, {};\ncp.async.cg.shared::cta.global [%r10], [%rd9], 16, %r17;"
IGNORING = "setp.lt.u32 %p4, %r0, 40;\ncp.async.ca.shared.global [%r10], [%rd9], 16, {};"
READ = {  # the copy, and which bytes of which threads it reads
    **{f"{size} bytes": (SHORTER.format(size), size > BYTE) for size in (0, 3, 4, 12, 16)},
    "ignored by some": (IGNORING.format("%p4"), (THREAD >= 40) & (BYTE >= 0)),
    "ignored by the others": (IGNORING.format("!%p4"), (THREAD < 40) & (BYTE >= 0)),
    "none, which may be anywhere": ("mov.u64 %rd9, 16;\n" + SHORTER.format(0), BYTE < 0),
}


@pytest.mark.parametrize(("copy", "read"), READ.values(), ids=READ)
def test_what_is_not_read_is_filled_up_with_zeros(copy, read):
    source, out, result = cp_async(f"{copy}\ncp.async.wait_all;\n")
    assert not result.findings
    assert torch.equal(out, torch.where(read, source, 0))
    assert result.counters["global_bytes_read"] == read.sum()


def in_groups(pending, shown):
    """Four groups of 4 bytes each, of which some may be pending; then some of the 16 bytes are shown."""
    copies = "".join(
        f"cp.async.ca.shared.global [%r10+{4 * n}], [%rd9+{4 * n}], 4;\ncp.async.commit_group;\n" for n in range(4)
    )
    show = "".join(f"ld.shared.u32 %r11, [%r10+{4 * n}];\nst.global.u32 [%rd10+{4 * n}], %r11;\n" for n in shown)
    return f"{copies}cp.async.wait_group {pending};\n{show}cp.async.wait_group 0;\n"


def behind_forty(pending):
    """Forty groups, each waited for, then three; what the first of these brings is shown."""
    group = "cp.async.ca.shared.global [%r10+{0}], [%rd9+{0}], 4;\ncp.async.commit_group;\n"
    many = (group.format(0) + "cp.async.wait_group 0;\n") * 40 + "".join(map(group.format, (4, 8, 12)))
    return f"""{many}
    cp.async.wait_group {pending};
    ld.shared.u32 %r11, [%r10+4];
    st.global.u32 [%rd10+4], %r11;
    cp.async.wait_group 0;
    """


def bytes_below(end, start=0):
    return lambda source: torch.where((start <= BYTE) & (end > BYTE), source, 0)


COPIED = "cp.async.cg.shared.global [%r10], [%rd9], 16;\ncp.async.wait_all;\n"
ORDERS = {  # what runs, what is found, and what it shows of the source
    **{f"{n} groups may be pending": (in_groups(n, range(4 - n)), [], bytes_below(16 - 4 * n)) for n in range(4)},
    **{f"{n} groups may be pending, one of which is read": (in_groups(n, [4 - n]), RACES, None) for n in (1, 2, 3)},
    "the first of three groups behind forty": (behind_forty(2), [], bytes_below(8, 4)),
    "one too many is pending behind forty": (behind_forty(3), RACES, None),
    "another warp's bytes": (COPIED + "bar.sync 0;\n" + BY_NEIGHBOURS, [], lambda x: x.roll(32, 0)),
    "another warp's bytes without a barrier": (COPIED + BY_NEIGHBOURS, {*RACES, "uninitialised"}, None),
    "the next tile": (COPIED + "bar.sync 0;\n" + BY_NEIGHBOURS + "bar.sync 0;\n" + COPIED, [], None),
    "the next tile while others still read": (COPIED + "bar.sync 0;\n" + BY_NEIGHBOURS + COPIED, RACES, None),
}


@everywhere
@pytest.mark.parametrize(("text", "found", "shown"), ORDERS.values(), ids=ORDERS)
def test_what_a_cp_async_brings_is_there_behind_its_wait_and_for_other_warps_behind_a_barrier(
    text, found, shown, options
):
    source, out, result = cp_async(text, after="", **options)
    reports(result, found)
    if shown:
        assert torch.equal(out, shown(source))


@everywhere
@pytest.mark.parametrize("wait_for", ["", "cp.async.commit_group;\n", "cp.async.wait_group 0;\n", "bar.sync 0;\n"])
def test_a_cp_async_without_a_wait_is_found(wait_for, options):
    _, _, result = cp_async("cp.async.cg.shared.global [%r10], [%rd9], 16;\n" + wait_for, **options)
    assert RACES & set(kinds(result))
    if not options.get("early"):
        assert "uninitialised" in kinds(result)


def handed_over(noinc, arrivals, **options):
    """Warp 0 copies and hands over; warp 1 waits and shows. Without .noinc one plain arrival completes the phase."""
    text = tr.make_barrier(arrivals) + SPOTS + f"""
    setp.lt.u32 %p4, %r0, 32;
    @!%p4 bra CONSUMER;
    cp.async.cg.shared.global [%r10], [%rd9], 16;
    cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%r21];
    {"" if noinc else "bar.warp.sync -1; @!%p1 mbarrier.arrive.shared::cta.b64 _, [%r21];"}
    bra END;
CONSUMER:
    {tr.wait()}
    {BY_NEIGHBOURS.replace("[%rd10]", "[%rd10+-512]")}
END:
    """
    source, out = tr.noise(512), torch.zeros(512, dtype=torch.uint8)
    return source, out, run(tr.frame(text, pointers=2, target="sm_90a"), source, out, **options)


@everywhere
@pytest.mark.parametrize(("noinc", "arrivals"), [(".noinc", 32), ("", 1)])
def test_an_mbarrier_tells_another_warp_that_cp_async_is_done(noinc, arrivals, options):
    source, out, result = handed_over(noinc, arrivals, **options)
    assert not result.findings
    assert torch.equal(out, source)


@everywhere
def test_lanes_whose_copies_are_done_after_the_phase_are_reported(options):
    """31 of 32 arrivals end it."""
    _, _, result = handed_over(".noinc", 31, **options)
    assert any("lane 31 arrives after other lanes" in f.says for f in result.findings if f.kind == "mbarrier")


@everywhere
def test_an_mbarrier_tracks_only_what_came_before_its_arrive(options):
    text = tr.make_barrier(tr.THREADS) + SPOTS + """
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r21];
    cp.async.cg.shared.global [%r10], [%rd9], 16;
    """ + tr.wait() + SHOW + "cp.async.wait_all;\n"
    source, out = tr.noise(16 * tr.THREADS), torch.zeros(16 * tr.THREADS, dtype=torch.uint8)
    reports(run(tr.frame(text, pointers=2), source, out, **options), RACES)


@pytest.mark.parametrize(("copy", "kind", "says"), [
    ("add.u32 %r17, %r10, 4;\ncp.async.cg.shared.global [%r17], [%rd9], 16;", "misaligned", "not a multiple of 16"),
    ("cp.async.cg.shared.global [%r10], [%rd9+4], 16;", "misaligned", "not a multiple of 16"),
    ("cp.async.cg.shared.global [%r10], [%rd9+1024], 16;", "out-of-bounds", "bytes into p"),
    ("add.u32 %r17, %r10, 40000;\ncp.async.cg.shared.global [%r17], [%rd9], 16;", "out-of-bounds", "shared address"),
    ("mov.u32 %r17, 20;\ncp.async.cg.shared.global [%r10], [%rd9], 16, %r17;", "operand", "reads 20"),
])
def test_a_cp_async_that_cannot_be_is_reported(copy, kind, says):
    _, _, result = cp_async(copy + "\ncp.async.wait_all;\n", after="")
    assert any(says in f.says for f in result.findings if f.kind == kind)


@everywhere
@pytest.mark.parametrize(("fence", "found"), [("fence.proxy.async.shared::cta;", []), ("", ["proxy"])])
def test_what_cp_async_wrote_needs_a_fence_before_the_async_proxy_reads_it(fence, found, options):
    text = f"{SPOTS}{COPIED}{fence}\nbar.sync 0;\n" + tr.by_thread_0("""
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r20], 1024;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    """)
    source, out = tr.noise(1024), torch.zeros(1024, dtype=torch.uint8)
    result = run(tr.frame(text, pointers=2), source, out, **options)
    assert kinds(result) == found
    assert torch.equal(out, source)


@pytest.mark.parametrize(("text", "says"), [
    ("cp.async.cg.shared.global [%r20], [%rd1], 8;", "16"),
    ("cp.async.ca.shared.global [%r20], [%rd1], 12;", "4 or 8 or 16"),
    ("cp.async.ca.shared.global.evict_first [%r20], [%rd1], 16;", ".evict_first"),
    ("cp.async.wait_group 32;", "from 0 to 31"),
    ("cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r20], [%r20], 16;", "cluster <- shared"),
    ("cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r20], 16, %h1;", "sm_100"),
    ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%rd1], [%r20], 16;", "noftz"),
    ("cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.s32 [%rd1], [%r20], 16;", "inc: u32"),
    ("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r20], [%rd1], 16;", "3 operands"),
    ("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r20], [%r21];", "sm_100"),
    ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b16 [%r20], %h1, [%r21];", ".b16"),
])
def test_what_is_not_simulated_is_refused_with_the_line(text, says):
    with pytest.raises(ValueError, match="PTX line") as refused:
        run(tr.frame(text), torch.zeros(8))
    assert says in str(refused.value)


def test_bulk_copies_are_refused_before_sm_90():
    with pytest.raises(ValueError, match="sm_90"):
        run(tr.frame("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r20], 16;", target="sm_80"), torch.zeros(8))


# ---- cp.async.bulk

WAIT = tr.wait()


def bulk_load(size, space="shared::cta", after=WAIT, count=None, operands="[%r20], [%rd2], {size}, [%r21]"):
    body = tr.fill_shared(max(size, 4)) + tr.make_barrier()
    body += tr.by_thread_0(f"""
    mov.u32 %r53, 1000;
    {tr.expect(size if count is None else count)}
    cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes {operands.format(size=size)};
    """)
    return tr.frame(body + after + tr.store_shared(size), pointers=2)


@everywhere
@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
@pytest.mark.parametrize("size", [16, 1008, 16384])
def test_a_bulk_copy_brings_its_bytes(size, space, options):
    source, out = tr.noise(size), torch.zeros(size, dtype=torch.uint8)
    result = run(bulk_load(size, space), out, source, **options)
    assert not result.findings
    assert torch.equal(out, source)
    assert result.counters["global_bytes_read"] == size


@everywhere
def test_a_bulk_copy_without_a_wait_is_found(options):
    reports(run(bulk_load(1024, after=""), torch.zeros(1024, dtype=torch.uint8), tr.noise(1024), **options), RACES)


@everywhere
@pytest.mark.parametrize(("fence", "found"), [
    ("fence.mbarrier_init.release.cluster;", []), ("fence.proxy.async;", []), ("", ["mbarrier-fence"]),
    ("fence.proxy.async.global;", ["mbarrier-fence"]),
])
def test_a_copy_sees_an_mbarrier_whose_initialisation_is_fenced(fence, found, options):
    text = bulk_load(1008).replace("fence.mbarrier_init.release.cluster;", fence)
    for strict in (True, False):
        result = run(text, torch.zeros(1008, dtype=torch.uint8), tr.noise(1008), strict=strict, **options)
        grades = {f.grade for f in result.findings + result.notes}
        assert {f.kind for f in result.findings + result.notes} == set(found)
        assert grades <= {"error" if strict else "note"}


def test_expecting_other_bytes_than_come_is_found():
    result = run(bulk_load(1024, count=1040), torch.zeros(1024, dtype=torch.uint8), tr.noise(1024))
    assert "deadlock" in kinds(result) and any("16 bytes are missing" in f.says for f in result.findings)


@pytest.mark.parametrize(("operands", "kind", "says"), [
    ("[%r20], [%rd2], %r53, [%r21]", "operand", "multiple of 16"),
    ("[%r20+8], [%rd2], 512, [%r21]", "misaligned", "not a multiple of 16"),
    ("[%r20], [%rd2+8], 512, [%r21]", "misaligned", "not a multiple of 16"),
    ("[%r20], [%rd2+16], 1024, [%r21]", "out-of-bounds", "bytes into p"),
    ("[%r20+32000], [%rd2], 1024, [%r21]", "out-of-bounds", "shared address"),
    ("[%r20], [%rd2], 1024, [%r21+8]", "mbarrier", "no mbarrier"),
])
def test_a_bulk_copy_that_cannot_be_is_reported(operands, kind, says):
    result = run(bulk_load(1024, operands=operands), torch.zeros(1024, dtype=torch.uint8), tr.noise(1024))
    assert kind in kinds(result)
    assert any(says in f.says for f in result.findings if f.kind == kind)


@everywhere
@pytest.mark.parametrize("ctas", [2, 4])
def test_a_bulk_multicast_reaches_every_cta(ctas, options):
    size = 512
    body = tr.fill_shared(ctas * size) + tr.make_barrier() + tr.by_thread_0(tr.expect(ctas * size), "EXPECTING")
    body += "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\nmov.u32 %r40, %cluster_ctarank;\n"
    body += tr.by_thread_0(f"""
    mul.lo.u32 %r41, %r40, {size};
    add.u32 %r42, %r20, %r41;
    cvt.u64.u32 %rd22, %r41;
    add.s64 %rd22, %rd22, %rd2;
    mov.b16 %h1, {(1 << ctas) - 1};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r42], [%rd22], {size}, [%r21], %h1;
    """)
    body += tr.wait() + tr.store_shared(ctas * size, by_rank=True) + tr.MEET
    source, out = tr.noise(ctas * size), torch.zeros(ctas, ctas * size, dtype=torch.uint8)
    result = run(tr.frame(body, pointers=2), out, source, grid=ctas, cluster=ctas, **options)
    assert not result.findings
    assert all(torch.equal(row, source) for row in out)


@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
def test_the_destination_of_shared_cta_is_the_ctas_own(space):
    body = tr.make_barrier() + tr.MEET + tr.by_thread_0(f"""
    {tr.expect(64)}
    mov.u32 %r40, %cluster_ctarank;
    xor.b32 %r40, %r40, 1;
    mapa.shared::cluster.u32 %r41, %r20, %r40;
    mapa.shared::cluster.u32 %r42, %r21, %r40;
    cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes [%r41], [%rd1], 64, [%r42];
    """) + tr.wait() + tr.MEET
    result = run(tr.frame(body), tr.noise(64), grid=2, cluster=2)
    assert ("operand" in kinds(result)) == (space == "shared::cta")
    assert bool(result.findings) == (space == "shared::cta")


SEND = """
    mov.u32 %r40, %cluster_ctarank;
    xor.b32 %r41, %r40, 1;
    add.u32 %r42, %r20, 4096;
    mapa.shared::cluster.u32 %r43, %r42, %r41;
    mapa.shared::cluster.u32 %r44, %r21, %r41;
"""


def sending(copy, size=1024, before="", fence="fence.proxy.async;"):
    """Each of two CTAs sends its row of %rd1 to the other's shared memory, 4096 bytes up; then shows what came."""
    body = f"{SEND}mul.wide.u32 %rd23, %r40, {size};\nadd.s64 %rd1, %rd1, %rd23;\n" + tr.load_shared(size) + before
    body += fence + tr.make_barrier() + tr.by_thread_0(tr.expect(size), "EXPECTING") + tr.MEET + tr.by_thread_0(copy)
    return tr.frame(body + tr.wait() + "add.u32 %r20, %r20, 4096;\n" + tr.store_shared(size) + tr.MEET)


SEND_COPY = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r43], [%r20], 1024, [%r44];"


@everywhere
def test_a_cta_sends_its_shared_memory_to_another(options):
    data = tr.noise(2048).reshape(2, 1024)
    wanted = data.flip(0)
    result = run(sending(SEND_COPY), data, grid=2, cluster=2, **options)
    assert not result.findings
    assert torch.equal(data, wanted)


@pytest.mark.parametrize(("text", "found"), [
    (sending(SEND_COPY, fence=""), ["proxy"]),
    (sending(SEND_COPY.replace("[%r43]", "[%r42]").replace("[%r44]", "[%r21]")), {"operand"}),
], ids=["without a fence after the generic writes", "to itself"])
def test_what_is_sent_wrongly_is_reported(text, found):
    reports(run(text, tr.noise(2048), grid=2, cluster=2), found)


FLOATS = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
OPS = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
}
NUMPY = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32, "b64": np.uint64}


@everywhere
@pytest.mark.parametrize(
    "name", ["add.u32", "add.u64", "min.s32", "max.u32", "inc.u32", "dec.u32", "and.b32", "xor.b32"]
)
def test_a_reduction_into_another_ctas_memory(name, options):
    op, type_ = name.split(".")
    data = tr.noise(2048).reshape(2, 1024)
    initial = tr.each_word("START", 1024, "shl.b32 %r33, %r30, 20;\n    st.shared.u32 [%r31+4096], %r33;")
    copy = SEND_COPY.replace("cp.async", "cp.reduce.async").replace("bytes [", f"bytes.{op}.{type_} [")
    start = np.arange(0, 1024, 4, dtype=np.uint32) << np.uint32(20)
    wanted = [OPS[op](start.view(NUMPY[type_]), row.numpy().view(NUMPY[type_])) for row in data.flip(0).clone()]
    result = run(sending(copy, before=initial), data, grid=2, cluster=2, **options)
    assert not result.findings
    for row, right in zip(data, wanted):
        np.testing.assert_array_equal(row.numpy().view(NUMPY[type_]), right)


def bulk_store(name, size, operands="[%rd2], [%r20], {size}", target="sm_90a",
               end="cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;"):
    body = tr.load_shared(size) + "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    return tr.frame(body + tr.by_thread_0(f"{name} {operands.format(size=size)};\n{end}"), pointers=2, target=target)


PLAIN = "cp.async.bulk.global.shared::cta.bulk_group"
REDUCE = "cp.reduce.async.bulk.global.shared::cta.bulk_group"


@everywhere
def test_a_bulk_store_takes_its_bytes_out(options):
    source, out = tr.noise(4096), torch.zeros(4096, dtype=torch.uint8)
    result = run(bulk_store(PLAIN, 4096), source, out, **options)
    assert not result.findings
    assert torch.equal(out, source)
    assert result.counters["global_bytes_written"] == 4096


@everywhere
def test_a_bulk_store_that_a_whole_warp_issues_runs_once(options):
    """Any of its lanes can wait for it."""
    source, out = tr.noise(4096), torch.zeros(4096, dtype=torch.uint8)
    end = "bar.warp.sync 0xffffffff; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    text = bulk_store(PLAIN, 4096, end=end)
    alone = run(text, source, out, **options)
    all_of_them = text.replace("setp.ne.u32 %p1, %r0, 0;", "setp.ge.u32 %p1, %r0, 32;", 1)
    result = run(all_of_them, source, out, **options)
    assert not result.findings and torch.equal(out, source)
    assert result.counters["thread_instructions"] > alone.counters["thread_instructions"] + 3 * 31
    for name in ("global_bytes_written", "async_operations", "global_sectors"):
        assert result.counters[name] == alone.counters[name], name


def test_a_byte_mask_chooses_bytes_of_every_16():
    source, out = tr.noise(256), torch.full((256,), 9, dtype=torch.uint8)
    text = bulk_store(PLAIN + ".cp_mask", 256, "[%rd2], [%r20], {size}, %h1", target="sm_100a").replace(
        "setp.ne.u32 %p1", "mov.b16 %h1, 0x80f1;\n    setp.ne.u32 %p1", 1
    )
    result = run(text, source, out)
    chosen = torch.tensor([0x80F1 >> n & 1 for n in range(16)], dtype=torch.bool).repeat(16)
    assert not result.findings
    assert torch.equal(out, torch.where(chosen, source, 9))


def in_order(pending):
    return f"""
    cp.async.bulk.commit_group;
    {PLAIN} [%rd2+1024], [%r20], 1024;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group {pending};
    ld.global.u32 %r40, [%rd2];
    cp.async.bulk.wait_group 0;
    """


@everywhere
@pytest.mark.parametrize(("end", "found"), [
    ("cp.async.bulk.wait_group 0;\nld.global.u32 %r40, [%rd2];", RACES), (in_order(0), []), (in_order(1), []),
    (in_order(2), RACES),
], ids=["nothing is committed", "0 may be pending", "1 may be pending", "2 may be pending"])
def test_bulk_groups_complete_in_their_order_once_they_are_committed(end, found, options):
    text, out = bulk_store(PLAIN, 1024, end=end), torch.zeros(2048, dtype=torch.uint8)
    reports(run(text, tr.noise(1024), out, **options), found)


ALL_INTEGERS = """add.u32 add.s32 add.u64 min.u32 min.s32 min.u64 min.s64 max.u32 max.s32 max.u64 max.s64
                  inc.u32 dec.u32 and.b32 and.b64 or.b32 or.b64 xor.b32 xor.b64"""


@pytest.mark.parametrize("name", ALL_INTEGERS.split())
def test_integer_reductions_into_global_memory(name):
    op, type_ = name.split(".")
    source, out = tr.noise(1024), tr.noise(1024, seed=4)
    wanted = OPS[op](out.numpy().view(NUMPY[type_]), source.numpy().view(NUMPY[type_]))
    result = run(bulk_store(f"{REDUCE}.{name}", 1024), source, out)
    assert not result.findings
    np.testing.assert_array_equal(out.numpy().view(NUMPY[type_]), wanted)


@pytest.mark.parametrize(
    ("op", "type_"),
    [("add", "f32"), ("add", "f64"), ("add.noftz", "f16"), ("add.noftz", "bf16"), ("min", "f16"), ("max", "bf16")],
)
def test_float_reductions_into_global_memory(op, type_):
    dtype = FLOATS[type_]
    source, out = (torch.randn(64, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    wanted = {"add": torch.add, "min": torch.minimum, "max": torch.maximum}[op.split(".")[0]](out, source)
    size = 64 * source.element_size()
    result = run(bulk_store(f"{REDUCE}.{op}.{type_}", size), source, out)
    assert not result.findings
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(("op", "tiny"), [
    ("add.f32", torch.full((16,), 1e-40)), ("add.noftz.f16", torch.full((16,), 6e-8, dtype=torch.float16)),
], ids=["f32", "f16"])
def test_adding_keeps_subnormals(op, tiny):
    out = tiny.clone()
    run(bulk_store(f"{REDUCE}.{op}", 16 * tiny.itemsize), tiny, out)
    assert torch.equal(out, tiny + tiny) and out.any()


@everywhere
def test_reductions_of_many_ctas_do_not_race_with_each_other(options):
    source, out = torch.ones(256), torch.zeros(256)
    result = run(bulk_store(f"{REDUCE}.add.f32", 1024), source, out, grid=5, **options)
    assert not result.findings
    assert (out == 5).all()


def test_stores_of_two_ctas_onto_one_place_do_race():
    result = run(bulk_store(PLAIN, 1024), tr.noise(2048), torch.zeros(1024, dtype=torch.uint8), grid=2, schedule=1)
    assert not result.findings  # the same values
    source = tr.noise(2048)
    text = bulk_store(PLAIN, 1024).replace(
        "setp.ne.u32 %p1",
        "mov.u32 %r40, %ctaid.x;\nmul.wide.u32 %rd23, %r40, 1024;\nadd.s64 %rd1, %rd1, %rd23;\nsetp.ne.u32 %p1",
        1,
    )
    result = run(text, source, torch.zeros(1024, dtype=torch.uint8), grid=2, schedule=1)
    reports(result, ["race-write-write"])


def test_a_prefetch_has_no_effect_but_must_stay_inside():
    for size, found in ((1024, []), (1040, ["out-of-bounds"]), (1000, ["operand"])):
        text = tr.frame(tr.by_thread_0(f"mov.u32 %r53, {size};\ncp.async.bulk.prefetch.L2.global [%rd1], %r53;"))
        result = run(text, tr.noise(1024))
        assert kinds(result) == found
        assert result.counters["global_bytes_read"] == 0


# ---- st.async and red.async


def storing_async(store, size, target="sm_90a", before=""):
    """Each thread of two CTAs stores to the other, at 4096 + 16 * thread; then shows what came."""
    body = SEND + """
    shl.b32 %r46, %r0, 4;
    add.u32 %r47, %r43, %r46;
    mov.u32 %r48, %r0;
    add.u32 %r49, %r0, 1000;
    mad.lo.u32 %r50, %r40, 5000, %r0;
    cvt.u64.u32 %rd24, %r50;
    shl.b64 %rd24, %rd24, 32;
    """ + before + tr.make_barrier() + tr.by_thread_0(tr.expect(size * tr.THREADS), "EXPECTING")
    body += tr.MEET + store + tr.wait()
    body += f"mul.wide.u32 %rd23, %r40, {16 * tr.THREADS};\nadd.s64 %rd1, %rd1, %rd23;\nadd.u32 %r20, %r20, 4096;\n"
    show = f"""
    and.b32 %r51, %r30, 15;
    setp.ge.u32 %p6, %r51, {size};
    @!%p6 ld.shared.u32 %r32, [%r31];
    @!%p6 st.global.u32 [%rd21], %r32;
    """
    return tr.frame(body + tr.each_word("OUT", 16 * tr.THREADS, show) + tr.MEET, target=target)


STORES = {
    "u32 [%r47], %r50, [%r44]": lambda t, rank: [t + 5000 * rank],
    "v2.b32 [%r47], {%r50, %r49}, [%r44]": lambda t, rank: [t + 5000 * rank, t + 1000],
    "v4.f32 [%r47], {%r50, %r49, %r48, %r50}, [%r44]": lambda t, rank: [t + 5000 * rank, t + 1000, t, t + 5000 * rank],
    "b64 [%r47], %rd24, [%r44]": lambda t, rank: [0, t + 5000 * rank],
    "v2.u64 [%r47], {%rd24, %rd24}, [%r44]": lambda t, rank: [0, t + 5000 * rank, 0, t + 5000 * rank],
}


@everywhere
@pytest.mark.parametrize("store", STORES)
def test_st_async_puts_values_into_another_cta(store, options):
    words = [STORES[store](t, 1) for t in range(tr.THREADS)]
    out = torch.zeros(2, tr.THREADS, 4, dtype=torch.int32)
    text = storing_async(f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{store};\n", 4 * len(words[0]))
    result = run(text, out, grid=2, cluster=2, **options)
    assert not result.findings
    wanted = [[(STORES[store](t, rank) + [0] * 4)[:4] for t in range(tr.THREADS)] for rank in (1, 0)]
    assert out.tolist() == wanted


@everywhere
@pytest.mark.parametrize(("op", "wanted"), [
    ("add.u32", lambda t: 7 + t), ("min.s32", lambda t: min(7, t)), ("max.u32", lambda t: max(7, t)),
    ("xor.b32", lambda t: 7 ^ t), ("inc.u32", lambda t: 0 if t <= 7 else 8),
])
def test_red_async_combines_in_another_cta(op, wanted, options):
    before = "add.u32 %r52, %r42, %r46;\nst.shared.u32 [%r52], 7;\nfence.proxy.async;\n"
    out = torch.zeros(2, tr.THREADS, 4, dtype=torch.int32)
    name = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op}"
    text = storing_async(f"{name} [%r47], %r48, [%r44];\n", 4, before=before)
    result = run(text, out, grid=2, cluster=2, **options)
    assert not result.findings
    assert out[:, :, 0].tolist() == [[wanted(t) for t in range(tr.THREADS)]] * 2


STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r47], %r50, [%r44];\n"


@everywhere
def test_a_st_async_without_a_wait_is_found(options):
    text = storing_async(STORE, 4).replace(tr.wait(), "")
    reports(run(text, torch.zeros(2, tr.THREADS, 4, dtype=torch.int32), grid=2, cluster=2, **options), RACES)


def test_st_async_needs_a_cluster_and_an_mbarrier_beside_the_data():
    alone = STORE.replace("[%r47]", "[%r20]").replace("[%r44]", "[%r21]")
    reports(run(tr.frame(tr.make_barrier() + alone), torch.zeros(8)), {"operand"})
    text = storing_async(STORE.replace("[%r44]", "[%r21]"), 4)
    reports(run(text, torch.zeros(2, tr.THREADS, 4, dtype=torch.int32), grid=2, cluster=2), {"mbarrier"})


# ---- clusterlaunchcontrol


def taking_over(multicast="", wait_for=True, after_refusal=False, answer_first=False):
    """A persistent CTA: counts its tile in %rd1[ctaid], asks for another cluster's, and ends when there is none."""
    request = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
    request += f"{multicast}.b128 [%r20], [%r21];"
    waiting = """
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r21], %r45;
    @!%p2 bra WAIT;
""" if wait_for else ""
    lead = "setp.ne.or.u32 %p5, %r44, 0, %p1;" if multicast else "mov.pred %p5, %p1;"
    body = f"""
    .reg .b128 %answer;
    mov.u32 %r43, %ctaid.x;
    mov.u32 %r44, %cluster_ctarank;
    mov.u32 %r45, 0;
    {lead}
    {tr.make_barrier()}
    {tr.MEET}NEXT:
    @!%p1 {tr.expect(16)}
    {tr.MEET}    @!%p5 {request}
    mul.wide.u32 %rd22, %r43, 4;
    add.s64 %rd22, %rd22, %rd1;
    @!%p1 red.global.add.u32 [%rd22], 1;
    {waiting}
    xor.b32 %r45, %r45, 1;
    ld.shared.b128 %answer, [%r20];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p6, %answer;
    {"clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r43, %answer;" if answer_first else ""}
    @%p6 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r43, %r46, %r47, _}}, %answer;
    @%p6 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r48, %answer;
    add.u32 %r43, %r43, %r44;
    fence.proxy.async.shared::cta;
    {tr.MEET}    @%p6 bra NEXT;
    {f"@!%p5 {request}" if after_refusal else ""}
    """
    return tr.frame(body, target="sm_100a")


@everywhere
@pytest.mark.parametrize(
    ("multicast", "cluster"), [("", 1), (".multicast::cluster::all", 1), (".multicast::cluster::all", 2)]
)
def test_every_tile_is_done_once_by_those_who_started(multicast, cluster, options):
    tiles = torch.zeros(12, dtype=torch.int32)
    result = run(taking_over(multicast), tiles, grid=12, cluster=cluster, **options)
    assert not result.findings
    assert (tiles == 1).all()
    assert result.counters["clusters"] < 12 // cluster


def test_the_first_ctaid_has_three_coordinates():
    text = taking_over().replace(
        "add.u32 %r43, %r43, %r44;", "mad.lo.u32 %r43, %r46, 2, %r43;\nmad.lo.u32 %r43, %r47, 6, %r43;"
    )
    tiles = torch.zeros(12, dtype=torch.int32)
    result = run(text, tiles, grid=(2, 3, 2))
    assert not result.findings
    assert (tiles == 1).all() and result.counters["clusters"] == 1


@pytest.mark.parametrize(("text", "found", "says"), [
    (taking_over(wait_for=False), RACES, ""),
    (taking_over(wait_for=False), {"operand"}, ""),
    (taking_over(after_refusal=True), {"operand"}, "seen one fail"),
    (taking_over().replace("[%r20], [%r21];", "[%r20+8], [%r21];"), {"misaligned"}, ""),
], ids=["read before the wait", "no answer", "asked again after a refusal", "16 bytes that are not aligned"])
def test_a_request_that_is_made_or_read_wrongly_is_found(text, found, says):
    reports(run(text, torch.zeros(4, dtype=torch.int32), grid=4), found, says)


def test_the_ctaid_of_a_refusal_may_be_read_but_is_of_no_cta():
    show = "@!%p6 st.global.u32 [%rd1+16], %r43;\n    add.u32 %r43, %r43, %r44;"
    tiles = torch.zeros(5, dtype=torch.int32)
    result = run(taking_over(answer_first=True).replace("add.u32 %r43, %r43, %r44;", show), tiles, grid=4)
    assert not result.findings
    assert tiles[:4].tolist() == [1] * 4 and tiles[4] not in range(4)
