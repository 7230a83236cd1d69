"""`kda cache`: what is kept of built kernels, and how to be rid of it.  Imports no torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ptxkit.commands.render import FINDING, OK, Screen, common_options, heading
from ptxkit.compile import store

from .findings import in_bytes
from .options import Name, NumberOption
from .stale import ENGINE, EXTENSION, judge

DAY = 86400
SAYS = {                                     # owners of entries that belong to no backend
    "common": "kernels that backends share",
    "host": "modules in C and C++ that run calls on this machine's CPU",
    "simulator": "the engine that runs PTX on this machine's CPU",
    "others": "kernels of no backend, which scripts built with kda.simulator or ptxkit.compile",
    "unreadable": "files that are damaged, or that kda did not write",
}
OWNERS = {ENGINE: "simulator", EXTENSION: "host"}
ACTIONS = ("list", "path", "clean")


@dataclass(frozen=True)
class EntryLine:
    """One entry."""

    stored: store.StoredKernel
    status: str                              # "current", "stale", "unreadable"
    why: str = ""                            # why it is stale

    @classmethod
    def from_stored(cls, stored: store.StoredKernel, why_stale: Callable[[Any], str | None]) -> EntryLine:
        if stored.about is None:
            return cls(stored, "unreadable")
        why = why_stale(stored.about)
        return cls(stored, "stale", why) if why else cls(stored, "current")

    @property
    def sort(self) -> tuple[str, str, str]:
        """Return the backend or owner, the arch and the kernel; "-" where the entry does not tell."""
        about = self.stored.about or {}
        if self.stored.about is None:
            whose = "unreadable"
        else:
            whose = self.backend or OWNERS.get(about.get("module") or "", "others")
        return whose, about.get("arch") or "-", about.get("kernel") or "-"

    @property
    def backend(self) -> str | None:
        """Return the backend whose kernel it is; None if it is of none."""
        module = ((self.stored.about or {}).get("module") or "").split(".")
        return module[2] if module[:2] == ["kda", "backends"] and len(module) > 2 else None


@click.command()
@click.argument("action", type=Name("action", lambda: ACTIONS), metavar="[list|path|clean]", default="list")
@click.option("--stale", is_flag=True, help="clean: what other source or another compiler built.  [default]")
@click.option("--older-than", "days", type=NumberOption(0), metavar="DAYS", help="clean: what was not used since.")
@click.option("--all", "everything", is_flag=True, help="clean: everything.")
@click.option("--verbose", "-v", is_flag=True, help="list: a row for each kernel.")
@common_options
def command(screen: Screen, action: str, stale: bool, days: float | None, everything: bool,
            verbose: bool) -> int:
    """List the kernels that were built (list), print their folder (path), remove some (clean).

    A removed kernel is built again when a call needs it.  Cleaning also removes unreadable files, and what processes
    that died left behind.  Exits with 1 if the folder is not trusted or an entry cannot be removed.
    """
    choices = [stale, days is not None, everything]
    if sum(choices) > (action == "clean"):
        raise click.UsageError("--stale, --older-than and --all are for `kda cache clean`, one of them at a time.")
    kernels = store.default()
    if action == "path":                     # never folded: a shell takes it
        if screen.json:
            screen.emit_json({**json_heading(kernels, OK), "action": "path"})
        else:
            screen.write(str(kernels.folder))
        return OK
    with screen.progress(f"reading {kernels.folder}") as tell:
        stored = list(kernels.entries())
        tell.expect(len(stored))
        lines, why_stale = [], judge()
        for each in stored:
            tell.step()
            lines.append(EntryLine.from_stored(each, why_stale))
    if action == "clean":
        go = [line for line in lines if goes(line, days, everything)]
        return clean(screen, kernels, go, len(lines) - len(go), "" if sum(choices) else "; --all removes them, too")
    return show(screen, kernels, lines, verbose)


def goes(line: EntryLine, days: float | None, everything: bool) -> bool:
    if days is not None:
        return line.status == "unreadable" or line.stored.used < time.time() - days * DAY
    return everything or line.status != "current"


def clean(screen: Screen, kernels: store.Store, lines: Sequence[EntryLine], others: int, hint: str) -> int:
    """Remove what `lines` hold, of all but `others`; `hint`: what removes those."""
    why = kernels.distrusted()
    gone = [] if why else [line for line in lines if kernels.remove(line.stored.path)]
    freed = sum(line.stored.bytes for line in gone) + (0 if why else kernels.sweep())
    left = others + len(lines) - len(gone)
    code = FINDING if why or len(gone) < len(lines) else OK
    if why:
        texts = [f"{screen.mark('fail')} nothing is removed: {why}"]
    else:
        about = f"{left} left{hint if others else ''}"
        texts = [f"{kernels.folder}: {entries(len(gone))} removed, {in_bytes(freed)}; {about}"]
        if len(gone) < len(lines):
            texts.append(f"{screen.mark('fail')} {entries(len(lines) - len(gone))} cannot be removed")
    fields = {"action": "clean", "removed": len(gone), "left": left, "bytes": freed}
    screen.answer({**json_heading(kernels, code), **fields}, texts)
    return code


def show(screen: Screen, kernels: store.Store, lines: Sequence[EntryLine], verbose: bool) -> int:
    why = kernels.distrusted()
    code = FINDING if why else OK
    texts = [f"{kernels.folder}: {entries(len(lines))}, {in_bytes(size(lines))}"]
    if why:
        texts.append(f"{screen.mark('fail')} not used: {why}")
    elif not store.writable(kernels.folder):
        texts.append(f"{screen.mark('warn')} cannot be written, so nothing new is kept: see `kda doctor cache.dir`")
    stale = [line for line in lines if line.status != "current"]
    if stale:
        reasons = Counter(line.why or "unreadable" for line in stale).items()
        words = ", ".join(f"{count} {reason}" for reason, count in reasons)
        texts.append(f"Stale: {len(stale)} ({words}); `kda cache clean` frees {in_bytes(size(stale))}.")
    if lines:
        header = ("whose", "arch", "kernel" if verbose else "kernels", "entries", "size", "last used", "stale")
        texts += screen.table(rows(lines, verbose), header, "lllrrrr", indent=2)
        owners = {line.sort[0] for line in lines}
        texts += [f"{whose}: {says}" for whose, says in SAYS.items() if whose in owners]
        texts += ["-v prints each kernel."] * (not verbose)
    fields = {"action": "list", "bytes": size(lines), "entries": [line_json(line) for line in lines]}
    screen.answer({**json_heading(kernels, code), **fields}, texts)
    return code


def rows(lines: Sequence[EntryLine], verbose: bool) -> list[tuple[str, ...]]:
    """Return a row for each kernel of a backend and arch, or else one row for all of them with their number."""
    table, depth = [], 3 if verbose else 2
    for sort in sorted({line.sort[:depth] for line in lines}):
        same = [line for line in lines if line.sort[:depth] == sort]
        if not verbose:
            sort = (*sort, str(len({line.sort for line in same})))
        stale = sum(line.status != "current" for line in same)
        used = days_ago(max(line.stored.used for line in same))
        table.append((*sort, str(len(same)), in_bytes(size(same)), used, str(stale or "")))
    return table


def days_ago(when: float) -> str:
    days = int((time.time() - when) // DAY)
    return "today" if days < 1 else f"{days} day{'s' * (days > 1)} ago"


def entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"


def size(lines: Sequence[EntryLine]) -> int:
    return sum(line.stored.bytes for line in lines)


def json_heading(kernels: store.Store, code: int) -> dict[str, Any]:
    return heading("cache", code, folder=str(kernels.folder), distrusted=kernels.distrusted())


def line_json(line: EntryLine) -> dict[str, Any]:
    about = line.stored.about or {}
    return {
        "key": line.stored.key, "backend": line.backend, "arch": about.get("arch") or None,
        "kernel": about.get("kernel") or None, "bytes": line.stored.bytes,
        "used": int(line.stored.used), "built": about.get("built"), "seconds": about.get("seconds"),
        "status": line.status, "why": line.why or None,
    }
