"""Findings in words: their kinds, and a finding with its places in the PTX and in the source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Kind(NamedTuple):
    id: str  # stable: tests, --json and docs quote it
    says: str
    forgiven: bool = False  # hardware and compilers tolerate it: a note, unless the launch is strict


# by the engine's number (FindingKind); {t} is the engine's own text, {a} the address, {n} the size, {o} the other,
# {s} the space, {w} {r} {x} what this one does, {b} what to do about two lanes
KINDS = {
    1: Kind("out-of-bounds", "{t}"),
    2: Kind("misaligned", "{t}"),
    3: Kind("uninitialised", "reads {s} at {a}, which was never written"),
    4: Kind("race-write-write", "{w} {s} at {a}, which {o} wrote: nothing orders the two"),
    5: Kind("race-write-read", "{r} {s} at {a}, which {o} wrote: nothing orders this read after that write"),
    6: Kind("race-read-write", "{w} {s} at {a}, which {o} may still read: nothing orders this write after that read"),
    7: Kind(
        "proxy",
        "the async proxy {x} {s} at {a}, which {o} wrote through the generic proxy: "
        "fence.proxy.async is missing between",
    ),
    8: Kind(
        "race-lanes",
        "{x} {s} at {a}, which another lane of the same warp used: {b}",
    ),
    9: Kind("barrier", "{t}"),
    10: Kind("mbarrier", "{t}"),
    11: Kind("deadlock", "nobody can go on: {t}"),
    12: Kind("livelock", "{t}"),
    13: Kind("diverged", "an .aligned instruction was not reached by all lanes of the warp: {t}"),
    14: Kind("lane", "{t}"),
    15: Kind("tmem-leak", "{t}"),
    16: Kind("tmem", "{t}"),
    17: Kind("descriptor", "{t}"),
    18: Kind("tensor-map", "{t}"),
    19: Kind("operand", "{t}"),
    20: Kind("peer-exited", "{t}"),
    21: Kind("register-in-flight", "{t}"),
    22: Kind("group", "{t}"),
    23: Kind("mbarrier-overwritten", "{t}"),
    24: Kind("too-many-instructions", "the launch ran {n} warp-instructions and has not ended; `limit=` allows more"),
    25: Kind("unsupported", "{t}"),
    26: Kind("tcgen05-fence", "uses tensor memory at {a}, which {o} {u}: {t} is missing between", forgiven=True),
    27: Kind("mbarrier-fence", "{t}", forgiven=True),
    28: Kind(
        "race-lanes",
        "{x} {s} at {a}, which {o} used by lane {l}: bar.warp.sync is missing between that and its release",
        forgiven=True,
    ),
    29: Kind("wgmma-fence", "{t}", forgiven=True),
    30: Kind("race-grids", "{x} {s} at {a}, which the kernel ahead {v}: griddepcontrol.wait is missing before this"),
    31: Kind(
        "tcgen05-wait",
        "uses a register of a tcgen05.ld that no tcgen05.wait::ld has waited for",
        forgiven=True,
    ),
    32: Kind("peer-exited", "{t}", forgiven=True),
}
SPACES = ("shared memory", "global memory", "tensor memory")
ACTORS = (
    "warp {n}",
    "a cp.async of warp {n}",
    "a bulk copy of warp {n}",
    "the source of a bulk copy of warp {n}",
    "a wgmma of warp {n}",
    "a tcgen05 operation of warp {n}",
    "a tcgen05.ld of warp {n}",
    "a tcgen05.st of warp {n}",
    "",  # what a warp has sent, without accesses
    "a copy that an mbarrier tracks",
)
LONGEST = 200  # characters of an instruction: some list hundreds of registers
LONGEST_NAME = 80  # characters of a kernel's name
IN_TURN = "bar.warp.sync (__syncwarp) is missing between"
AT_ONCE = "give each lane an address of its own, or let one lane do it"
AT_ONE_SITE = 4  # findings of one kind at one instruction
RACES = {4, 5, 6, 7, 8, 28, 30}


@dataclass(frozen=True)
class Place:
    """An instruction: its line in the PTX, its text, and the source line that .loc gives."""

    line: int
    ptx: str
    source: str | None

    def __str__(self):
        return f"PTX line {self.line}: {self.ptx}" + (f"  ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Finding:
    kind: str
    says: str
    kernel: str
    cta: int
    warp: int
    lane: int
    place: Place
    other: Place | None
    count: int
    address: int = 0
    grade: str = "error"  # or "note"

    def __str__(self):
        times = f", {self.count} times" if self.count > 1 else ""
        who = f"{shortened(self.kernel)}, CTA {self.cta}, warp {self.warp}, lane {self.lane}"
        kind = self.kind if self.grade == "error" else f"{self.grade}: {self.kind}"
        text = f"{kind}: {who}: {self.says}{times}\n    at {self.place}"
        return text + (f"\n    and {self.other}" if self.other else "")


def shortened(name):
    """A kernel's name, shortened if mangled: some list the types of all arguments."""
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."


def folded(findings):
    """At most a few of one kind per instruction; the last one says how many more there are."""
    sites = {}
    for finding in findings:
        sites.setdefault((finding.kind, finding.place.line), []).append(finding)
    kept = {id(finding) for of in sites.values() for finding in of[:AT_ONE_SITE]}
    left = {id(of[AT_ONE_SITE - 1]): len(of) - AT_ONE_SITE for of in sites.values() if len(of) > AT_ONE_SITE}
    more = {key: f" (and {n} more of this kind at this instruction)" for key, n in left.items()}
    return [replace(f, says=f.says + more[id(f)]) if id(f) in more else f for f in findings if id(f) in kept]


class SimulationError(RuntimeError):
    """The findings of a launch with `raises=True`."""

    def __init__(self, findings):
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


def place_of(program, index):
    ins = program.instruction(index)
    if ins is None:
        return Place(program.kernel.line, "the kernel's end", None)
    loc = ins.loc
    text = ins.text if len(ins.text) <= LONGEST else f"{ins.text[: LONGEST // 2]} ... {ins.text[-LONGEST // 4 :]}"
    return Place(ins.line, text, sourced(loc) if loc else None)


def sourced(loc):
    """A source line, and the lines at which it was inlined."""
    text = f"{loc.file}:{loc.line}"
    while loc := loc.inlined_at:
        text += f" < {loc.file}:{loc.line}"
    return text


def worded(record, program, labels, strict=False):
    """A Finding from the engine's record."""
    number = record.kind
    kind = KINDS[number]
    says = record.text.decode(errors="replace")
    if (number in (1, 2) and not says.strip()) or (number == 1 and record.space == 1 and record.detail[0] >= 0):
        says = _outside(record, labels, says)
    space = SPACES[record.space] if 0 <= record.space < len(SPACES) else "memory"
    who = "another CTA of the grid" if record.other_actor < 0 else ACTORS[record.other_actor].format(n=record.detail[0])
    async_ = bool(record.detail[2]) if number in RACES else False
    first = number if number < 7 else record.detail[3]  # the race, were it one
    words = dict(
        t=says,
        a=hex(record.address),
        n=record.size,
        b=AT_ONCE if record.ins == record.other_ins else IN_TURN,
        s=space,
        o=who,
        w="an asynchronous write to" if async_ else "writes",
        r="an asynchronous read of" if async_ else "reads",
        x="reads" if first == 5 else "writes",
        l=record.detail[1],
        v="may still read" if first == 6 else "writes",
        u="used" if record.other_actor else "allocated",
    )
    other = place_of(program, record.other_ins) if record.other_ins >= 0 else None
    return Finding(
        kind.id,
        kind.says.format(**words),
        program.kernel.name,
        record.cta,
        record.warp,
        record.lane,
        place_of(program, record.ins),
        other,
        record.count,
        record.address,
        "note" if kind.forgiven and not strict else "error",
    )


def _outside(record, labels, says):
    if says:
        return f"{says}: {labels[record.detail[0]]}"
    verb = "writes" if record.detail[3] else "reads"
    where = f"{verb} {record.size} bytes at global address {record.address:#x}"
    if record.detail[0] < 0:
        return f"{where}; the launch has no memory below it"
    return f"{where}, {record.detail[1]} bytes into {labels[record.detail[0]]} of {record.detail[2]} bytes"
