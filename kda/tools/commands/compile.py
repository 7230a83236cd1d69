"""`kda compile`: kernels built ahead of time, into the cache, for any arch.  Needs no GPU.

A backend offers its kernels by `recipes(problem, host, training)` in its plan.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from kda.model import host as machines
from kda.model.host import Host
from kda.model.problem import Problem
from kda.routing import dispatch
from kda.routing.capability import Capability
from kda.tools.measure.shapes import MODELS, Model
from ptxkit.commands.options import ARCH, Count
from ptxkit.commands.render import CANNOT_JUDGE, FINDING, OK, Screen, common_options, heading
from ptxkit.compile import store
from ptxkit.compile.errors import BuildError, MissingCompilerError
from ptxkit.compile.fetching import attempt_all
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.recipes import AnyRecipe
from ptxkit.compile.target import Target, parse

from .findings import in_bytes
from .hosts import own_host
from .options import BACKEND, Name, must_have_kernels, no_kernels, problem_of

HEAD = ("backend", "arch", "kernel", "variants", "registers", "spills", "shared", "seconds", "")
WAYS = ("forward", "backward", "recurrent")
GATES = ("", "softplus dt_bias=true l2norm beta=sigmoid", "bounded dt_bias=true l2norm beta=sigmoid")
BATCHES = ("", "packed")
# The calls that a model makes: training, a prompt with or without a state before it, decoding.
OF_A_MODEL = ("forward", "backward", "forward final_state=true", "forward final_state=true state_dtype=float32",
              "recurrent final_state=true state_dtype=float32")


@dataclass
class KernelLine:
    """One kernel of a backend."""

    backend: str
    recipe: AnyRecipe
    kernel: Kernel | None = None
    error: str = ""
    about: dict[str, Any] = field(default_factory=dict)  # what its entry in the store says, if there is one
    in_store: bool = False                      # whether the store had it before this command

    @property
    def shared(self) -> int | None:
        """Return the bytes of shared memory that a CTA takes."""
        if self.kernel is None:
            return None
        return (self.kernel.shared or 0) + self.recipe.dynamic_shared(self.kernel)


@click.command()
@click.option("--arch", "archs", type=ARCH, multiple=True,
              help="GPU arch or card, such as sm90 or h100; may be repeated.  [default: this machine's GPU]")
@click.option("--backend", type=BACKEND, help="The backend whose kernels are built.  [default: all that have some]")
@click.option("--model", "models", type=Name("model", lambda: list(MODELS)), multiple=True,
              help=f"Everything that a model calls: {', '.join(MODELS)}; may be repeated.")
@click.option("--tp", type=Count(1), default=1, show_default=True,
              help="With --model: GPUs over which tensor parallel divides its heads.")
@click.option("--problem", "problems", metavar="WORDS", multiple=True,
              help='What to build for, as in "K=64 V=64 float16 packed backward"; may be repeated.  [default: K=V=128 '
                   "bfloat16, or float32 of a backend without bfloat16; forward, backward and recurrent, with each "
                   "gate, packed or not]  `forward`: only calls without gradients.")
@click.option("--workers", type=Count(1), help="Processes that build.  [default: one per CPU]")
@click.option("--verbose", "-v", is_flag=True, help="Print each variant of a kernel, with what distinguishes it.")
@common_options
def command(screen: Screen, archs: tuple[Target, ...], backend: str | None, models: tuple[str, ...], tp: int,
            problems: tuple[str, ...], workers: int | None, verbose: bool) -> int:
    """Build kernels ahead of time, so that no call has to wait for a compiler.

    Exits with 1 if a kernel cannot be built or cannot be kept.
    """
    if tp > 1 and not models:
        raise click.UsageError("--tp divides the heads of a model; name one with --model")
    for target in archs:
        must_have_kernels(backend, target)
    targets = list(archs) or [own_target()]
    calls = [call for name in models for call in of_model(name, tp)]
    parsed = [problem_of(words) for words in problems]
    training = {problem for words, problem in zip(problems, parsed) if may_train(words, problem)}
    lines, refused = offered(targets, backend, parsed, calls, set(parsed) - training)
    if not lines:
        return cannot(screen, targets, refused)
    with screen.progress(", ".join(target.name for target in targets)):
        fill(lines, workers)
    code = FINDING if broken(lines) else OK
    texts = text_lines(screen, lines, refused, [about(name, tp) for name in models], verbose)
    screen.answer(as_json(lines, targets, refused, code), texts)
    return code


def may_train(words: str, problem: Problem) -> bool:
    """Return whether gradients may be wanted: the word "forward" says that they are not."""
    return problem.disable_recompute or "forward" not in words.replace(",", " ").split()


def of_model(name: str, tp: int) -> list[Problem]:
    """Return what a model's layers call: by kda's own layer, and as transformers does it, which computes the gate
    before."""
    heads = heads_of(name, MODELS[name], tp)
    gates = (f"{MODELS[name].gate} dt_bias=true l2norm beta=sigmoid", "l2norm g_dtype=float32")
    words = itertools.product(OF_A_MODEL, gates, BATCHES)
    return [problem_of(f"H={heads} K=128 V=128 bfloat16 {' '.join(each)}") for each in words]


def heads_of(name: str, model: Model, tp: int) -> int:
    if model.heads % tp:
        raise click.UsageError(f"--tp {tp} does not divide the {model.heads} heads of {name}")
    return model.heads // tp


def about(name: str, tp: int) -> str:
    model = MODELS[name]
    return f"{model.title}: {model.heads // tp} heads per GPU, {model.layers} layers with KDA, {model.gate} gate"


def own_target() -> Target:
    cc = own_host().cc
    if cc is None:
        raise click.UsageError("this machine has no GPU to build for: name an --arch, such as sm90.")
    try:
        return parse("{}.{}".format(*cc))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@functools.cache
def host_of(target: Target) -> Host:
    """This machine's GPU where it is of that arch, else one as the simulator knows it."""
    detected = own_host()
    if detected.cc == target.cc:
        return detected
    return machines.gpu_of(target.name)


# ---------------------------------------------------------------------------------------------- what is offered


def offered(
    targets: Sequence[Target], backend: str | None, problems: Sequence[Problem], calls: Sequence[Problem] = (),
    alone: Collection[Problem] = (),
) -> tuple[list[KernelLine], dict[str, str]]:
    """Return the kernels, each once; and for the backends that offer none, why.

    Of every backend those of `problems`, and of the backend that is picked those of a model's `calls`.  Where neither
    is there, those of what is usual, of the backends that are made for the arch.  `alone`: problems whose calls
    record no gradients.  Why others offer none is of interest only if there are no kernels at all; others are those
    made for another arch, and of a decoding step, which has no chunks, all.
    """
    lines: dict[tuple[str, AnyRecipe], KernelLine] = {}
    refused: dict[str, str] = {}
    others: dict[str, str] = {}
    for target, c in itertools.product(targets, dispatch.capabilities()):
        if backend not in (None, c.backend):
            continue
        wanted = [*problems, *(call for call in calls if (backend or picked(call, target)) == c.backend)]
        if not problems and not calls and (backend or target.name in c.archs):
            wanted = usual(c)
        if not wanted:
            continue
        recipes, why = offers(c, target, wanted, alone)
        for recipe in recipes:
            lines.setdefault((c.backend, recipe), KernelLine(c.backend, recipe))
        if not recipes and (backend or c.archs):
            is_listed = target.name in c.archs and any(problem.op == "chunk" for problem in wanted)
            reasons = refused if backend or is_listed else others
            reasons[f"kernels of the backend {c.backend} for the arch {target.name}"] = why
    return list(lines.values()), refused if lines else refused | others


@functools.cache
def picked(call: Problem, target: Target) -> str | None:
    """Return the backend that serves a call on a GPU of this target."""
    return dispatch.weigh(dataclasses.replace(call, device="cuda:0"), host_of(target)).backend


def usual(c: Capability) -> list[Problem]:
    """Return what is built where no problem is named."""
    words = itertools.product(WAYS, GATES, BATCHES)
    return [problem_of(" ".join(("K=128 V=128", c.usual_dtype, *each))) for each in words]


def offers(
    c: Capability, target: Target, problems: Iterable[Problem], alone: Collection[Problem] = ()
) -> tuple[list[AnyRecipe], str]:
    plan = dispatch.planner(c.backend)
    if plan is None:
        return [], "it has no kernels"
    offer = getattr(plan, "recipes", None)
    if offer is None:
        return [], "it offers no kernels to be built ahead of time"
    host, recipes, why = host_of(target), [], "nothing was requested"
    for problem in problems:
        if reasons := c.rejections(problem, host, named=True):
            why = f"{problem}: {reasons[0]}"
        else:
            recipes += offer(problem, host, training=problem not in alone)
    return recipes, why


# ---------------------------------------------------------------------------------------------- building


def fill(lines: Sequence[KernelLine], workers: int | None) -> None:
    """Build what is missing, and write down what became of each."""
    kernel_store = store.default()
    for line in lines:
        line.in_store = kernel_store.find(line.recipe.key) is not None
    kernels = attempt_all([line.recipe for line in lines], workers)
    if all(isinstance(kernel, MissingCompilerError) for kernel in kernels):
        raise kernels[0]
    for line, kernel in zip(lines, kernels):
        if isinstance(kernel, BuildError):
            line.error = str(kernel)
        else:
            line.kernel = kernel
    said = {entry.key: dict(entry.about or {}) for entry in kernel_store.entries()}
    for line in lines:
        line.about = said.get(line.recipe.key, {})


# ---------------------------------------------------------------------------------------------- printing


def text_lines(
    screen: Screen, lines: Sequence[KernelLine], refused: dict[str, str], models: Sequence[str], verbose: bool
) -> list[str]:
    """Return the result first; then a row for each name of a kernel, or for each kernel."""
    out = [f"{screen.mark('fail' if broken(lines) else 'ok')} {summary(screen, lines)}", *models]
    out += [f"{screen.sign('fail')} {error}" for error in dict.fromkeys(line.error for line in lines) if error]
    out += without_kernels(refused)
    if verbose:
        named = names(lines)
        groups = [(named[line.recipe], [line]) for line in lines]
    else:
        alike: dict[tuple[str, Target, str], list[KernelLine]] = {}
        for line in lines:
            alike.setdefault((line.backend, line.recipe.target, line.recipe.name), []).append(line)
        groups = [(name, same) for (_, _, name), same in alike.items()]
    rows = [HEAD, *(cells(screen, *group) for group in groups)]
    if verbose:
        rows = [(*row[:3], *row[4:]) for row in rows]                        # each row is one variant
    printed = screen.table(rows[1:], rows[0], "lllrrrrl" if verbose else "lllrrrrrl")
    more = ["-v prints each variant."] * any(len(same) > 1 for _, same in groups)
    return [*out, "", *printed, *more]


def without_kernels(refused: dict[str, str]) -> list[str]:
    return [f"no {what}: {why}" for what, why in refused.items()]


def broken(lines: Sequence[KernelLine]) -> bool:
    return any(line.error or not line.about for line in lines)


def cells(screen: Screen, name: str, lines: Sequence[KernelLine]) -> tuple[str, ...]:
    """Return the cells of a row for kernels of one backend and arch; numbers that differ are given as a range."""
    built = [line for line in lines if line.kernel is not None]
    kernels = [line.kernel for line in lines if line.kernel is not None]
    seconds = [line.about["seconds"] for line in lines if line.about.get("seconds") is not None]
    failed, lost = len(lines) - len(built), sum(not line.about for line in built)
    in_store = sum(line.in_store for line in lines)
    notes = [screen.paint(f"FAIL {failed}" if len(lines) > 1 else "FAIL", "red")] * bool(failed)
    notes += ["not kept"] * bool(lost)
    notes += ["already there" if in_store == len(lines) else f"{in_store} already there"] * bool(in_store)
    numbers = (
        span([kernel.registers for kernel in kernels]), span([kernel.spills for kernel in kernels]),
        span([line.shared for line in built], shared_words), f"{sum(seconds):.1f}" if seconds else "-",
    )
    first = lines[0]
    return first.backend, first.recipe.target.name, name, str(len(lines)), *numbers, ", ".join(notes)


def shared_words(size: int) -> str:
    return in_bytes(size) if size >= 1 << 10 or not size else f"{size} B"


def span(numbers: Sequence[int | None], words: Callable[[int], str] = str) -> str:
    known = sorted({number for number in numbers if number is not None})
    if not known:
        return "-"
    least, most = words(known[0]), words(known[-1])
    return most if least == most else f"{least.removesuffix(' KiB')}-{most}"


def names(lines: Sequence[KernelLine]) -> dict[AnyRecipe, str]:
    """Name kernels, also by what tells those of a backend of one name apart: constants, or else types."""
    names_of = {line.recipe: line.recipe.name for line in lines}
    backends = {line.recipe: line.backend for line in lines}
    for facts in (lambda r: flat({**r.constants, **r.options}), lambda r: dict(r.signature)):
        alike: dict[tuple, list[AnyRecipe]] = {}
        for recipe, name in names_of.items():
            alike.setdefault((name, recipe.target, backends[recipe]), []).append(recipe)
        for same in alike.values():
            for recipe in same:
                apart = [word for word in facts(recipe).items() if any(word not in facts(r).items() for r in same)]
                names_of[recipe] += "".join(f" {name}={value}" for name, value in apart if value is not None)
    return names_of


def flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return `facts` with the entries of a nested configuration one by one, so that equal ones can be left out."""
    flattened: dict[str, Any] = {}
    for name, value in facts.items():
        inner = flat(value) if isinstance(value, dict) else {}
        flattened |= {f"{name}.{each}": it for each, it in inner.items()} or {name: value}
    return flattened


def summary(screen: Screen, lines: Sequence[KernelLine]) -> str:
    kernel_store = store.default()
    in_store, failed = sum(line.in_store for line in lines), sum(bool(line.error) for line in lines)
    lost = [line for line in lines if line.kernel is not None and not line.about]
    words = [f"{in_store} already there", f"{len(lines) - in_store - failed} built now"]
    words += [f"{failed} cannot be built"] * bool(failed)
    counts = f"{len(lines)} kernel{'s' * (len(lines) != 1)}: {', '.join(words)}"
    if lost:
        why = kernel_store.distrusted() or "see the warning above"
        return f"{counts}; {len(lost)} cannot be kept in {kernel_store.folder}: {why}"
    return f"{counts}; kept in {kernel_store.folder}"


def cannot(screen: Screen, targets: Sequence[Target], refused: dict[str, str]) -> int:
    why = [no_kernels(target) for target in targets] if not refused else without_kernels(refused)
    if screen.json:
        screen.emit_json({**json_heading(targets, CANNOT_JUDGE), "why": why, "kernels": []})
    else:
        for text in [*why, *(["nothing to build: name another --problem, --backend or --arch"] if refused else [])]:
            screen.line(text, err=True)
    return CANNOT_JUDGE


def json_heading(targets: Sequence[Target], code: int) -> dict[str, Any]:
    return heading("compile", code, archs=[target.name for target in targets])


def as_json(
    lines: Sequence[KernelLine], targets: Sequence[Target], refused: dict[str, str], code: int
) -> dict[str, Any]:
    fields = {"folder": str(store.default().folder), "refused": refused, "kernels": [line_json(x) for x in lines]}
    return {**json_heading(targets, code), **fields}


def line_json(line: KernelLine) -> dict[str, Any]:
    k, r = line.kernel, line.recipe
    return {
        "backend": line.backend, "kernel": r.name, "arch": r.target.name, "key": r.key,
        "function": r.function, "constants": dict(r.constants), "options": dict(r.options),
        "registers": k and k.registers, "spills": k and k.spills, "shared": line.shared,
        "seconds": line.about.get("seconds"), "built": k is not None and not line.in_store, "kept": bool(line.about),
        "error": line.error or None,
    }
