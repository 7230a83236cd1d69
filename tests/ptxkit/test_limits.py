"""What no GPU has or accepts is refused before anything runs, with what was asked for and the limit."""

import subprocess
import sys

import pytest
import torch
from assembly import kernel

from ptxkit import limits
from ptxkit.launches import LaunchError, launch
from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("size", [limits.LOCAL + 1, 1 << 30, 1 << 59, (1 << 63) - 1, (1 << 64) - 16])
@pytest.mark.parametrize(
    "space, what, limit",
    [("local", ".local variables of a thread", limits.LOCAL), ("shared", "bytes of shared memory", 227 << 10)],
)
def test_more_local_or_shared_memory_than_there_is_is_refused(space, what, limit, size):
    body = f".{space} .align 16 .b8 big[{size}]; mov.u64 %rd5, big; st.{space}.u32 [%rd5], %r1;"
    with pytest.raises((PtxError, LaunchError), match=what) as error:
        launch(kernel(body, shared=0), grid=1, block=32, args=[torch.zeros(1)])
    for number in (size, limit):
        assert str(number) in str(error.value).replace(",", "")


@pytest.mark.parametrize("variable, says", [
    (f".global .b8 big[{1 << 50}];", "1,125,899,906,842,624 bytes of .global variables; there are 68,719,476,736"),
    (".const .b8 big[65537];", "65,537 bytes of .const variables; there are 65,536"),
])
def test_more_variables_of_a_module_than_there_may_be_are_refused(variable, says):
    with pytest.raises(PtxError, match=says):
        launch(kernel("").replace(".visible", f"{variable} .visible"), grid=1, block=32, args=[torch.zeros(1)])


def test_more_parameters_than_there_may_be_are_refused():
    ptx = kernel("").replace(".param .u64 p1", ".param .u64 p1, .param .b8 more[17179869184]")
    with pytest.raises(PtxError, match="17,179,869,192 bytes of parameters; there are 32,764"):
        launch(ptx, grid=1, block=32, args=[torch.zeros(1), b""])


def test_a_large_variable_costs_no_memory_where_nobody_touches_it():
    ptx = kernel("mov.u64 %rd5, big; ld.global.u32 %r1, [%rd5+1073741820]; st.global.u32 [%rd1], %r1;")
    out = torch.ones(1, dtype=torch.int32)
    run = launch(ptx.replace(".visible", ".global .b8 big[1073741824]; .visible"), grid=1, block=1, args=[out])
    assert out.item() == 0 and not run.findings


def test_local_memory_that_the_host_does_not_have_ends_the_launch_with_a_finding():
    program = """
import resource, sys, torch
from ptxkit.launches import launch
ptx, small = sys.stdin.read().split("-----")
launch(small, grid=1, block=32, args=[torch.zeros(1)])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
for clock in (None, True):
    (finding,) = launch(ptx, grid=1, block=1024, args=[torch.zeros(1)], clock=clock).findings
    print(finding.kind, "no memory left" in finding.says)
"""
    text = kernel(".local .b8 big[524288]; mov.u64 %rd5, big; st.local.u8 [%rd5], 1;") + "-----" + kernel("")
    done = subprocess.run([sys.executable, "-c", program], input=text, capture_output=True, text=True, timeout=600)
    assert done.stdout == "unsupported True\n" * 2, done.stderr


@pytest.mark.parametrize("shape, says", [
    (dict(grid=(1, 65536)), r"grid=\(1, 65536, 1\); at most \(2147483647, 65535, 65535\) along x, y and z"),
    (dict(grid=(1, 1, 65536)), "at most"),
    (dict(block=(1, 1, 65)), r"block=\(1, 1, 65\); at most \(1024, 1024, 64\) along x, y and z"),
    (dict(block=-1), "whole numbers"),
    (dict(dynamic_shared=-8), "dynamic_shared=-8 must be a whole number of bytes, 0 or more"),
    (dict(dynamic_shared=-4096), "0 or more"),
    (dict(dynamic_shared=1.5), "a whole number of bytes"),
    (dict(dynamic_shared="8"), "a whole number of bytes"),
    (dict(limit=0), "limit=0 must be a number of warp instructions, 1 or more, or None"),
    (dict(limit="x"), "a number of warp instructions"),
    (dict(registers=-1), "registers=-1 must be the registers of a thread, 1 to 255, or None"),
    (dict(registers=256), "1 to 255"),
    (dict(memory=[(-5, 4096, "x")]), "memory='x': there are no 4,096 bytes at -0x5"),
    (dict(memory=[(4096, 2**50, "x")]), "there are no 1,125,899,906,842,624 bytes at 0x1000"),
    (dict(grid=2**31 - 1, clock=True), "clusters in detail"),
])
def test_a_launch_beyond_the_limits_is_refused(shape, says):
    with pytest.raises(LaunchError, match=says):
        launch(kernel(""), args=[torch.zeros(1)], **dict(grid=1, block=32) | shape)


@pytest.mark.parametrize("type_, value", [("f32", 1e300), ("f16", 1e10), ("f32", -1e300)])
def test_a_number_that_its_parameter_does_not_hold_is_refused(type_, value):
    ptx = kernel("").replace(".param .u64 p1", f".param .u64 p1, .param .{type_} x")
    with pytest.raises(LaunchError, match=f"argument 1 .* does not fit into .{type_}"):
        launch(ptx, grid=1, block=32, args=[torch.zeros(1), value])


@pytest.mark.parametrize("instruction", [
    "ld.global.u32 %r1;", "ld.u32;", "st.global.u32 [%rd1];", "st;", "atom.global.add.u32 %r1, [%rd1];",
    "atom.global.cas.b32 %r1, [%rd1], %r2;", "red.global.add.u32 [%rd1];", "red;", "isspacep %p1, %rd1;",
    "mapa.u64 %rd1, %rd2;", "getctarank.e5m2 %r1, %rd1;", "bar;", "bar.sync;", "bar.red.popc.u32 %r1, 0;",
    "bar.warp.sync;", "barrier.cluster;", "mbarrier;", "mbarrier.shared.b64;", "mbarrier.init.shared.b64 [smem];",
    "mbarrier.arrive.shared.b64;", "mbarrier.try_wait.shared.b64 %p1;", "tensormap;", "setmaxnreg.inc;",
    "cp.async.ca.shared.global [smem];", "mov.x4 %rd1, %clock64;", "nanosleep.u32;",
])
def test_an_instruction_without_its_operands_or_modifiers_is_quoted(instruction):
    with pytest.raises(PtxError, match=r"line \d+") as error:
        launch(kernel(instruction), grid=1, block=32, args=[torch.zeros(1)])
    assert instruction in str(error.value)
