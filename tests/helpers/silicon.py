"""Repeats a simulated launch on the GPU: the same PTX, the same bytes before, and the bytes after compared."""

import json
import os
import re
from dataclasses import replace

import torch

import ptxkit
import ptxkit.launches as launching
from ptxkit import TensorMap
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.target import TARGETS
from ptxkit.ptx import parse

current_test = ""
APPROXIMATE = re.compile(r"\.approx|tanh\.|div\.full|\bex2|\blg2|\bsin\.|\bcos\.|rsqrt")
# the order of threads, or the chip itself, decides what these give
UNSPECIFIED = re.compile(r"%smid|%clock|%globaltimer|%gridid|%nsmid|%nwarpid|activemask|pending_count")
simulate = launching.launch


def install():
    """Let tests that import `launch` from now on get the one that also launches on the GPU."""
    launching.launch = ptxkit.launch = both


def runs_here(ptx):
    major, minor = torch.cuda.get_device_capability()
    target = re.search(r"\.target\s+sm_(\d+)([af]?)", ptx)
    return int(target[1]) == 10 * major + minor if target[2] else int(target[1]) <= 10 * major + minor


def tensors_of(args):
    """Return the tensors behind arguments: each once, by address."""
    found = [a.tensor if isinstance(a, TensorMap) else a for a in args if isinstance(a, torch.Tensor | TensorMap)]
    return {t.data_ptr(): t for t in found if t is not None and t.numel()}


def twin(t, device="cpu"):
    """Return a copy with the same strides, and with what lies between its elements."""
    if t.device.type != "cpu":
        return t
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.to(device, copy=True).as_strided(t.shape, t.stride(), t.storage_offset())


def both(ptx, kernel=None, *, args=(), **options):
    """Launch in the simulator, and on the GPU unless the simulator has findings."""
    plain = current_test and not isinstance(args, bytes | bytearray) and runs_here(ptx) and not UNSPECIFIED.search(ptx)
    plain = plain and not any(isinstance(a, TensorMap) and a.tensor is None for a in args)
    before = {address: twin(t) for address, t in tensors_of(args).items()} if plain else {}
    run = simulate(ptx, kernel, args=args, **options)
    if not plain or run.findings or not run.counters["warp_instructions"]:
        return run
    major, minor = torch.cuda.get_device_capability()
    if (
        run.arch != f"sm_{10 * major + minor}"
    ):  # tensor cores of the chip at hand: how they round goes by it, not by the PTX
        after = {address: t.clone() for address, t in tensors_of(args).items()}
        restore(args, before)
        simulate(ptx, kernel, args=args, **(options | {"arch": f"sm_{10 * major + minor}", "raises": True}))
        simulated = {address: t.clone() for address, t in tensors_of(args).items()}
        restore(args, after)
    else:
        simulated = tensors_of(args)
    on_silicon = on_gpu(ptx, run.kernel, args, before, options)
    compare(ptx, simulated, on_silicon)
    return run


def triton(built, grid, arguments):
    """Compare a kernel that Triton built in the simulator and on the GPU; its arguments stay as they were."""
    from ptxkit import capture

    if not runs_here(built.ptx):
        return
    major, minor = torch.cuda.get_device_capability()
    copies = [{n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()} for _ in range(2)]
    on_silicon = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in copies[1].items()}
    with capture(arch=f"sm_{major}{minor}") as _:
        built.launch(grid, *copies[0].values())
    built.launch(grid, *on_silicon.values())
    finish(built.ptx)
    compare(
        built.ptx,
        *({n: x.cpu() for n, x in found.items() if isinstance(x, torch.Tensor)} for found in (copies[0], on_silicon)),
    )


def restore(args, values):
    for address, t in tensors_of(args).items():
        t.copy_(values[address])


def on_gpu(ptx, name, args, before, options):
    cuda = {address: twin(t, "cuda") for address, t in before.items()}
    launched = Kernel.of(name, ptx, None, target_of(ptx))
    given = [moved(a, cuda) for a in args]
    sizes = {k: options[k] for k in ("block", "cluster", "dynamic_shared") if k in options}
    launched.launch(options["grid"], *given, **sizes, tensors=[])
    finish(ptx)
    return {address: t.cpu() for address, t in cuda.items()}


def finish(ptx):
    """Wait for the GPU. An error leaves a dead context to all tests to come: the worker ends, xdist starts another."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        log(ptx, 0, -1, 0.0, str(error).splitlines()[0])
        os._exit(1)


def target_of(ptx):
    spelled = re.search(r"\.target\s+(sm_\d+[af]?)", ptx)[1]
    plain = TARGETS["sm" + re.sub(r"\D", "", spelled)]
    return plain._replace(spelling=spelled)


def moved(a, cuda):
    if isinstance(a, TensorMap):
        from ptxkit.compile import driver

        address = cuda[a.tensor.data_ptr()].data_ptr() + a.address - a.tensor.data_ptr()
        if a.pixels:                         # the bytes of driver 580, which test_im2col.py holds
            return replace(a, address=address).encode()
        names = ("dtype", "dims", "strides", "box", "element_strides", "swizzle", "fill")
        fields = {name: getattr(a, name) for name in names}
        return driver.tensor_map(address=address, **fields)
    if isinstance(a, torch.Tensor):
        return cuda[a.data_ptr()] if a.numel() else 0
    return a


def bits(t):
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def compare(ptx, simulated, on_silicon):
    """Check that bits are equal; NaNs may differ, and approximations by what their documentation allows."""
    different = total = 0
    worst = 0.0
    for address, t in simulated.items():
        a, b = t, on_silicon[address]
        total += a.numel()
        unequal = bits(a) != bits(b)
        different += int(unequal.sum())
        if unequal.any() and APPROXIMATE.search(ptx):
            worst = max(worst, ulps(a[unequal], b[unequal]))
    log(ptx, total, different, worst)
    if different and not APPROXIMATE.search(ptx):
        for address, t in simulated.items():
            unequal = (bits(t) != bits(on_silicon[address])).flatten().nonzero().flatten()
            if len(unequal):
                n = int(unequal[0])
                a, b = bits(t).flatten()[n].item(), bits(on_silicon[address]).flatten()[n].item()
                raise AssertionError(
                    f"element {n} and {len(unequal) - 1} others of {t.numel()}: {a:#x} here, {b:#x} on silicon"
                )


def ulps(x, y):
    """Return the largest distance in units of the last place; tests keep bits of floats in integers, too."""
    size = x.element_size()
    x, y = (bits(t).long() for t in (x, y))
    lowest = -(1 << 8 * size - 1)
    ordered = [torch.where(t < 0, lowest - t, t) for t in (x, y)]
    return float((ordered[0] - ordered[1]).abs().max())


def log(ptx, total, different, worst, error=""):
    if path := os.environ.get("KDA_ON_SILICON_LOG"):
        families = sorted({i.parts[0] for k in parse(ptx).kernels.values() for i in k.body})
        line = dict(test=current_test, elements=total, different=different, worst=worst, opcodes=families, error=error)
        with open(f"{path}.{os.getpid()}", "a") as file:
            file.write(json.dumps(line) + "\n")
