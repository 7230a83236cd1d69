"""One launch: PTX, a grid and arguments in; counters and findings out."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import struct
from collections.abc import Hashable, Iterable

import torch

from ptxkit import limits
from ptxkit.chips import CHIPS, number_of
from ptxkit.engine import binding
from ptxkit.findings import KINDS, UNWRITTEN, SimulationError, Wording
from ptxkit.naming import ElementLayout, Names, Span, span
from ptxkit.program import Program, align_up
from ptxkit.ptx import parse
from ptxkit.ptx.syntax import FLOAT_FORMATS
from ptxkit.report import Run
from ptxkit.temporary import uncollected
from ptxkit.timing.clock import Timer, resident_ctas
from ptxkit.timing.timeline import LaunchRecords

MAX_FINDINGS = 1000
QUANTUM = 64  # instructions of one warp before the next one's turn


class LaunchError(ValueError):
    """An impossible launch: what was requested, what was found, what to do."""


@functools.lru_cache(maxsize=64)
def _module(ptx):
    return parse(ptx)


@functools.lru_cache(maxsize=64)
def program(ptx, kernel, arch):
    """Return the kernel of a name (None: the only one), lowered for an arch such as "sm_100a" (None: the PTX's)."""
    with uncollected():                      # syntax trees are no garbage
        return _program(ptx, kernel, arch)


def own_cluster(ptx, kernel, arch):
    """Return the cluster that a kernel was compiled for (__cluster_dims__); (1, 1, 1) if for none."""
    return (*program(ptx, kernel, arch).kernel.directives.get("reqnctapercluster", ()), 1, 1, 1)[:3]


def _program(ptx, kernel, arch):
    module, names = _module(ptx), ", ".join(_module(ptx).kernels)
    if kernel is None and len(module.kernels) != 1:
        raise LaunchError(f"kernel=None, but the PTX has {len(module.kernels)}: {names} -> name one")
    if kernel is not None and kernel not in module.kernels:
        raise LaunchError(f"kernel={kernel!r} is not in the PTX, which has {names or 'none'}")
    try:
        number = number_of(arch or module.target)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    return Program(module, module.kernels[kernel or next(iter(module.kernels))], number)


def launch(
    ptx, kernel=None, *, grid, block, cluster=(1, 1, 1), dynamic_shared=0, args=(), arch=None, schedule=0, early=False,
    checks=True, strict=False, raises=False, memory=None, limit=None, registers=None, behind=None, stop=False,
    clock=None, timeline=False, config=None, accesses=False, heap=None,
):
    """Runs a kernel on the CPU.

    args: torch CPU tensors (pointers, written in place), numbers, TensorMaps; or the whole parameter buffer as bytes,
        with `memory` listing the tensors (or (address, bytes, name)) that the kernel may touch.
    schedule: 0 runs the warps in turns; another number is the seed of a random schedule.
    early: asynchronous work finishes at once, not as late as possible.
    checks: keep the history of every byte, to find races, missing fences and uninitialised reads.
    strict: a broken rule that hardware and compilers tolerate is an error instead of a note.
    raises: raise SimulationError if an error was found; a note never raises.
    limit: the number of warp instructions after which the launch is abandoned; None: it runs until it ends, or Ctrl-C.
    registers: per thread at the start, as ptxas chose them; setmaxnreg is checked against it.
    behind: the Run of a kernel that may still run when this one begins (a programmatic dependent launch): only
        griddepcontrol.wait orders that kernel's memory accesses before those of this one.
    stop: end the launch at the first error; memory is then meaningless.
    clock: also predict the time (Run.clock): the name of a chip of ptxkit.timing.chips, True for the default
        chip of the arch, or a Setting. The clock then determines the schedule; `schedule` and `early` are ignored.
    timeline: also record what warps and units do over time, for Run.timeline(); needs a clock.
    config: the kernel's configuration. A timeline names warps by its `roles` ({"LOAD": range(4, 5)}), if it has any,
        and mbarriers by its `struct` of shared memory.
    accesses: also tell which bytes were read and written (Run.accesses), and which sectors (Run.sectors).
    heap: what knows the allocations of a capture (capturing.arena.Heap).
    """
    if not isinstance(ptx, str):
        raise LaunchError(f"ptx must be the text of a module; found {type(ptx).__name__} -> read it, or .decode()")
    if isinstance(args, torch.Tensor) or not isinstance(args, Iterable):
        raise LaunchError(f"args must be a list of arguments; found {type(args).__name__} -> args=[x]")
    check_options(dict(schedule=schedule, early=early, clock=clock, timeline=timeline, limit=limit,
                       dynamic_shared=dynamic_shared, registers=registers))
    p = program(ptx, kernel, arch)
    grid, block, cluster = (_three(n, v) for n, v in (("grid", grid), ("block", block), ("cluster", cluster)))
    chip = CHIPS[p.arch]
    _check_shape(p, grid, block, cluster, chip.cluster)
    shared_end = p.builder.dynamic_start + dynamic_shared
    shared = shared_end - p.builder.shared_base
    if shared > chip.shared:
        asked = f"{shared} bytes of shared memory ({dynamic_shared} dynamic)"
        raise LaunchError(f"{asked}; a CTA of sm_{p.arch} has {chip.shared}")
    held, params, spans = bind(p, args)
    spans += [_declared(span(m)) for m in memory or ()] + [
        Span(address, size, f"variable {name}") for name, _, address, size in p.builder.buffers
    ]
    regions, touched = _regions(spans)
    held = held, heap and heap.mark_unwritten(regions[: len(touched)])
    grids = _Grids(p, regions[: len(touched)], behind, accesses)

    record = binding.LaunchRecord(
        program=p.handle, grid=grid, block=block, cluster=cluster, arch=p.arch, shared_base=p.builder.shared_base,
        shared_end=align_up(shared_end, 8), params=params, params_size=len(params), sms=chip.sms, regions=regions,
        nregions=len(touched), early=early, checks=checks, strict=strict, resident=4 if schedule else 1, seed=schedule,
        quantum=QUANTUM, limit=limit or 0, max_findings=MAX_FINDINGS,
        max_registers=-(-registers // 8) * 8 if registers else p.kernel.directives.get("maxnreg", (0,))[0],
    )
    record.clusters_sm = resident_ctas(chip, p, block, record.max_registers or limits.REGISTERS, shared)
    if stop:                                 # one bit per kind of finding that is an error
        record.fatal = sum(1 << n for n, kind in KINDS.items() if n != UNWRITTEN and kind.is_error(strict))
    findings, counters = (binding.FindingRecord * MAX_FINDINGS)(), (binding.Counter * p.count)()
    record.findings, record.counters = findings, counters
    timer = None
    if clock and math.prod(grid):
        try:
            timer = Timer(clock, p, grid, block, cluster, shared, registers, behind, timeline)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        record.clock = ctypes.addressof(timer.record)
    if math.prod(grid):
        binding.simulate(record)
    run = Run(p, record, counters, touched, _worded(record, p, spans, config, strict, heap))
    run.left = grids.left(record.triggered)
    if accesses:
        run.accesses, run.spans = grids.flags, spans
        run.sectors = [(region.address, flags.raw) for region, flags in zip(regions, touched)]
    run.clock = timer.clock() if timer else None
    if timer and timeline:
        run.recorded = LaunchRecords(timer.records(), p, config)
    del held
    if raises and run.findings:
        raise SimulationError(run.findings)
    return run


def _worded(record, program, spans, config, strict, heap):
    """Return the engine's findings as values."""
    if not record.nfindings:
        return []
    grid, cluster = tuple(record.grid), tuple(record.cluster)
    names = Names(spans, program, config, math.prod(cluster))
    wording = Wording(program, names, grid, cluster, -(-math.prod(record.block) // 32), strict, heap)
    return [*wording.findings(record.findings[: record.nfindings], record.stopped)]


class _Grids:
    """The memory accesses of grids that may run concurrently: spans (first address, a flag per byte)."""

    def __init__(self, program, regions, behind, accesses):
        self._ahead, self.flags, self._covered = behind.left if behind else [], [], []
        for region in regions:
            if (flags := _covering(self._ahead, region.address, region.size)) is not None:
                region.ahead = flags.data_ptr()
                self._covered.append(flags)
            if program.triggers or accesses:
                self.flags.append((region.address, torch.zeros(region.size, dtype=torch.uint8)))
                region.left = self.flags[-1][1].data_ptr()

    def left(self, triggered):
        """Return the spans for a launch that begins before this one has ended; none if that cannot be."""
        if not triggered:
            return []
        return self.flags + (self._ahead if triggered & binding.TRIGGERED_EARLY else [])


def _covering(spans, address, size):
    """Return the flags of `size` bytes, all together; None where no span has any of them."""
    covering = None
    for first_address, flags in spans:
        first, end = max(first_address, address), min(first_address + len(flags), address + size)
        if first < end:
            covering = torch.zeros(size, dtype=torch.uint8) if covering is None else covering
            covering[first - address : end - address] |= flags[first - first_address : end - first_address]
    return covering


def _three(name, value):
    values = (value,) if isinstance(value, int) else tuple(value) if isinstance(value, Iterable) else ()
    if not 1 <= len(values) <= 3 or any(not isinstance(v, int) or not 0 <= v < 2**31 for v in values):
        raise LaunchError(f"{name}={value!r} must be one to three whole numbers from 0 to 2**31 - 1")
    return (*values, 1, 1)[:3]


def check_options(options):
    """Check the options that do not depend on the kernel."""
    for name, (asked, holds) in _OPTIONS.items():
        if name in options and not holds(options[name]):
            raise LaunchError(f"{name}={options[name]!r} must be {asked}")
    if options.get("timeline") and not options.get("clock"):
        raise LaunchError("timeline=True without a clock -> clock=True, or the name of a chip")


def _whole(end, first=0):
    """Return a check for whole numbers from `first` to below `end`; one that begins at 1 takes None, too."""
    return lambda x: (x is None and first > 0) or (isinstance(x, int) and first <= x < end)


_OPTIONS = {
    "dynamic_shared": ("a whole number of bytes, 0 or more", _whole(2**32)),
    "limit": ("a number of warp instructions, 1 or more, or None", _whole(2**64, 1)),
    "registers": (f"the registers of a thread, 1 to {limits.REGISTERS}, or None", _whole(limits.REGISTERS + 1, 1)),
    "schedule": ("0, or the seed of a random schedule", _whole(2**64)),
    **dict.fromkeys(("early", "timeline"), ("True or False", lambda x: isinstance(x, int))),
    "clock": ("the name of a chip, True, a Setting or None", lambda x: isinstance(x, Hashable) and x != ""),
}


def _check_shape(p, grid, block, cluster, most_ctas):
    threads, ctas = math.prod(block), math.prod(cluster)
    if not 1 <= threads <= limits.THREADS:
        raise LaunchError(f"block={block} has {threads} threads; a CTA has 1 to {limits.THREADS}")
    for name, asked, most in (("grid", grid, limits.GRID), ("block", block, limits.BLOCK)):
        if any(n > limit for n, limit in zip(asked, most)):
            raise LaunchError(f"{name}={asked}; at most {most} along x, y and z")
    if not 1 <= ctas <= most_ctas:
        raise LaunchError(f"cluster={cluster} has {ctas} CTAs; sm_{p.arch} allows 1 to {most_ctas}")
    if any(g % c for g, c in zip(grid, cluster)):
        raise LaunchError(f"grid={grid} is not a multiple of cluster={cluster}")
    for name, asked, directive in (("block", block, "reqntid"), ("cluster", cluster, "reqnctapercluster")):
        wanted = p.kernel.directives.get(directive)
        if wanted and tuple(asked) != (*wanted, 1, 1)[:3]:
            raise LaunchError(f"{name}={asked}, but the kernel has .{directive} {', '.join(map(str, wanted))}")
    most = p.kernel.directives.get("maxntid")
    if most and threads > math.prod(most):
        limit = ", ".join(map(str, most))
        raise LaunchError(f"block={block} has {threads} threads, but the kernel has .maxntid {limit}")


# ---- arguments


def bind(p, args):
    """Return (objects to keep alive, parameter buffer, memory spans) for the arguments of a launch."""
    params = p.kernel.params
    size = max((q.offset + q.size for q in params), default=0)
    if isinstance(args, (bytes, bytearray, memoryview)):
        if len(args) < size:
            raise LaunchError(f"args is a parameter buffer of {len(args)} bytes; {p.kernel.name} needs {size}")
        return args, bytes(args), []
    args = list(args)
    if len(args) != len(params):
        wanted = ", ".join(f"{q.type} {q.name}" for q in params)
        raise LaunchError(f"{len(args)} arguments; {p.kernel.name} has {len(params)}: {wanted}")
    buffer, spans = bytearray(size), []
    for n, (param, value) in enumerate(zip(params, args)):
        data, touched = _encoded(n, param, value)
        buffer[param.offset : param.offset + param.size] = data
        spans += touched
    return args, bytes(buffer), spans


def _encoded(n, param, value):
    what = f"argument {n} ({param.name}, .{param.type}{f'[{param.count}]' if param.count > 1 else ''})"
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise LaunchError(f"{what}: a tensor on {value.device}; the simulator needs CPU tensors -> .cpu()")
        if value.layout != torch.strided:
            raise LaunchError(f"{what}: a tensor of layout {value.layout}, which has no address -> .to_dense()")
        if param.size != 8:
            raise LaunchError(f"{what}: a tensor is an 8-byte pointer; the parameter has {param.size} bytes")
        return value.data_ptr().to_bytes(8, "little"), [span(value, _named(n, param), n)]
    if hasattr(value, "encode") and hasattr(value, "spans"):
        if param.size != 128:
            raise LaunchError(f"{what}: a TensorMap has 128 bytes; the parameter has {param.size}")
        return value.encode(), [_mapped(value, s, _named(n, param), n) for s in value.spans()]
    if isinstance(value, (bytes, bytearray)):
        if len(value) != param.size:
            raise LaunchError(f"{what}: {len(value)} bytes; the parameter has {param.size}")
        return bytes(value), []
    if isinstance(value, (bool, int, float)):
        if param.count > 1:
            raise LaunchError(f"{what}: a number for an array of {param.count}; pass bytes or a TensorMap")
        if param.type in FLOAT_FORMATS:
            with contextlib.suppress(OverflowError):
                return struct.pack(FLOAT_FORMATS[param.type], value), []
            raise LaunchError(f"{what}: {value!r} does not fit into .{param.type}")
        if isinstance(value, float) and not value.is_integer():
            raise LaunchError(f"{what}: {value!r} is not a whole number")
        if not -(1 << 8 * param.size - 1) <= value < 1 << 8 * param.size:
            raise LaunchError(f"{what}: {value!r} does not fit into {param.size} bytes")
        return (int(value) & ((1 << 8 * param.size) - 1)).to_bytes(param.size, "little"), []
    raise LaunchError(f"{what}: {type(value).__name__}; pass a CPU tensor, a number, bytes or a TensorMap")


def _named(n, param):
    """Return what to call an argument: some compilers number their parameters instead."""
    return f"argument {n}" if param.name.endswith(f"_param_{n}") else param.name


def _mapped(map_, what, name, n):
    """Return the Span of a TensorMap's tensor."""
    region = span(what, name, n)
    if region.layout:
        return region
    strides = tuple(s // map_.itemsize for s in (*map_.strides[::-1], map_.itemsize))
    return region._replace(layout=ElementLayout(map_.dtype, map_.dims[::-1], strides, map_.itemsize))


def _declared(region):
    if not 0 <= region.address <= region.address + region.size <= limits.ADDRESSES or region.size < 0:
        raise LaunchError(f"memory={region.name!r}: there are no {region.size:,} bytes at {region.address:#x}")
    return region


def _regions(spans):
    """Return the engine's regions: sorted, with overlapping spans merged."""
    merged = []
    for address, size, *_ in sorted((s for s in spans if s.size), key=lambda s: s[:2]):
        if merged and address < merged[-1][0] + merged[-1][1]:
            first, length = merged[-1]
            merged[-1] = first, max(first + length, address + size) - first
        else:
            merged.append((address, size))
    regions = (binding.Region * max(len(merged), 1))()
    touched = []
    for n, (address, size) in enumerate(merged):
        try:
            flags = ctypes.create_string_buffer(size // 32 + 3)
        except (MemoryError, OverflowError):
            raise LaunchError(f"{size:,} bytes of memory at {address:#x}: no room to keep account of so many") from None
        touched.append(flags)
        regions[n] = binding.Region(address=address, size=size, host=address, writable=1, label=n)
        regions[n].touched = ctypes.addressof(flags)
    return regions, touched
