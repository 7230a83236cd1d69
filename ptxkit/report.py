"""The counters of a launch, as numbers and as a table for a kernel's author."""

from __future__ import annotations

import functools
from collections import defaultdict

import torch

from ptxkit.engine.binding import Counter
from ptxkit.findings import folded, shortened, sourced
from ptxkit.timing.timeline import Timeline

TOTALS = tuple(name for name, *_ in Counter._fields_)


class Run:
    """The result of a launch: `findings` (its errors; empty when clean), `notes`, `counters`, `report()`."""

    def __init__(self, program, record, counters, touched, findings):
        findings = folded(findings)
        self.kernel, self.arch = program.kernel.name, f"sm_{program.arch}"
        self.grid, self.block, self.cluster = tuple(record.grid), tuple(record.block), tuple(record.cluster)
        self.findings = [f for f in findings if f.grade == "error"]
        self.notes = [f for f in findings if f.grade == "note"]
        self.incomplete = bool(record.stopped)  # a finding ended the launch: see its `ended`
        self.clock = None  # the predicted time, if requested
        self.recorded = None  # what warps and units did when, if requested
        self.left = []  # its memory accesses, for a launch that may begin before this one has ended
        self.accesses, self.spans = [], []  # if requested: (address, a flag per byte) of what it touched; its memory
        self.sectors = []  # the same: (address, a byte for each 32: 1 if it read them, 2 if it wrote them, or 3)
        self._program, self._counters = program, counters
        table = torch.frombuffer(counters, dtype=torch.int64).view(-1, len(TOTALS))
        total = dict(zip(TOTALS, table.sum(0).tolist()))
        shared = table[:, [TOTALS.index("shared_read"), TOTALS.index("shared_written")]].sum(1)
        past_warps = int(shared[table[:, TOTALS.index("wavefronts")] == 0].sum())
        self._issued = table[:, TOTALS.index("issued")].tolist()
        flags = b"".join(t.raw for t in touched)
        read, written, both = (flags.count(bytes([n])) for n in (1, 2, 3))
        self.counters = {
            "warp_instructions": total["issued"], "thread_instructions": total["lanes"],
            "global_bytes_read": total["global_read"], "global_bytes_written": total["global_written"],
            "global_sectors": total["sectors"],
            "global_floor_read": 32 * (read + both), "global_floor_written": 32 * (written + both),
            "shared_bytes_read": total["shared_read"], "shared_bytes_written": total["shared_written"],
            "shared_bytes_past_warps": past_warps, "shared_wavefronts": total["wavefronts"],
            "bank_conflicts": total["wavefronts"] - total["wavefronts_needed"],
            "tensor_flops": total["flops"], "tmem_columns": record.tmem_columns, "barrier_waits": record.barrier_waits,
            "async_operations": record.async_work, "clusters": record.launched_clusters,
        }
        kinds = defaultdict(int)
        for n, issued in enumerate(self._issued):
            ins = program.instruction(n)
            kinds[ins.parts[0] if ins else "exit"] += issued
        self.instructions = _largest_first(kinds)

    @functools.cached_property
    def _lines(self):
        """Return (instruction or None, its counters by name)"""
        named = ({name: getattr(c, name) for name in TOTALS} for c in self._counters)
        return [(self._program.instruction(n), line) for n, line in enumerate(named)]

    @property
    def executed(self):
        """PTX lines whose instruction ran in some warp."""
        executed = (self._program.instruction(n) for n, issued in enumerate(self._issued) if issued)
        return {ins.line for ins in executed if ins}

    def conflicts(self):
        """Return (source line or PTX line, passes over shared memory, passes needed), worst first."""
        lines = defaultdict(lambda: [0, 0])
        for ins, line in self._lines:
            if ins and line["wavefronts"] > line["wavefronts_needed"]:
                place = _place(ins)
                lines[place][0] += line["wavefronts"]
                lines[place][1] += line["wavefronts_needed"]
        return sorted(((place, *n) for place, n in lines.items()), key=lambda row: row[2] - row[1])

    def lines(self):
        """Return (source line as in a Place, or None; PTX line; counters) of each instruction that ran, in the order of
        the PTX. `issued` counts warps, `stalled` the clocks that they waited there (with a clock)."""
        stalls = self.clock.stalls_of if self.clock else [{}] * len(self._lines)
        return [
            (sourced(ins.loc) if ins.loc else None, ins.line, line | {"stalled": sum(waited.values())})
            for (ins, line), waited in zip(self._lines, stalls)
            if ins and line["issued"]
        ]

    def stalls(self):
        """Return (source or PTX line, {why: clocks that warps waited there}), worst first, if there was a clock."""
        lines = defaultdict(lambda: defaultdict(float))
        for (ins, _), waited in zip(self._lines, self.clock.stalls_of if self.clock else ()):
            for why, clocks in waited.items():
                if clocks:
                    lines[_place(ins) if ins else "the kernel's end"][why] += clocks
        return sorted(((place, _largest_first(whys)) for place, whys in lines.items()),
                      key=lambda row: -sum(row[1].values()))

    def timeline(self, sms=None):
        """Return what warps and units did when, on the first `sms` of the SMs in detail (None: all); this needs a
        launch with `timeline=True`."""
        if self.recorded is None:
            raise ValueError("this run has no timeline: use launch(..., clock=True, timeline=True) or capture alike")
        return Timeline(self, sms)

    def report(self):
        """Return the table as text."""
        c = self.counters
        grid, block, cluster = ("x".join(map(str, d)) for d in (self.grid, self.block, self.cluster))
        active = f"{c['thread_instructions'] / max(32 * c['warp_instructions'], 1):.0%}"
        heading = f"{shortened(self.kernel)} on {self.arch}\ngrid {grid}, block {block}, cluster {cluster}\n"
        rows = [
            ("warp instructions", f"{c['warp_instructions']:,}  ({active} of the lanes active)"),
            ("global read", _against(c["global_bytes_read"], c["global_floor_read"])),
            ("global written", _against(c["global_bytes_written"], c["global_floor_written"])),
            ("global sectors", f"{c['global_sectors']:,}  ({_bytes(32 * c['global_sectors'])})"),
            ("shared read, written", f"{_bytes(c['shared_bytes_read'])}, {_bytes(c['shared_bytes_written'])}"),
            ("  for products and copies", _bytes(c["shared_bytes_past_warps"])),
            ("shared wavefronts", f"{c['shared_wavefronts']:,}, of them {c['bank_conflicts']:,} by bank conflicts"),
            ("tensor FLOPs", f"{c['tensor_flops']:,}"),
            ("tensor memory", f"{c['tmem_columns']} columns of an SM"),
            ("waits, async operations", f"{c['barrier_waits']:,}, {c['async_operations']:,}"),
            None,
        ]
        rows += [(f"  {kind}", f"{n:,}") for kind, n in self.instructions.items() if n]
        if conflicts := self.conflicts():
            rows += [None, ("bank conflicts", "passes, needed")]
            rows += [(f"  {place}", f"{passes:,}, {needed:,}") for place, passes, needed in conflicts[:10]]
        rows += self._timed() if self.clock else []
        rows += [None, ("results", "incomplete: a finding ended the launch")] if self.incomplete else []
        rows += [None, ("findings, notes", f"{len(self.findings)}, {len(self.notes)}")]
        width = max(len(row[0]) for row in rows if row)
        lines = ["" if row is None else f"{row[0]:<{width}}  {row[1]}".rstrip() for row in rows]
        lines += [f"  {line}" for finding in self.findings + self.notes for line in str(finding).splitlines()]
        return "\n".join([heading, *lines])

    def _timed(self):
        c = self.clock
        issued, waited = sum(warp["issued"] for warp in c.warps), _largest_first(c.stalls).items()
        held = f"{c.share} cluster{'s' * (c.share != 1)} per SM, {c.resident} at once; {c.detailed} in detail"
        rows = [
            None,
            (f"predicted on {c.chip}", f"{1e3 * c.milliseconds:,.1f} us, {c.clocks:,.0f} clocks; {held}"),
            ("  start, steady, drain", f"{c.start:,.0f}, {c.steady:,.0f}, {c.drain:,.0f} clocks"),
            ("  busiest units", ", ".join(f"{unit} {share:.0%}" for unit, share in c.binds()[:4])),
            ("  stalls per issue", ", ".join(f"{why} {n / issued:.2f}" for why, n in waited if n >= issued / 200)),
        ]
        return rows + [(f"  {place}", ", ".join(f"{why} {n:,.0f}" for why, n in list(whys.items())[:3]))
                       for place, whys in self.stalls()[:10]]


def _largest_first(numbers):
    return dict(sorted(numbers.items(), key=lambda item: -item[1]))


def _place(ins):
    return f"{ins.loc.file}:{ins.loc.line}" if ins.loc else f"PTX line {ins.line}"


def _bytes(n):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024


def _against(n, floor):
    times = f"{n / floor:.2f} times" if floor else "0 times"
    return f"{_bytes(n)}, {times} the {_bytes(floor)} touched"
