"""What tests of several backends do on a GPU."""

import contextlib

import torch

import kda
from kda.tools.verify.parity import describe

DEVICE = "cuda"
ROWS = ("q", "k", "v", "g", "beta")


def assert_right(rows):
    assert not any(row.wrong for row in rows), "\n".join(describe(row) for row in rows if row.wrong)


@contextlib.contextmanager
def nothing_waits():
    """Make it an error that the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call):
    """Return a CUDA graph of a call, and the results that a replay writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, call()


def write_others(x, random, step, *more):
    """Write other numbers into the rows of a call, and into more tensors; let its sequences have other lengths."""
    for tensor in (*(x[name] for name in ROWS), *more):
        tensor.copy_(torch.randn(tensor.shape, generator=random, device=DEVICE))
    if "cu_seqlens" in x:
        lengths = x["cu_seqlens"].diff().roll(1)
        lengths[step] //= 2
        x["cu_seqlens"][1:] = lengths.cumsum(0)


def assert_causal(x, cuts):
    """Check that no output before a cut depends on tokens after it."""
    o = kda.chunk_kda_fwd(**x).o
    random = torch.Generator().manual_seed(1)
    for t in cuts:
        later = {name: x[name].clone() for name in ROWS}
        for other in later.values():
            other[:, t:] = 3 * torch.randn(other[:, t:].shape, generator=random).to(other)
        assert torch.equal(kda.chunk_kda_fwd(**x | later).o[:, :t], o[:, :t]), t
