"""Each operand needs a register of its type's bits: PTX that says otherwise is refused, as ptxas refuses it.

A template names each register by its class: `<r>` is one of 32 bits, `<r+>` one of 32 bits or more.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from assembly import kernel, kinds

from ptxkit.launches import launch
from ptxkit.program import Program
from ptxkit.ptx import PtxError, parse

pytestmark = pytest.mark.simulated

CLASSES = {"p": 1, "h": 16, "r": 32, "rd": 64, "q": 128}  # -> bits
HOPPER = """
ld.global.u8 <h+>, [%rd30];
ld.global.u32 <r+>, [%rd30];
ld.shared.u64 <rd+>, [sm];
ld.param.u64 <rd+>, [p];
ld.local.f64 <rd+>, [loc];
ld.global.b128 <q>, [%rd30];
st.global.u8 [%rd30], <h+>;
st.global.u32 [%rd30], <r+>;
st.global.u64 [%rd30], <rd+>;
st.global.b128 [%rd30], <q>;
atom.global.add.u32 <r>, [%rd30], <r>;
atom.global.add.u64 <rd>, [%rd30], <rd>;
atom.global.add.f64 <rd>, [%rd30], <rd>;
atom.global.cas.b16 <h>, [%rd30], <h>, <h>;
atom.global.cas.b64 <rd>, [%rd30], <rd>, <rd>;
atom.global.cas.b128 <q>, [%rd30], <q>, <q>;
atom.global.v2.f32.add {<r>,%f2}, [%rd30], {<r>,%f4};
red.global.add.u64 [%rd30], <rd>;
multimem.ld_reduce.global.add.f32 <r>, [%rd30];
mapa.u64 <rd>, <rd>, <r>;
mapa.shared::cluster.u32 <r>, <r>, <r>;
getctarank.u64 <r>, <rd>;
isspacep.global <p>, %rd1;
clz.b64 <r>, <rd>;
popc.b64 <r>, <rd>;
bfind.u64 <r>, <rd>;
shfl.sync.idx.b32 <r>|<p>, <r>, <r>, <r>, <r>;
vote.sync.ballot.b32 <r>, <p>, <r>;
vote.sync.any.pred <p>, <p>, <r>;
match.any.sync.b64 <r>, <rd>, <r>;
match.all.sync.b32 <r>|<p>, <r>, <r>;
redux.sync.add.u32 <r>, <r>, <r>;
elect.sync <r>|<p>, <r>;
activemask.b32 <r>;
bar.red.popc.u32 <r>, <r>, <r>, <p>;
bar.red.or.pred <p>, <r>, <r>, <p>;
bar.warp.sync <r>;
mbarrier.init.shared.b64 [sm], <r>;
mbarrier.arrive.shared.b64 <rd>, [sm], <r>;
mbarrier.arrive.expect_tx.shared.b64 <rd>, [sm], <r>;
mbarrier.test_wait.shared.b64 <p>, [sm], <rd>;
mbarrier.try_wait.parity.shared.b64 <p>, [sm], <r>, <r>;
mbarrier.pending_count.b64 <r>, <rd>;
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {<r>,<r>}, [sm];
stmatrix.sync.aligned.m8n8.x1.shared.b16 [sm], {<r>};
movmatrix.sync.aligned.m8n8.trans.b16 <r>, <r>;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {<r>,%f2,%f3,%f4},{<r>,%r6,%r7,%r8},{<r>,%r9},{<r>,%f5,%f6,%f7};
mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {<rd>,%fd2},{<rd>},{<rd>},{<rd>,%fd6};
wmma.load.c.sync.aligned.row.m8n8k4.global.f64 {<rd>,%fd2}, [%rd30], <r>;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {<r>,%f2,%f3,%f4}, <rd>, <rd>, <p>, 1, 1, 0, 0;
mov.b128 <q>, {<rd>,<rd>};
mov.b64 {<r>,<r>}, <rd>;
mov.b32 <r>, {<h>,<h>};
mov.pred <p>, <p>;
mov.u64 <rd>, %clock64;
mov.u32 <r>, %laneid;
add.u16 <h>, <h>, <h>;
add.u64 <rd>, <rd>, <rd>;
mul.wide.u32 <rd>, <r>, <r>;
shl.b64 <rd>, <rd>, <r>;
selp.b64 <rd>, <rd>, <rd>, <p>;
setp.lt.and.f32 <p>, <r>, <r>, <p>;
cvta.to.shared.u64 <rd>, <rd>;
nanosleep.u32 <r>;
cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%rd30], [sm], <r>, <rd>;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [sm], [%rd30], <r>, [sm], <h>;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [sm], [%rd30, {<r>,<r>}], [sm];
st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [sm], <rd>, [sm];
tensormap.replace.tile.global_address.shared::cta.b1024.b64 [sm], <rd>;
""".strip().splitlines()
BLACKWELL = """
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [sm], <r>;
tcgen05.ld.sync.aligned.32x32b.x2.b32 {<r>,<r>}, [%r9];
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r9], {<r>,<r>};
tcgen05.mma.cta_group::1.kind::f16 [%r9], <rd>, <rd>, <r>, <p>;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 <p>, <q>;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 <r>, <q>;
add.rn.f32x2 <rd>, <rd>, <rd>;
redux.sync.min.f32 <r>, <r>, <r>;
st.bulk.weak.shared::cta [%r9], <rd>, 0;
""".strip().splitlines()
TEMPLATES = [("sm_90a", t) for t in HOPPER] + [("sm_100a", t) for t in BLACKWELL]
PLACE = re.compile(r"<(p|h|r|rd|q)(\+?)>")


def variants(template):
    """(instruction, the register that differs, is it of bits that the operand takes): each operand in each class."""
    between, places = PLACE.split(template)[::3], PLACE.findall(template)
    names = [f"%{class_}{n}" for n, (class_, _) in enumerate(places, 1)]
    for k, (operand_class, wider) in enumerate(places):
        for class_, bits in CLASSES.items():
            given = [*names[:k], f"%{class_}{k + 1}", *names[k + 1 :], ""]
            fits = bits == CLASSES[operand_class] or (bool(wider) and bits > CLASSES[operand_class])
            yield "".join(text + name for text, name in zip(between, given)), given[k], fits


def module(instruction, target):
    registers = ".reg .pred %p<10>; .reg .b16 %h<10>; .reg .b32 %r<10>; .reg .b64 %rd<31>; .reg .b128 %q<10>;"
    return f"""
.version 8.8
.target {target}
.address_size 64
.visible .entry k(.param .u64 p)
{{
    {registers} .reg .f32 %f<10>; .reg .f64 %fd<10>;
    .shared .align 128 .b8 sm[1024]; .local .align 16 .b8 loc[64];
    {instruction}
    ret;
}}
"""


def refusal(instruction, target):
    """Return what the simulator says against an instruction; None: it takes it."""
    parsed = parse(module(instruction, target))
    try:
        Program(parsed, parsed.kernels["k"], int(re.sub(r"\D", "", target)))
    except PtxError as error:
        return str(error)
    return None


@pytest.mark.parametrize("target, template", TEMPLATES, ids=[t.split(" ")[0] for _, t in TEMPLATES])
def test_a_register_must_have_the_bits_of_its_operand(target, template):
    for instruction, register, fits in variants(template):
        said = refusal(instruction, target)
        if fits:
            assert said is None, said
        else:
            assert said and f"`{instruction}`: {register} is declared ." in said and " needs " in said, instruction


def ptxas():
    found = shutil.which("ptxas")
    if not found:
        triton = pytest.importorskip("triton", reason="ptxas comes with CUDA and with Triton")
        found = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    return str(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target, template", TEMPLATES, ids=[t.split(" ")[0] for _, t in TEMPLATES])
def test_ptxas_takes_the_same_registers(tmp_path, target, template):
    source = tmp_path / "k.ptx"
    for instruction, register, fits in variants(template):
        if register[1] == "p" and ("{" in template or template.startswith("movmatrix")):
            continue  # it takes predicates there, against the manual
        source.write_text(module(instruction, target))
        command = [ptxas(), f"-arch={target}", str(source), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode == 0) == fits, (instruction, done.stderr)


@pytest.mark.parametrize("base, says", [("%p1", "%p1 is declared .pred"), ("%q1", "%q1 is declared .b128")])
def test_an_address_needs_a_register_of_an_address(base, says):
    assert f"{says}; an address needs a register of 32 or 64 bits" in refusal(f"ld.shared.u32 %r1, [{base}];", "sm_90a")


def test_nothing_beside_a_register_is_written_by_a_load_that_is_too_wide_for_it():
    with pytest.raises(PtxError, match=r"line \d+.*%r63 is declared .b32; .b128 needs a register of 128 bits"):
        launch(kernel("ld.shared.b128 %r63, [smem];"), grid=1, block=32, args=[torch.zeros(1)])


@pytest.mark.parametrize("type_, high", [("u64", 0), ("s64", -1), ("s16", -1)])
def test_registers_of_128_bits_take_and_give_fewer(type_, high):
    body = f"""
    .reg .b128 %q<3>; mul.wide.u32 %rd9, %r0, 16; add.s64 %rd10, %rd1, %rd9; add.s64 %rd11, %rd2, %rd9;
    ld.global.{type_} %q1, [%rd10]; st.global.b128 [%rd11], %q1;
    ld.global.b128 %q2, [%rd10]; st.global.{type_} [%rd11], %q2;
"""
    x, out = -torch.arange(1, 65).reshape(32, 2), torch.zeros(32, 2, dtype=torch.int64)
    run = launch(kernel(body, pointers=2), grid=1, block=32, args=[x, out])
    assert not run.findings
    assert torch.equal(out[:, 0], x[:, 0]) and (out[:, 1] == high).all()


def test_st_bulk_takes_its_size_from_a_register():
    body = """
    setp.eq.u32 %p1, %r0, 3; mov.u64 %rd5, 256; mov.u32 %r1, smem;
    @%p1 st.bulk.weak.shared::cta [%r1], %rd5, 0;
"""
    run = launch(kernel(body, target="sm_100a"), grid=1, block=32, args=[torch.zeros(1)])
    assert kinds(run) == [] and run.counters["shared_bytes_written"] == 256
