"""What the warps and units of a launch with a clock did when: rows of slices, as a trace for viewers and as a page.

A row is a warp, a tensor core, an engine for copies, a copy in flight, an mbarrier or a named barrier. Times are clocks
since the launch. There are too many single instructions to show: what a warp does between two long waits is one slice,
which contains slices of some 32 clocks, each named by its most expensive source line.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ptxkit.engine.binding import STALLS, TRACES
from ptxkit.findings import shortened
from ptxkit.naming import fields_of, roles_of
from ptxkit.timing import pages, traces

PAUSE = 48  # the shortest wait, in clocks, with its own slice
MERGED = 32  # clocks that a slice of several lines, or of a unit's work, has at least
GAP = 16  # clocks without work within a unit's slice
QUARTERS = 4
ENGINES = {"tcgen05": "tensor core", "tma": "bulk copies", "shared": "shared memory"}
KINDS = ("warp", "unit", "copy", "mbarrier", "barrier")  # kinds of rows, from top to bottom


class LaunchRecords(NamedTuple):
    """The records of a launch for its timeline."""

    records: Any  # the engine's, one a slice
    program: Any
    config: Any  # the kernel's configuration, or None


@dataclass
class Slice:
    """A warp's `kind`: "work", which holds others, "lines" in it, or "stall"; elsewhere that of the row."""

    name: str
    kind: str
    begins: float
    ends: float
    issued: float = 0  # slots of the scheduler
    stalls: dict[str, float] = field(default_factory=dict)  # why -> clocks
    says: dict[str, Any] = field(default_factory=dict)
    inner: list[Slice] = field(default_factory=list)

    @property
    def clocks(self):
        return self.ends - self.begins

    @property
    def why(self):
        """Return the most frequent reason for its waits."""
        return max(self.stalls, key=self.stalls.get) if self.stalls else ""


@dataclass
class TimelineRow:
    name: str
    kind: str  # one of KINDS
    sm: int
    role: str
    slices: list[Slice]


class _Piece(NamedTuple):
    """One record: of a warp an instruction's issue or wait, of a unit some work."""

    begins: float
    ends: float
    ins: int
    why: str  # "": it issues, or works
    role: str = ""


def name_of(config):
    """Return a kernel's name, from that of its configuration's class: "chain_bwd" for ChainBwdConfig."""
    words = re.findall("[A-Z][a-z0-9]*", type(config).__name__)
    return "_".join(words[:-1]).lower() if words[1:] and words[-1] == "Config" else ""


class Timeline:
    """`rows` of the SMs in detail, or of the first `sms`; `save(path)` for ui.perfetto.dev, `html()`."""

    def __init__(self, run, sms=None):
        self.clock, self._program, config = run.clock, run.recorded.program, run.recorded.config
        self.kernel = name_of(config) or shortened(run.kernel)
        self._roles = roles_of(config)
        self._mbarriers = {first: name for first, _, name, words in fields_of(self._program, config) if words}
        self._places = [self._place_of(n) for n in range(self._program.count)]
        records = defaultdict(list)
        for r in run.recorded.records:
            if sms is None or r.sm < sms:
                records[TRACES[r.kind]].append(r)
        self.rows = [
            *self._warps(records["issue"], records["stall"]),
            *(row for name in ("tensor", *ENGINES) for row in self._units(name, records[name])),
            *self._copies(records["copy"]),
            *self._phases("mbarrier", records["phase"]),
            *self._phases("barrier", records["barrier"]),
        ]
        self.rows.sort(key=lambda row: (row.sm, KINDS.index(row.kind)))

    # ---- names

    def role(self, warp):
        return self._roles.get(warp, f"warp {warp}")

    def _place_of(self, n):
        if (ins := self._program.instruction(n)) is None:
            return "the kernel's end"
        return f"{os.path.basename(ins.loc.file)}:{ins.loc.line}" if ins.loc else f"PTX line {ins.line}"

    def _opcode(self, n):
        ins = self._program.instruction(n)
        return ".".join(p for p in ins.parts[:3] if p not in ("sync", "aligned")) if ins else "exit"

    # ---- rows

    def _warps(self, issues, stalls):
        warps = defaultdict(list)
        for r, why in (*((r, "") for r in issues), *((r, STALLS[r.row]) for r in stalls)):
            warps[r.sm, r.cta, r.warp].append(_Piece(r.begins, r.ends, r.ins, why))
        for (sm, cta, warp), pieces in sorted(warps.items()):
            role = self.role(warp)
            name = f"{role}, warp {warp}" if warp in self._roles else role
            slices = self._of_warp(sorted(pieces, key=lambda p: p.begins))
            yield TimelineRow(f"CTA {cta}: {name}", "warp", sm, role, slices)

    def _of_warp(self, pieces):
        """Return the waits of at least PAUSE clocks, and the work between them."""
        slices, work = [], []
        for run in _runs(pieces, lambda some, p: bool(some[-1].why) != bool(p.why)):
            if run[0].why and run[-1].ends - run[0].begins >= PAUSE:
                slices += self._work(work)
                work = []
                stall = self._slice(run, "stall")
                stall.name = f"{stall.why}: {stall.name}"
                slices.append(stall)
            else:
                work += run
        return slices + self._work(work)

    def _work(self, pieces):
        if not pieces:
            return []
        whole = self._slice(pieces, "work")
        whole.inner = [self._slice(some, "lines") for some in self._grouped(pieces)]
        return [whole]

    def _grouped(self, pieces):
        """Return runs of pieces of one line, or of several that together have MERGED clocks."""
        def ends(some, p):
            other = (self._places[p.ins], p.role) != (self._places[some[-1].ins], some[-1].role)
            return p.begins - some[-1].ends > GAP or (other and some[-1].ends - some[0].begins >= MERGED)

        return _runs(pieces, ends)

    def _slice(self, pieces, kind):
        lines, stalls = defaultdict(float), defaultdict(float)
        for p in pieces:
            lines[self._places[p.ins]] += p.ends - p.begins
            stalls[p.why] += p.ends - p.begins
        issued = stalls.pop("", 0)
        first = sorted(lines.items(), key=lambda item: -item[1])
        says = {"lines": ", ".join(f"{line} {clocks:.0f}" for line, clocks in first[:5])} if len(first) > 1 else {}
        return Slice(first[0][0], kind, pieces[0].begins, pieces[-1].ends, issued, dict(stalls), says)

    def _units(self, name, records):
        units = defaultdict(list)
        for r in records:
            row = f"tensor core {r.row % QUARTERS}" if name == "tensor" else ENGINES[name]
            units[r.sm, row].append(_Piece(r.begins, r.ends, r.ins, "", self.role(r.warp)))
        for (sm, row), pieces in sorted(units.items()):
            slices = []
            for some in self._grouped(sorted(pieces)):
                s = self._slice(some, "unit")
                roles = dict.fromkeys(p.role for p in some)
                s.name = f"{'; '.join([*roles][:3])}{'; ...' if len(roles) > 3 else ''}: {s.name}"
                s.ends = min(s.ends, max(s.begins, self.clock.clocks))  # its last stores may outlive the launch
                s.says |= {"busy": s.issued, "instruction": self._opcode(some[0].ins)}
                s.issued = 0
                slices.append(s)
            yield TimelineRow(row, "unit", sm, "", slices)

    def _copies(self, records):
        """Return the copies in flight; overlapping ones are in separate rows."""
        lanes = defaultdict(list)  # SM -> rows
        for some in self._together(sorted(records, key=lambda r: (r.sm, r.begins))):
            r, ends = some[0], max(r.ends for r in some)
            name = f"{self.role(r.warp)}: {self._opcode(r.ins)} {self._places[r.ins]}"
            s = Slice(name, "copy", r.begins, ends, says={"copies": len(some)} if len(some) > 1 else {})
            rows = lanes[r.sm]
            row = next((row for row in rows if row.slices[-1].ends <= s.begins), None)
            if row is None:
                row = TimelineRow(f"copies in flight {len(rows)}", "copy", r.sm, "", [])
                rows.append(row)
            row.slices.append(s)
        return [row for rows in lanes.values() for row in rows]

    def _together(self, records):
        """Merge copies that a role issued shortly after each other; a bulk copy stays separate."""
        groups, latest = [], {}
        for r in records:
            opcode = self._opcode(r.ins)
            key = (r.sm, r.cta, self.role(r.warp), opcode)
            some = latest.get(key)
            if "bulk" in opcode or not some or r.begins > some[-1].begins + MERGED:
                some = latest[key] = []
                groups.append(some)
            some.append(r)
        return groups

    def _phases(self, kind, records):
        """Yield rows of phases: an mbarrier's begin where the last one ends, a named barrier's at the first arrival."""
        rows = defaultdict(list)
        for r in records:
            rows[r.sm, r.cta, r.row].append(r)
        for (sm, cta, which), phases in sorted(rows.items()):
            name = self._mbarriers.get(which, f"mbarrier {which:#x}") if kind == "mbarrier" else f"barrier {which}"
            slices, end = [], 0.0
            for n, r in enumerate(sorted(phases, key=lambda r: r.ends)):
                if max(r.begins, end) < r.ends:
                    says = {"made at" if kind == "mbarrier" else "at": self._places[r.ins]}
                    slices.append(Slice(f"phase {n}", kind, max(r.begins, end), r.ends, says=says))
                    end = r.ends
            yield TimelineRow(f"CTA {cta}: {name}", kind, sm, "", slices)

    # ---- results

    def trace(self):
        """Return JSON trace events, for ui.perfetto.dev and chrome://tracing."""
        return traces.trace([self])

    def save(self, path):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.trace(), file)

    def html(self, begins=None, ends=None, sm=0):
        """Return a self-contained page: what the roles of an SM do from clock to clock; by default during one turn of
        the ring of stages, in the middle of the launch."""
        return pages.page([self], begins, ends, sm)


def _runs(pieces, ends):
    """Return pieces in runs: `ends` says whether the run so far has no room for the next piece."""
    runs = []
    for p in pieces:
        if not runs or ends(runs[-1], p):
            runs.append([])
        runs[-1].append(p)
    return runs
