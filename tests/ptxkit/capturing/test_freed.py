"""Memory that was freed and is used, in kda's own calls as they could have been written and in small kernels."""

import _thread
import gc
import time

import pytest
import torch
from assembly import kernel
from small_kernels import COPY, copy

import kda
from kda.backends.common.routine import Routine
from kda.model.problem import Inputs
from kda.parallel import operators
from kda.tools.verify.cases import make_inputs
from ptxkit import capture
from ptxkit.capturing.arena import Arena
from ptxkit.compile.code import entries
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.launch_list import part_of
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]


def ones():
    return torch.ones(32, dtype=torch.int32, device="cuda")


class Address(int):
    """What a launch once got: a number, behind which nothing holds the memory."""

    def data_ptr(self):
        return int(self)


def let_go(routine, like, tensors):
    """Run a routine that lets go of the memory its kernels work in as soon as it has the address."""
    addresses = {}
    tensors += [None] * (routine.inputs - len(tensors))
    for phase in routine.phases:
        for shape, _, dtype, _ in phase.tensors:
            slot, x = len(tensors), like.new_zeros(shape, dtype=dtype)
            tensors.append(x)
            if dtype == torch.uint8 and slot not in routine.results:
                addresses[slot], tensors[slot] = x.data_ptr(), None
        del x
        for bound, locations in phase.launches.launches:
            bound(*[Address(addresses[location.slot] + location.offset) if location and location.slot in addresses
                    else part_of(tensors, location) for location in locations])
    return [None if slot is None else tensors[slot] for slot in routine.results]


# kda's own calls


def drawn(K=64):
    return make_inputs(T=70, H=1, K=K, V=K, gate="bounded")


def map_of_a_backward(backend):
    case = drawn(128 if backend == "sm100" else 64)
    x = Inputs(**{name: case.keywords.get(name) for name in Inputs._fields})
    problem = case.problem()
    return lambda: operators.maps.segment_map_bwd(problem, x, case.do, case.dht, backend)


def forward_that_keeps(backend):
    case = drawn()
    return lambda: kda.chunk_kda_fwd(**case.keywords, disable_recompute="states", backend=backend)


def backward(backend):
    case = drawn()
    return lambda: kda.chunk_kda_bwd(do=case.do, dht=case.dht, **case.keywords, backend=backend)


CALLS = {
    "the map of a backward, sm90": (map_of_a_backward, "sm90"),
    "the map of a backward, sm100": (map_of_a_backward, "sm100"),
    "a forward that keeps states": (forward_that_keeps, "sm90"),
    "a backward": (backward, "sm90"),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.exhaustive if "sm100" in name else ()) for name in CALLS
])
def test_a_call_that_lets_go_of_memory_its_kernels_work_in_is_found(name, monkeypatch):
    pytest.importorskip("cutlass")
    make, backend = CALLS[name]
    call = make(backend)
    monkeypatch.setattr(Routine, "__call__", let_go)
    with capture(arch=backend, stop=True) as session:
        call()
    (first, *_) = session.findings
    assert first.kind == "freed" and "freed at" in first.says and "test_freed.py" in first.says, first


def test_a_call_that_holds_its_memory_is_clean():
    pytest.importorskip("cutlass")
    call = map_of_a_backward("sm90")
    with capture(arch="sm90") as session:
        call()
    assert len(session.runs) == 2 and not session.findings


# code of the user


def forward_that_frees(x, out):
    def workspace():
        room = ones()
        copy(x, room)
        return room.data_ptr()

    copy(workspace(), out)


def backward_that_frees(x, out):
    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.room = torch.ones(32, device="cuda").data_ptr()
            return 2 * y

        @staticmethod
        def backward(ctx, d):
            copy(ctx.room, out)
            return d

    Copied.apply(torch.ones(32, requires_grad=True, device="cuda")).sum().backward()


def graph_that_is_replayed_after_its_input(x, out):
    given, graph = x + 1, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy(given, out)
    graph.replay()
    assert torch.equal(out, x + 1)
    del given
    graph.replay()


def graph_that_frees_and_launches(x, out):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy((x + 1).data_ptr(), out)
    graph.replay()


def driver_that_frees(x, out):
    driver = pytest.importorskip("cuda.bindings.driver")
    _, room = driver.cuMemAlloc(128)
    driver.cuMemFree(room)
    copy(int(room), out)


PROGRAMS = [forward_that_frees, backward_that_frees, graph_that_is_replayed_after_its_input,
            graph_that_frees_and_launches, driver_that_frees]


def findings(program, **options):
    with capture(arch="sm90", **options) as session:
        program(ones(), ones())
    return session.findings


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_kernel_that_reads_freed_memory_is_found_with_the_lines_of_its_memory(program):
    (found,) = findings(program)
    assert found.kind == "freed" and found.count == 32
    assert found.says.startswith("reads 4 bytes, 0 bytes into memory of 128 bytes that were allocated at ")
    assert found.says.count(f"{__file__}:") == 2 and "and freed at" in found.says


def test_an_argument_that_points_into_freed_memory_is_found_though_no_thread_reads_it():
    def program(x, out):
        COPY.launch(1, ones().data_ptr(), out.data_ptr(), block=1)           # thread 0 alone
        COPY.launch(1, ones()[1:].data_ptr() + 4 * 20, out.data_ptr(), block=1)

    assert [found.kind for found in findings(program)] == ["freed"] * 2
    text = kernel("", pointers=2)
    idle = Kernel.of(next(iter(entries(text))), text, None, parse("sm_90a"))
    (found,) = findings(lambda x, out: idle.launch(1, ones().data_ptr(), out, block=32))
    assert found.kind == "freed" and found.says.startswith("an argument points into memory of 128 bytes")


def graph_with_memory_of_its_own(x, out):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        room = torch.empty_like(x)
        copy(x, room)
        copy(room, out)
        del room
    for _ in range(2):
        graph.replay()
    assert torch.equal(out, x)


def addresses_of_memory_that_lives(x, out):
    copy(x.data_ptr(), out.data_ptr())
    assert torch.equal(out, x)


def memory_that_autograd_alone_holds(x, out):
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            room = 3 * x
            ctx.save_for_backward(room)
            ctx.room = room.data_ptr()
            return 2 * y

        @staticmethod
        def backward(ctx, d):
            copy(ctx.room, out)
            return d

    y = Kept.apply(torch.ones(32, requires_grad=True, device="cuda")).sum()
    gc.collect()
    y.backward()
    assert torch.equal(out, 3 * x)


CLEAN = [graph_with_memory_of_its_own, addresses_of_memory_that_lives, memory_that_autograd_alone_holds]


@pytest.mark.parametrize("schedule", [0, 1])
@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program.__name__)
def test_memory_that_somebody_holds_is_used_by_its_address(program, schedule):
    assert not findings(program, schedule=schedule)


def test_a_tensor_that_ends_after_all_code_is_said_to_end_with_the_program():
    """Python 3.12 lets go of some where no code runs any more; so does a thread that begins with `_end`."""
    arena = Arena(0, lambda: 0, lambda: None)
    x = arena.memory(64)
    block = arena.block_at(x.data_ptr())
    _thread.start_new_thread(arena._end, (block, None))
    for _ in range(1000):
        if block.freed is not None:
            break
        time.sleep(0.01)
    assert str(block.freed) == "the end of the program"
