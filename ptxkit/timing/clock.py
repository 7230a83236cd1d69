"""The clock of a launch: its setting and its result.

The clusters of a few SMs run in detail, the others as without a clock: all SMs are assumed to behave alike. L2 and HBM
are shared among the SMs that the launch keeps busy.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ptxkit.chips import CHIPS as SIZES
from ptxkit.engine import binding
from ptxkit.engine.binding import CLOCK_CONSTANTS, OF_A_WARP, STALLS, UNITS, TraceRecord
from ptxkit.timing import costs
from ptxkit.timing.chips import ChipClock, chip_of

REGISTERS_OF_AN_SM, WARPS_OF_AN_SM, CTAS_OF_AN_SM = 1 << 16, 64, 32
SHARED_OF_A_CTA = 1024  # reserved by the system
SMS_IN_DETAIL = 8
MOST_IN_DETAIL = 1 << 24  # clusters: each has a record


class Setting(NamedTuple):
    """A clock's setting instead of a chip's name, for a part of a larger launch."""

    chip: str | bool
    clusters: int  # clusters of the larger launch: how many an SM is given, and what share of L2 and HBM
    waves: int = 0  # the most clusters that a place on an SM is given; no others run then, and results are in part
    sms: int = SMS_IN_DETAIL  # at most, that run in detail


@dataclass(frozen=True)
class Clock:
    """The time of a launch in clocks of an SM: `start` until the first instruction, `drain` while the SM empties."""

    chip: ChipClock
    clocks: float
    start: float
    drain: float
    size: int  # CTAs of a cluster
    resident: int  # clusters at once on an SM, or on a cluster's SMs
    share: int  # clusters that the busiest SM is given
    detailed: int  # clusters that ran in detail
    more: float  # clocks for one cluster more on each SM; 0: all that an SM is given ran in detail
    triggered: float  # when launch_dependents had run everywhere; the end, if it never has
    leaves_room: bool  # for CTAs of a dependent launch like these
    begins: float | None  # after the launch ahead, which it overlaps; None: it comes after all before
    units: dict[str, float]  # name -> share of the clocks in detail that it worked
    stalls: dict[str, float]  # why -> clocks of all warps in detail
    stalls_of: list[dict[str, float]]  # the same by instruction
    warps: list[dict[str, float]]  # the same by warp of a CTA, with "issued" slots and clocks "lived"

    @property
    def seconds(self):
        return self.clocks / self.chip.gigahertz / 1e9

    @property
    def milliseconds(self):
        return 1e3 * self.seconds

    @property
    def gap(self):
        """Return clocks from the end of a launch to the start of this one, if they do not overlap."""
        return self.chip.launch - self.start

    @property
    def steady(self):
        return self.clocks - self.start - self.drain

    def of(self, clusters):
        """Return the clock of this total number of clusters, if both are more than what ran in detail."""
        share = math.ceil(clusters / self.chip.slots(self.size))
        later = (share - self.share) * self.more
        return replace(self, share=share, clocks=self.clocks + later, triggered=self.triggered + later)

    def binds(self):
        """Return (name of the busiest unit, its share of the time), busiest first."""
        return sorted(self.units.items(), key=lambda item: -item[1])


def resident_ctas(chip, program, block, registers, shared):
    """Return how many CTAs an SM runs at once: by registers, warps and shared memory."""
    warps = -(-math.prod(block) // 32)
    each = 256 * math.ceil((registers or 32) * 32 / 256)  # registers of a warp
    limits = [CTAS_OF_AN_SM, REGISTERS_OF_AN_SM // (each * warps)]
    limits.append(min(WARPS_OF_AN_SM, SIZES[program.arch].threads_sm // 32) // warps)
    limits.append(SIZES[program.arch].shared_sm // (shared + SHARED_OF_A_CTA))
    return max(1, min(limits))


class Timer:
    """A launch's setting while it runs; `clock()` is its result."""

    def __init__(self, setting, program, grid, block, cluster, shared, registers, behind, traced=False):
        name, clusters, waves, sms = setting if isinstance(setting, Setting) else (setting, None, 0, SMS_IN_DETAIL)
        self.chip = chip = chip_of(name, program.arch)
        self.size = size = math.prod(cluster)
        launched = math.prod(grid) // size
        total = clusters or launched
        self.resident = resident_ctas(chip, program, block, registers, shared)
        slots = chip.slots(size)
        self.share = math.ceil(total / slots)
        self._used = min(self.resident, self.share)
        deep = min(self.share, waves * self._used or self.share)  # clusters of an SM that run in detail
        self._side_by_side = max(1, min(sms // size, launched // deep))
        self.detailed = min(self._side_by_side * deep, launched)
        if self.detailed > MOST_IN_DETAIL:
            asked = f"a clock would run {self.detailed:,} clusters in detail, and there may be {MOST_IN_DETAIL:,}"
            raise ValueError(f"{asked}: launch part of the grid, with clock=Setting(chip, clusters, waves=...)")
        at_once = min(total, slots * self._used)  # clusters of the whole launch that share L2 and HBM
        self.begins, ahead = _behind(behind)

        table = (binding.TimingRecord * program.count)()
        listed, numbers = costs.fill(table, program, chip)
        registers_ = (ctypes.c_int32 * max(len(listed), 1))(*listed)
        warps = -(-math.prod(block) // 32)
        self._stalls = (ctypes.c_double * (program.count * len(STALLS)))()
        self._warps = (ctypes.c_double * (warps * OF_A_WARP))()
        self._begun, self._ended = ((ctypes.c_double * max(self.detailed, 1))() for _ in range(2))
        constants = {name: getattr(chip, name) for name in CLOCK_CONSTANTS}
        self._start = constants["start"] = chip.start_cluster if size > 1 else chip.start
        for rate, most in (("l2_rate", chip.l2_rate_sm), ("hbm_rate", chip.hbm_rate_sm)):
            constants[rate] = min(most * size, constants[rate] / at_once * self._used) * self._side_by_side
        taken = self._used * (shared + SHARED_OF_A_CTA)
        arrays = {"timing": table, "registers": registers_, "stalls": self._stalls, "warps": self._warps,
                  "begun": self._begun, "ended": self._ended}
        self.record = binding.ClockSetting(
            nregisters=numbers, detailed=self.detailed, alone=bool(waves), slots=self._side_by_side,
            resident=self.resident, l1_lines=max(0, int(chip.l1_bytes) - taken) // 128, traced=traced, ahead=ahead,
            **{name: ctypes.addressof(array) for name, array in arrays.items()}, **constants,
        )
        self._held = (table, registers_)

    def clock(self):
        record, ended = self.record, sorted(self._ended)
        at_once = min(self._used * self._side_by_side, self.detailed)
        full = ended[self.detailed - at_once]  # from here on, fewer clusters are resident than could be
        left = self.share - self.detailed / self._side_by_side
        clocks = record.end + self._waves(ended, at_once, left)
        units = {name: busy / record.end for name, busy in zip(UNITS, record.busy)} if record.end else {}
        for unit in ("l2", "hbm"):
            units[unit] = min(units.get(unit, 0), 1.0)
        named, warps = _named(self._stalls, STALLS), _named(self._warps, (*STALLS, "issued", "lived"))
        return Clock(
            chip=self.chip, clocks=clocks, start=min(self._start, clocks), drain=record.end - full, size=self.size,
            resident=self.resident, share=self.share, detailed=self.detailed,
            more=(clocks - record.end) / left if left else 0.0,
            triggered=clocks - (record.end - record.triggered) if record.triggered else clocks,
            leaves_room=self.resident > self._used, begins=self.begins, units=units,
            stalls={why: sum(row[why] for row in named) for why in STALLS}, stalls_of=named, warps=warps,
        )

    def records(self):
        """Return the engine's TraceRecords, which this frees."""
        records = (TraceRecord * self.record.nrecords)()
        if self.record.records:
            ctypes.memmove(records, self.record.records, ctypes.sizeof(records))
            binding.engine().free_records(self.record.records)
            self.record.records = None
        return records

    def _waves(self, ended, at_once, left):
        """Return the clocks of so many clusters more on each SM: at the rate of those in detail, all in one slot."""
        if not left:
            return 0.0
        if self.detailed > at_once:
            return left * self._side_by_side * (ended[-1] - ended[at_once - 1]) / (self.detailed - at_once)
        return ended[-1] * math.ceil(left * self._side_by_side / at_once)


def _named(numbers, names):
    """Return rows of an array of numbers, each by these names."""
    return [dict(zip(names, numbers[k : k + len(names)])) for k in range(0, len(numbers), len(names))]


def _behind(run):
    """Return (when a launch begins, counted from the one that it overlaps; when that one then ends), or (None, 0)."""
    if run is None or run.clock is None:
        return None, 0.0
    ahead = run.clock
    begins = ahead.triggered if ahead.leaves_room else max(ahead.triggered, ahead.clocks - ahead.start)
    return begins, ahead.clocks - begins


def together(runs):
    """Return the seconds of launches in a row; a programmatic dependent launch overlaps the one ahead of it."""
    begins = end = previous = 0.0
    for run in runs:
        scale = 1e-9 / run.clock.chip.gigahertz
        if run.clock.begins is not None:
            begins = previous + run.clock.begins * scale
        else:
            begins = end + run.clock.gap * scale if end else 0.0
        end, previous = max(end, begins + run.clock.clocks * scale), begins
    return end


class Longer(NamedTuple):
    """A launch predicted from two shorter ones."""

    chip: ChipClock
    clocks: float
    fixed: float  # clocks that do not grow: start, drain, prologue
    each: float  # clocks for one more of what grows

    @property
    def milliseconds(self):
        return self.clocks / self.chip.gigahertz / 1e6


def longer(short, long, size):
    """Return a launch of that size, from the (size, Clock) of two that differ only in size: what a CTA loops over, such
    as tokens; for a grid that grows, use Setting."""
    (few, a), (many, b) = short, long
    if a.chip != b.chip or not few < many <= size:
        raise ValueError(f"two launches on one chip, the shorter one first, and neither of more than {size}")
    each = (b.clocks - a.clocks) / (many - few)
    return Longer(b.chip, b.clocks + each * (size - many), b.clocks - each * many, each)
