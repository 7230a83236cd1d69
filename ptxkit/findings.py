"""Findings in words: their kinds, and a finding with its places in the PTX and in the source."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ptxkit import advice
from ptxkit.naming import GLOBAL, MemoryPlace, function_of


class FindingKind(NamedTuple):
    id: str  # stable: tests, --json and docs quote it
    says: str
    grade: str = "error"  # or "note", since hardware and compilers tolerate it; or "remark", a note even if strict

    def is_error(self, strict):
        return self.grade == "error" or (self.grade == "note" and strict)


def _kinds():
    """Yield (the engine's number, FindingKind) for each line of findings.txt, which says what they mean."""
    for line in Path(__file__).with_name("findings.txt").read_text().splitlines():
        if line[0] != "#":
            number, grade, name, says = re.split(" {2,}", line, maxsplit=3)
            yield int(number), FindingKind(name, says, grade)


KINDS = dict(_kinds())
UNWRITTEN = 34
FREED = FindingKind("freed", "{t}")  # what the engine calls out-of-bounds, where it is known whose memory that was
# what a warp did, by the engine's ActorKind; the last but one: what a warp has sent, without accesses
ACTORS = (
    "", "a cp.async of ", "a bulk copy of ", "the source of a bulk copy of ", "a wgmma of ", "a tcgen05 operation of ",
    "a tcgen05.ld of ", "a tcgen05.st of ", "", "a copy that an mbarrier tracks",
)
LONGEST = 200  # characters of an instruction: some list hundreds of registers
LONGEST_NAME = 80  # characters of a kernel's name
OF_THE_DSL = re.compile(r"kernel_cutlass_(.+?)_(tensorptr|object_at)")
LISTED = 4  # how many are listed of the findings that one at the same instruction stands for
ENDINGS = {11, 12, 13, 24}  # nobody can go on: each that is found is one of those that end a launch
ENDED = "it ended the launch, whose results are incomplete"
RACES, ORDERLESS = {4, 5, 6, 7, 8, 28, 30}, {4, 5, 6}
IN_MEMORY = {3, 26, 34, 37} | RACES


@dataclass(frozen=True)
class FindingPlace:
    """An instruction: its line in the PTX, its text, the source line that .loc gives, and the function it is in."""

    line: int
    ptx: str
    source: str | None
    function: str | None = None

    def __str__(self):
        return f"PTX line {self.line}: {self.ptx}" + (f"  ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Actor:
    """A warp of a CTA, with its role (of the kernel's configuration, else the function of the source that it runs)."""

    cta: int | None
    warp: int | None
    role: str | None = None
    doing: str = ""  # one of ACTORS; "": the warp itself

    def __str__(self):
        if self.warp is None:
            return self.doing or "another CTA of the grid"
        return f"{self.doing}warp {self.warp}{f' ({self.role})' if self.role else ''}"


@dataclass(frozen=True)
class Finding:
    """What is wrong at an instruction. It stands for `count` occurrences, and for the findings in `alike`: of the same
    kind at the same instruction or source line, against other instructions or by other warps."""

    kind: str
    says: str
    kernel: str
    cta: int
    warp: int
    lane: int
    place: FindingPlace
    other: FindingPlace | None
    count: int
    address: int = 0
    grade: str = "error"  # or "note"
    role: str | None = None  # the warp's
    memory: MemoryPlace | None = None
    by: Actor | None = None  # who did the other access
    advice: str | None = None  # what to do
    ended: bool = False  # the launch, whose results are incomplete
    alike: tuple[Finding, ...] = field(default=(), repr=False)

    def __str__(self):
        times = f", {self.count} times" if self.count > 1 else ""
        role = f" ({self.role})" if self.role else ""
        who = f"{shortened(self.kernel)}, CTA {self.cta}, warp {self.warp}{role}, lane {self.lane}"
        kind = self.kind if self.grade == "error" else f"{self.grade}: {self.kind}"
        lines = [f"{kind}: {who}: {self.says}{times}", f"at {self.place}"]
        lines += [f"and {self.other}"] if self.other else []
        lines += [ENDED] if self.ended else []
        lines += [f"to fix it: {self.advice}"] if self.advice else []
        lines += [_more(self.place, self.alike)] if self.alike else []
        return "\n    ".join(lines)


def _more(place, alike):
    """Say in one line what else happened at the instruction or the source line of a finding."""
    for where, names in (
        ("line of the source:", [f"PTX line {f.place.line}" for f in alike if f.place != place]),
        ("instruction: against", [f"PTX line {f.other.line}" for f in alike if f.other]),
        ("instruction: in", [f"CTA {f.cta}, warp {f.warp}" for f in alike]),
    ):
        if names := list(dict.fromkeys(names)):
            listed = "; ".join(names[:LISTED]) + ("; ..." if len(names) > LISTED else "")
            return f"{len(alike)} more of this kind at this {where} {listed}"


def shortened(name):
    """Return a kernel's name, shortened if mangled: some list the types of all arguments, those of the CuTe DSL behind
    its function's name."""
    of_the_dsl = OF_THE_DSL.match(name)
    name = of_the_dsl[1] if of_the_dsl else name
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."


def of_launch(kind, says, run, **more):
    """Return a finding about a whole launch, at the kernel's entry."""
    place = FindingPlace(run._program.kernel.line, f".entry {run.kernel}", None)
    return Finding(kind, says, run.kernel, 0, 0, 0, place, None, 1, **more)


def folded(findings):
    """Return the first finding of each kind per source line, or per instruction without one; `alike` has the others."""
    sites = {}
    for finding in findings:
        site = finding.place.source or finding.place
        sites.setdefault((finding.kind, finding.grade, finding.kernel, site), []).append(finding)
    return [
        replace(first, alike=tuple(alike), ended=first.ended or any(f.ended for f in alike)) if alike else first
        for first, *alike in sites.values()
    ]


class SimulationError(RuntimeError):
    """The findings of a launch with `raises=True`."""

    def __init__(self, findings):
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


def place_of(program, index):
    if (ins := program.instruction(index)) is None:
        return FindingPlace(program.kernel.line, "the kernel's end", None)
    loc = ins.loc
    text = ins.text if len(ins.text) <= LONGEST else f"{ins.text[: LONGEST // 2]} ... {ins.text[-LONGEST // 4 :]}"
    return FindingPlace(ins.line, text, sourced(loc) if loc else None, function_of(loc) if loc else None)


def sourced(loc):
    """Return a source line, and the lines at which it was inlined."""
    text = f"{loc.file}:{loc.line}"
    while loc := loc.inlined_at:
        text += f" < {loc.file}:{loc.line}"
    return text


class Wording:
    """Turns the engine's records of one launch into findings."""

    def __init__(self, program, names, grid=(1, 1, 1), cluster=(1, 1, 1), warps=1, strict=False, heap=None):
        self.program, self.names, self.strict, self.heap = program, names, strict, heap
        self.grid, self.cluster, self.warps = grid, cluster, warps  # warps of a CTA

    def findings(self, records, stopped):
        """Yield the findings of a launch; `stopped` is the number of the one that ended it, from 1 on."""
        for n, record in enumerate(records, 1):
            yield replace(self.finding(record), ended=bool(stopped) and (n == stopped or record.kind in ENDINGS))

    def finding(self, record):
        gone = self._gone(record)
        number = record.kind
        kind = FREED if gone else KINDS[number]
        place = place_of(self.program, record.ins)
        other = place_of(self.program, record.other_ins) if record.other_ins >= 0 else None
        this = Actor(record.cta, record.warp, self._role(record.warp, place))
        by = self._other(record, other) if number in RACES | {26} else None
        memory = self.names.memory(record.space, record.address) if number in IN_MEMORY else None
        says = gone or record.text.decode(errors="replace")
        outside = number == 1 and record.space == GLOBAL
        if (number in (1, 2) and not says.strip()) or (outside and record.detail[0] >= 0):
            says = self._outside(record, says)
        async_ = bool(record.detail[2]) if number in RACES else False
        first = number if number < 7 else record.detail[3]  # the race, were it one
        elsewhere = f" of CTA {by.cta}" if by and by.cta not in (None, record.cta) else ""
        words = dict(
            t=says, a=memory, n=record.size, o=f"{by}{elsewhere}", l=record.detail[1],
            b="writes by the same instruction" if record.ins == record.other_ins else "used: nothing orders the two",
            w="an asynchronous write to" if async_ else "writes", r="an asynchronous read of" if async_ else "reads",
            x="reads" if first == 5 else "writes", v="may still read" if first == 6 else "writes",
            s=self.heap.arena.block_at(record.address).allocated if number == UNWRITTEN else "",
            u="used" if record.other_actor else "allocated",
        )
        grade = "error" if kind.is_error(self.strict) else "note"
        return Finding(
            kind.id, kind.says.format(**words), self.program.kernel.name, record.cta, record.warp, record.lane,
            place, other, record.count, record.address, grade, this.role, memory, by,
            advice.FREED if gone else self._advice(record, this, by, async_),
        )

    def _role(self, warp, place):
        if self.names.roles:
            return self.names.roles.get(warp)
        return place.function if place and place.function and place.function not in self.program.kernel.name else None

    def _other(self, record, place):
        """Return who did the other access; the engine numbers clusters, and the warps of each."""
        doing = ACTORS[record.other_actor] if record.other_actor >= 0 else ""
        if record.other_actor < 0 or record.other_warp < 0:
            return Actor(None, None, None, doing)
        rank, warp = divmod(record.other_warp, self.warps)
        cta = _linear(record.other_cluster, rank, self.grid, self.cluster) if record.other_cluster >= 0 else None
        return Actor(cta, warp, self._role(warp, place), doing)

    def _gone(self, record):
        """Say what an access does to memory that was freed before; None for other accesses."""
        if record.kind != 1 or record.space != GLOBAL or self.heap is None:
            return None
        block = self.heap.gone(record.address)
        return block and f"{_does(record)}, {record.address - block.address} bytes into memory of {block}"

    def _advice(self, record, this, by, async_):
        number = record.kind
        if number == 1 and record.space == GLOBAL and record.size and not record.text.strip():
            return advice.OUTSIDE
        if number in advice.OF_KIND:
            return advice.OF_KIND[number]
        if number == 8:
            if record.ins == record.other_ins:
                return advice.ONE_ADDRESS
            return advice.LANES + (advice.ATOMIC if record.space == GLOBAL else "")
        if number == 33:
            return advice.AT_EXIT[record.detail[0]]
        if number not in ORDERLESS | {7} or record.other_actor < 0:
            return None
        distance = self._distance(record, by)
        near = distance in ("warp", "cta")
        this, other = (
            "whoever made that access"
            if a.warp is None and a.doing
            else str(replace(a, doing="")) + ("" if near or a.cta is None else f" of CTA {a.cta}")
            for a in (this, by)
        )
        if number == 7:
            return advice.PROXY.format(other=other)
        fence = async_ and record.other_actor == advice.WARP and number != 6
        tensor = record.space == 2
        first = advice.of_a_race(distance, record.other_actor, this, other, fence=fence, tensor=tensor)
        if record.actor == advice.WARP:
            if first and record.other_actor == advice.WARP and record.space == GLOBAL:
                first += advice.OF_ITS_OWN if distance == "grid" else advice.ATOMIC + advice.OF_ITS_OWN
            return first
        last = advice.of_a_race(distance, record.actor, other, this, tensor=tensor)
        return advice.EITHER.format(first=first, last=last) if first else last

    def _distance(self, record, by):
        """Return how far away the warp of the other access is."""
        if by.cta == record.cta:
            return "warp" if by.warp == record.warp else "cta"
        if by.cta is None:
            return "grid" if record.other_warp >= 0 else "cluster"
        one, other = ([n // c for n, c in zip(_digits(cta, self.grid), self.cluster)] for cta in (by.cta, record.cta))
        return "cluster" if one == other else "grid"

    def _outside(self, record, says):
        near = self.names.nearest(record.address)
        if says:
            return f"{says}: {near}"
        where = f"{_does(record)} at global address {record.address:#x}"
        if near is None:
            return f"{where}; the launch has no memory below it"
        return f"{where}, {record.address - near.address} bytes into {near}, which has {near.size} bytes"


def _does(record):
    return f"{'writes' if record.detail[3] else 'reads'} {record.size} bytes"


def _linear(number, rank, grid, cluster):
    """Return the CTA (as one number) of a rank in the cluster of a number."""
    clusters = [g // c for g, c in zip(grid, cluster)]
    place = [outer * c + inner for outer, inner, c in zip(_digits(number, clusters), _digits(rank, cluster), cluster)]
    return place[0] + grid[0] * (place[1] + grid[1] * place[2])


def _digits(number, sizes):
    return number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1])
