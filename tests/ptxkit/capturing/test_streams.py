"""Launches in different streams that touch the same memory are ordered by events, by the host, or not at all."""

import pytest
import torch
from assembly import elements, kernel
from small_kernels import copy

import ptxkit
from ptxkit.compile.code import entries
from ptxkit.compile.target import parse

pytestmark = pytest.mark.simulated


def found(program, **options):
    """Return the findings of a program that gets x, y, z on the GPU and two streams."""
    with ptxkit.capture(arch="sm_90a", **options) as session:
        x, y, z = (n * torch.arange(64, dtype=torch.int32, device="cuda") for n in range(1, 4))
        program(x, y, z, torch.cuda.Stream(), torch.cuda.Stream())
    return session.findings


def two(x, y, z, first, second, between=lambda first, second: None, source=None):
    """y is written in one stream and then read in the other."""
    with torch.cuda.stream(first):
        copy(x, y)
    between(first, second)
    with torch.cuda.stream(second):
        copy(y if source is None else source, z)


def by_an_event(first, second):
    second.wait_event(first.record_event())


def through_a_third(first, second):
    third = torch.cuda.Stream()
    third.wait_stream(first)
    event = torch.cuda.Event()
    event.record(third)
    event.wait(second)


def an_event_of_before(first, second):
    event = torch.cuda.Event()
    event.record(second)
    first.wait_event(event)


ORDERS = {
    "an event": (by_an_event, True),
    "wait_stream": (lambda first, second: second.wait_stream(first), True),
    "a third stream": (through_a_third, True),
    "the host waits for the stream": (lambda first, second: first.synchronize(), True),
    "the host waits for an event": (lambda first, second: first.record_event().synchronize(), True),
    "the host waits for all": (lambda first, second: torch.cuda.synchronize(), True),
    "nothing": (lambda first, second: None, False),
    "an event of the wrong stream": (lambda first, second: second.wait_event(second.record_event()), False),
    "the other stream waits": (lambda first, second: first.wait_stream(second), False),
    "the host waits for the other stream": (lambda first, second: second.synchronize(), False),
    "an event that was recorded before": (an_event_of_before, False),
    "an event that nobody waits for": (lambda first, second: first.record_event(), False),
}


@pytest.mark.parametrize(("between", "clean"), ORDERS.values(), ids=ORDERS)
def test_a_wait_between_two_streams_is_needed(between, clean):
    kinds = [f.kind for f in found(lambda *args: two(*args, between=between))]
    assert kinds == ([] if clean else ["race-streams"])


def test_the_message_names_memory_kernels_and_streams():
    (race,) = found(two)
    text = str(race)
    assert "race-streams: k, " in text and "reads argument 0[1] (int32 [64]" in text
    assert "which k wrote in stream 0x10: nothing orders the two launches" in text
    assert "let stream 0x11 wait for it (wait_event, cudaStreamWaitEvent)" in race.advice


def both(first, second):
    """Return a program that copies in each of two streams, from x, y or z to one of them or to memory of its own."""

    def program(x, y, z, *streams):
        tensors = {"x": x, "y": y, "z": z}
        for stream, (source, target) in zip(streams, (first, second)):
            with torch.cuda.stream(stream):
                copy(tensors[source], tensors[target] if target in tensors else torch.empty_like(x))

    return program


def in_a_stream_and_in_the_default_one(x, y, z, first, second):
    with torch.cuda.stream(first):
        copy(x, y)
    copy(y, z)


PROGRAMS = {
    "no bytes are shared": (lambda x, y, z, a, b: two(x, y[:32], z, a, b, source=y[32:]), True),
    "both read the same": (lambda x, y, z, a, b: two(x, y, z, a, b, source=x), True),
    "both write the same": (both("xy", "zy"), False),
    "the host reads in between": (lambda *args: two(*args, between=lambda first, second: args[1].cpu()), True),
    "the host reads nothing": (two, False),
    "the default stream of torch waits for no other": (in_a_stream_and_in_the_default_one, False),
    "memory that was freed in between is another": (both(("x", "new"), ("x", "new")), True),
}


@pytest.mark.parametrize(("program", "clean"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_two_streams_share_needs_an_order(program, clean):
    assert [f.kind for f in found(program)] == ([] if clean else ["race-streams"])


def test_a_program_of_one_stream_is_not_watched():
    with ptxkit.capture(arch="sm_90a") as session:
        x, y = (torch.arange(64, dtype=torch.int32, device="cuda") for _ in range(2))
        copy(x, y)
        copy(y, x)
        assert not session.gpu.order.watching and not session.findings


def test_a_finding_raises_if_asked():
    with pytest.raises(ptxkit.SimulationError, match="race-streams"):
        found(two, raises=True)


# memory that is freed in one stream while another one may use it


def workspace(x, stream, after=lambda room, stream: None, within=False):
    """The last stream that uses it is not the one that allocated it."""
    with torch.cuda.stream(stream if within else None):
        room = torch.empty_like(x)
    with torch.cuda.stream(stream):
        copy(x, room)
    after(room, stream)


def allocates_again(x, stream):
    workspace(x, stream)
    torch.empty_like(x)


def ends(x, stream):
    workspace(x, stream)


def waits_too_late(x, stream):
    workspace(x, stream)
    kept = torch.empty_like(x)
    torch.cuda.current_stream().wait_stream(stream)
    del kept


def of_the_driver(x, stream):
    driver = pytest.importorskip("cuda.bindings.driver")
    _, room = driver.cuMemAlloc(256)
    with torch.cuda.stream(stream):
        copy(x, int(room))
    driver.cuMemFreeAsync(room, 0)


def recorded(x, stream):
    workspace(x, stream, lambda room, stream: room.record_stream(stream))


def waited_for(x, stream):
    workspace(x, stream, lambda room, stream: torch.cuda.current_stream().wait_stream(stream))
    torch.empty_like(x)


def awaited_by_the_host(x, stream):
    workspace(x, stream, lambda room, stream: stream.synchronize())


def waited_for_before_it_is_used_again(x, stream):
    workspace(x, stream)
    torch.cuda.current_stream().wait_stream(stream)
    torch.empty_like(x)


def of_the_same_stream(x, stream):
    workspace(x, stream, within=True)
    torch.empty_like(x)


def used_again_in_the_other_stream(x, stream):
    workspace(x, stream)
    with torch.cuda.stream(stream):
        torch.empty_like(x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("program", [allocates_again, ends, waits_too_late, of_the_driver], ids=lambda p: p.__name__)
def test_a_workspace_that_another_stream_may_still_use_when_it_is_freed_is_found(program):
    (freed,) = found(lambda x, y, z, first, second: program(x, first))
    assert freed.kind == "freed" and freed.says.startswith("may still use 256 bytes that were allocated at ")
    assert freed.says.count(__file__) == 2 and "record_stream" in freed.advice


@pytest.mark.parametrize("program", [
    recorded, waited_for, awaited_by_the_host, waited_for_before_it_is_used_again, of_the_same_stream,
    used_again_in_the_other_stream,
], ids=lambda program: program.__name__)
def test_a_workspace_whose_last_use_is_ordered_before_the_next_one_is_clean(program):
    assert not found(lambda x, y, z, first, second: program(x, first))


def test_scratch_of_a_triton_kernel_in_another_stream_is_recorded():
    pytest.importorskip("triton")
    from ptxkit.compile.triton import TritonKernel

    text = kernel(elements(2) + "st.global.u32 [%rd11], %r0;", pointers=3)
    scratch = TritonKernel.of(
        next(iter(entries(text))), text, None, parse("sm_90a"), signature=("*i32",), names=("x",), num_warps=1,
        scratch=128, scratch_align=128,
    )

    def program(x, y, z, first, second):
        scratch.launch(1, x, stream=first.cuda_stream)
        torch.empty_like(x)

    assert not found(program)
