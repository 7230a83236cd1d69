"""`kda compile`: kernels built ahead of time, into the cache, for any arch.  Needs no GPU.

A backend offers its kernels by `recipes(problem, host)` in its plan.py.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from kda import dispatch
from kda.capability import Capability
from kda.compile import store
from kda.compile.errors import BuildError, MissingCompilerError
from kda.compile.fetching import attempt_all
from kda.compile.kernel import Kernel
from kda.compile.recipes import AnyRecipe
from kda.compile.target import Target, parse
from kda.host import Host, detect
from kda.problem import Problem

from .options import known, no_kernels
from .render import CANNOT_JUDGE, FINDING, OK, Screen, common_options, kda_version, table

WAYS = ("forward", "backward", "recurrent")
GATES = ("", "softplus dt_bias=true l2norm beta=sigmoid", "bounded dt_bias=true l2norm beta=sigmoid")
BATCHES = ("", "packed")


@dataclass
class Line:
    """One kernel of a backend."""

    backend: str
    recipe: AnyRecipe
    kernel: Kernel | None = None
    error: str = ""
    about: dict[str, Any] = field(default_factory=dict)                      # of its entry, if it was kept
    there: bool = False                      # before this command

    @property
    def shared(self) -> int | None:
        """Bytes of a CTA."""
        return self.kernel and (self.kernel.shared or 0) + self.recipe.dynamic_shared(self.kernel)


@click.command()
@click.option("--arch", "archs", multiple=True,
              help="GPU arch, as sm90; again for more.  [default: this machine's GPU]")
@click.option("--backend", help="Backend.  [default: all that have kernels to offer]")
@click.option("--problem", "problems", metavar="WORDS", multiple=True,
              help='What to build for, as in "K=64 V=64 float16 packed backward"; again for more.  [default: K=V=128 '
                   "bfloat16, or float32 of a backend without bfloat16; forward, backward and recurrent, with each "
                   "gate, packed or not]")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), help="Processes that build.  [default: one a CPU]")
@common_options
def command(screen: Screen, archs: tuple[str, ...], backend: str | None, problems: tuple[str, ...],
            workers: int | None) -> int:  # fmt: skip
    """Build kernels ahead of time, so that no call has to wait for a compiler.

    Exits with 1 if a kernel cannot be built or cannot be kept.
    """
    targets = [target_of(arch) for arch in archs] or [own_target()]
    if backend:
        known("backend", backend, dispatch.backend_names())
    lines, refused = offered(targets, backend, [problem_of(words) for words in problems])
    if not lines:
        return cannot(screen, targets, refused)
    with screen.progress(f"building {len(lines)} kernels") as tell:
        fill(lines, workers, tell)
    code = FINDING if any(line.error or not line.about for line in lines) else OK
    if screen.json:
        screen.emit_json(as_json(lines, targets, refused, code))
    else:
        for text in text_lines(screen, lines, refused):
            screen.line(text)
    return code


def target_of(arch: str) -> Target:
    try:
        return parse(arch)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def problem_of(words: str) -> Problem:
    try:
        return Problem.parse(words)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def own_target() -> Target:
    from kda.verify.doors import here

    cc = detect(here()).cc
    if cc is None:
        raise click.UsageError("this machine has no GPU to build for: name an --arch, as sm90.")
    return target_of("{}.{}".format(*cc))


@functools.cache
def host_of(target: Target) -> Host:
    """This machine's GPU where it is of that arch, else one as the simulator knows it."""
    from kda.simulator import chips
    from kda.verify.doors import here

    own = detect(here())
    if own.cc == target.cc:
        return own
    return dataclasses.replace(chips.host_of(target.name), device="cuda:0", simulated=False)


# ---------------------------------------------------------------------------------------------- what is offered


def offered(
    targets: Sequence[Target], backend: str | None, problems: Sequence[Problem]
) -> tuple[list[Line], dict[str, str]]:
    """The kernels, each once; and for the backends that offer none, why.

    Where neither a problem nor a backend is named, those of the backends that are made for the arch.
    """
    lines: dict[tuple[str, AnyRecipe], Line] = {}
    refused: dict[str, str] = {}
    for target, c in itertools.product(targets, dispatch.capabilities()):
        named = c.backend == backend if backend else bool(problems) or target.name in c.archs
        if not named:
            continue
        recipes, why = offers(c, target, problems or usual(c))
        for recipe in recipes:
            lines.setdefault((c.backend, recipe), Line(c.backend, recipe))
        if not recipes and (backend or c.archs):
            refused[f"{c.backend} for {target.name}"] = why
    return list(lines.values()), refused


def usual(c: Capability) -> list[Problem]:
    """What is built where no problem is named."""
    words = itertools.product(WAYS, GATES, BATCHES)
    return [problem_of(" ".join(("K=128 V=128", c.usual_dtype, *each))) for each in words]


def offers(c: Capability, target: Target, problems: Iterable[Problem]) -> tuple[list[AnyRecipe], str]:
    if not c.archs:
        return [], "it has no kernels"
    offer = getattr(importlib.import_module(f"{c.launch_module.rpartition('.')[0]}.plan"), "recipes", None)
    if offer is None:
        return [], "it offers no kernels to be built ahead of time"
    host, found, why = host_of(target), [], "it was asked for nothing"
    for problem in problems:
        if reasons := c.rejections(problem, host, named=True):
            why = f"{problem}: {reasons[0]}"
        else:
            found += offer(problem, host)
    return found, why


# ---------------------------------------------------------------------------------------------- building


def fill(lines: Sequence[Line], workers: int | None, tell: Any) -> None:
    """Build what is missing, and write down what became of each."""
    kept = store.default()
    for line in lines:
        line.there = kept.find(line.recipe.key) is not None
    tell(f"building {sum(not line.there for line in lines)} kernels")
    kernels = attempt_all([line.recipe for line in lines], workers)
    if all(isinstance(found, MissingCompilerError) for found in kernels):
        raise kernels[0]
    for line, found in zip(lines, kernels):
        if isinstance(found, BuildError):
            line.error = str(found)
        else:
            line.kernel = found
    said = {entry.key: dict(entry.about or {}) for entry in kept.entries()}
    for line in lines:
        line.about = said.get(line.recipe.key, {})


# ---------------------------------------------------------------------------------------------- printing


def text_lines(screen: Screen, lines: Sequence[Line], refused: dict[str, str]) -> list[str]:
    header, named = ("backend", "arch", "kernel", "registers", "spills", "shared", "seconds", ""), names(lines)
    printed = table([cells(screen, line, named) for line in lines], header=header, align="lllrrrrl")
    errors = [f"{screen.sign('fail')} {error}" for error in dict.fromkeys(line.error for line in lines) if error]
    return [*printed, *errors, *(f"{who}: {why}" for who, why in refused.items()), summary(screen, lines)]


def cells(screen: Screen, line: Line, name: dict[AnyRecipe, str]) -> tuple[str, ...]:
    first = (line.backend, line.recipe.target.name, name[line.recipe])
    if line.kernel is None:
        return (*first, "-", "-", "-", "-", screen.paint("FAIL", "red"))
    k, seconds = line.kernel, line.about.get("seconds")
    numbers = (k.registers, k.spills, line.shared, "-" if seconds is None else f"{seconds:.1f}")
    return (*first, *map(str, numbers), "was there" if line.there else "" if line.about else "not kept")


def names(lines: Sequence[Line]) -> dict[AnyRecipe, str]:
    """Kernels by name, and by what tells those of a backend of one name apart: constants, or else types."""
    found = {line.recipe: line.recipe.name for line in lines}
    backends = {line.recipe: line.backend for line in lines}
    for facts in (lambda r: {**r.constants, **r.options}, lambda r: dict(r.signature)):
        alike: dict[tuple, list[AnyRecipe]] = {}
        for recipe, name in found.items():
            alike.setdefault((name, recipe.target, backends[recipe]), []).append(recipe)
        for same in alike.values():
            for recipe in same:
                apart = [word for word in facts(recipe).items() if any(word not in facts(r).items() for r in same)]
                found[recipe] += "".join(f" {name}={value}" for name, value in apart if value is not None)
    return found


def summary(screen: Screen, lines: Sequence[Line]) -> str:
    kept = store.default()
    there, failed = sum(line.there for line in lines), sum(bool(line.error) for line in lines)
    lost = [line for line in lines if line.kernel is not None and not line.about]
    words = [f"{len(lines)} kernels", f"{there} were there", f"{len(lines) - there - failed} were built"]
    words += [f"{failed} cannot be built"] * bool(failed)
    if lost:
        why = kept.distrusted() or "see the warning above"
        return f"{', '.join(words)}; {screen.sign('fail')} {len(lost)} cannot be kept in {kept.folder}: {why}"
    return f"{', '.join(words)}; they are kept in {kept.folder}"


def cannot(screen: Screen, targets: Sequence[Target], refused: dict[str, str]) -> int:
    why = [no_kernels(target) for target in targets] if not refused else [f"{w}: {y}" for w, y in refused.items()]
    if screen.json:
        screen.emit_json({**json_heading(targets, CANNOT_JUDGE), "why": why, "kernels": []})
    else:
        for text in why:
            screen.line(text, err=True)
    return CANNOT_JUDGE


def json_heading(targets: Sequence[Target], code: int) -> dict[str, Any]:
    archs = [target.name for target in targets]
    return {"schema": 1, "kda": kda_version(), "command": "compile", "exit": code, "archs": archs}


def as_json(lines: Sequence[Line], targets: Sequence[Target], refused: dict[str, str], code: int) -> dict[str, Any]:
    found = {"folder": str(store.default().folder), "refused": refused, "kernels": [line_json(x) for x in lines]}
    return {**json_heading(targets, code), **found}


def line_json(line: Line) -> dict[str, Any]:
    k, r = line.kernel, line.recipe
    return {
        "backend": line.backend, "kernel": r.name, "arch": r.target.name, "key": r.key,
        "function": r.function, "constants": dict(r.constants), "options": dict(r.options),
        "registers": k and k.registers, "spills": k and k.spills, "shared": line.shared,
        "seconds": line.about.get("seconds"), "built": k is not None and not line.there, "kept": bool(line.about),
        "error": line.error or None,
    }  # fmt: skip
