"""`kda explain`: what a call would run on a GPU that need not be here, and why.  Imports torch when it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kda.model.problem import Problem
from kda.routing.dispatch import Choice
from kda.tools.measure.shapes import MODELS, SHAPES, BenchShape
from ptxkit.commands.options import ARCH
from ptxkit.commands.render import FINDING, OK, Screen, common_options, heading
from ptxkit.compile.target import Target

from .options import BACKEND, backend_in_force

if TYPE_CHECKING:
    from kda.calls.rehearsal import Explanation

WITHOUT, WITH = "without gradients", "with gradients"
STATES = "disable_recompute=states"
FUNCTIONS = ("chunk_kda", "fused_recurrent_kda", "decode_step")
NAMES = (*SHAPES, *MODELS)


def completed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names that a word may become, for a shell."""
    return [name for name in (*FUNCTIONS, *NAMES) if name.startswith(incomplete)]


@click.command()
@click.argument("words", metavar="WORDS...", nargs=-1, required=True, shell_complete=completed)
@click.option("--arch", type=ARCH, help="The GPU to ask about, an arch or a card.  [default: this machine]")
@click.option("--backend", type=BACKEND, help="Name a backend, as in backend=...; left out, the fastest that accepts.")
@click.option("--verbose", "-v", is_flag=True, help="Print the reasons of every direction.")
@common_options
def command(screen: Screen, words: tuple[str, ...], arch: Target | None, backend: str | None, verbose: bool) -> int:
    """Say what a call would run, and why: backend, kernels, what is saved, and what ran on a GPU as it is.

    WORDS describe a call, as in "chunk_kda B1 T8192 H64 softplus bf16", or name a shape of `kda bench --list` or a
    model, such as kimi-linear.  `forward` leaves out the call with gradients, `backward` the one without.  No GPU is
    needed.  Exits with 1 if no backend accepts the call.
    """
    given = [word for text in words for word in text.replace(",", " ").split()]
    named = list(dict.fromkeys(word for word in given if word in NAMES))
    if len(named) > 1:
        raise click.UsageError(f"{named[0]} and {named[1]} are both names of a call; leave one out")
    try:
        states = STATES in given                                               # a Problem does not know that value
        others = " ".join(word for word in given if word not in (*NAMES, STATES))
        said = Problem.fields_in(others, also=NAMES, once=True)
        if said.get("op") == "decode" and named and named[0] in SHAPES:
            raise click.UsageError(f"{named[0]} is a shape of chunk_kda: give decode_step sizes, or a model")
        in_name = Problem.fields_in(" ".join(map(in_words, named)))
        problem = Problem.of_fields(Problem.defaults_in(others) | in_name | said)
    except ValueError as error:
        names = f"; shapes of `kda bench --list`; models: {', '.join(MODELS)}" if "Known: " in str(error) else ""
        raise click.UsageError(f"{error}{names}") from None
    if arch and said.get("device") == "cpu":
        raise click.UsageError(f"'cpu' and --arch {arch.name} name two machines: leave one out")
    problem = here(problem, "device" in said) if arch is None else problem
    if problem.beta_per_value and problem.op != "recurrent":
        raise click.UsageError(f"`{problem.op}` has no `beta_per_value`: leave one out")
    if problem.direction == "backward" and (problem.intermediate_states or problem.slots):
        what = "intermediate_states" if problem.intermediate_states else "slots"
        raise click.UsageError(f"a call with {what} records no gradients, so it has no backward: leave one out")
    try:
        found = explanations(problem, given, backend or backend_in_force(), arch, states)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise click.UsageError(f"no memory has tensors of such sizes: {problem}") from None
    code = FINDING if any(refused(each) for each in found.values()) else OK
    screen.answer(as_json(found, problem, arch, code), lines(screen, found, verbose, backend))
    return code


def here(problem: Problem, named: bool) -> Problem:
    """Return the problem on this machine, whose CPU runs it if there is no GPU."""
    import torch

    from kda.model.host import stand_in

    if problem.device == "cpu" or torch.cuda.is_available() or stand_in():
        return problem
    if named:
        raise click.UsageError(f"this machine has no GPU for {problem.device!r}: name one by --arch, or leave it out")
    return dataclasses.replace(problem, device="cpu")


def in_words(word: str) -> str:
    """Return the words of a named shape or model."""
    if word in SHAPES:
        return words_of(SHAPES[word])
    return f"H={MODELS[word].heads} bfloat16 {MODELS[word].gate} dt_bias l2norm beta=sigmoid"


def words_of(shape: BenchShape) -> str:
    tokens = f"N={len(shape.lengths)} packed T={shape.tokens}" if shape.lengths else f"B={shape.B} T={shape.T}"
    gate = "given g_dtype=float32" if shape.gate == "given" else f"{shape.gate} dt_bias"
    heads = f"H={shape.H}" + f" HV={shape.heads}" * (shape.heads != shape.H)
    return (f"{tokens} {heads} K={shape.K} V={shape.V} {shape.dtype} {gate} l2norm beta=sigmoid "
            "final_state")


def explanations(
    problem: Problem, words: Sequence[str], backend: str, arch: Target | None, states: bool
) -> dict[str, Explanation]:
    from kda.calls.rehearsal import explain_problem

    if problem.op != "chunk" or problem.slots or problem.checkpoints:
        return {WITHOUT: explain_problem(problem, backend, arch)}
    ways = {WITHOUT: False, WITH: True}
    if "forward" in words or problem.intermediate_states:
        del ways[WITH]
    elif problem.direction == "backward":
        del ways[WITHOUT]
    return {way: explained(problem, training, backend, arch, states) for way, training in ways.items()}


def explained(
    problem: Problem, training: bool, backend: str, arch: Target | None, states: bool = False
) -> Explanation:
    """Return what `kda.explain` says of such a call, whose tensors have no memory."""
    import torch

    import kda

    given = tensors_of(problem, training) | options_of(problem)
    if states:
        given["disable_recompute"] = "states"
    with torch.enable_grad():
        return kda.explain(**given, backend=backend, arch=arch and arch.name)


def tensors_of(p: Problem, training: bool) -> dict[str, Any]:
    import torch

    def empty(*shape: int, dtype: str = "float32", grad: bool = training) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=grad)

    rows, channels = (p.B, p.T), () if p.gate_per_head else (p.K,)
    optional = {
        "A_log": empty(p.HV) if p.A_log else None, "dt_bias": empty(p.HV * p.gate_width) if p.dt_bias else None,
        "initial_state": empty(p.N, *p.state_shape, dtype=p.state_dtype) if p.state_dtype else None,
        "cu_seqlens": empty(p.N + 1, dtype="int64", grad=False) if p.packed else None,
    }
    return {
        "q": empty(*rows, p.H, p.K, dtype=p.dtype), "k": empty(*rows, p.H, p.K, dtype=p.dtype),
        "v": empty(*rows, p.HV, p.V, dtype=p.dtype), "g": empty(*rows, p.HV, *channels, dtype=p.g_dtype),
        "beta": empty(*rows, p.HV, dtype=p.beta_dtype),
    } | {name: tensor for name, tensor in optional.items() if tensor is not None}


def options_of(p: Problem) -> dict[str, Any]:
    return {
        "scale": p.scale, "lower_bound": p.lower_bound, "chunk_size": p.C, "output_final_state": p.final_state,
        "use_qk_l2norm_in_kernel": p.qk_l2norm, "use_gate_in_kernel": p.gate != "given",
        "use_beta_sigmoid_in_kernel": p.beta != "given", "allow_neg_eigval": p.beta == "2*sigmoid",
        "disable_recompute": p.disable_recompute, "return_intermediate_states": p.intermediate_states,
        "state_v_first": p.state_v_first, "batch_invariant": p.batch_invariant,
    }


# ---------------------------------------------------------------------------------------------- printing


def refused(found: Explanation) -> bool:
    return found.backend is None or (found.backward is not None and found.backward.backend is None)


def lines(screen: Screen, found: dict[str, Explanation], verbose: bool, named: str | None) -> list[str]:
    """Return what runs in each way, and then why: the reasons of a direction once, unless they differ."""
    out: list[str] = []
    why: dict[Any, str] = {}
    for way, each in found.items():
        mark = screen.mark("fail" if refused(each) else "ok")
        parts = (f"  {part}" for part in (*each.planned, *each.notes, *each.ran))
        out += [f"{mark} {way}: {taken(each, named)}", *parts, ""]
        for choice in filter(None, (each.forward, each.backward)):
            why.setdefault((way, choice.problem) if verbose else choice.tried, str(choice))
    return [*out, *(line for text in why.values() for line in text.splitlines())]


def taken(found: Explanation, named: str | None) -> str:
    """Return the backends of both directions; only that the named one refuses the call, if it does."""
    none = f"{named} does not accept it" if named else "no backend accepts it"
    if named and found.backend is None:
        return none
    forward = found.backend or none
    backward = forward if found.backward is None else found.backward.backend or "no backend accepts it"
    return forward if forward == backward else f"forward {forward}, backward {backward}"


def as_json(found: dict[str, Explanation], problem: Problem, arch: Target | None, code: int) -> dict[str, Any]:
    return heading("explain", code, problem=str(problem), arch=arch and arch.name, calls=[
        {"gradients": way == WITH, "forward": choice_json(each.forward),
         "backward": each.backward and choice_json(each.backward), "notes": list(each.notes),
         "planned": [{"backend": p.backend, "direction": p.direction, "form": p.form, "kernels": list(p.kernels)}
                     for p in each.planned],
         "ran": [ran._asdict() for ran in each.ran]}
        for way, each in found.items()
    ])


def choice_json(choice: Choice) -> dict[str, Any]:
    return {"backend": choice.backend, "host": str(choice.host),
            "rejections": {name: list(reasons) for name, reasons in choice.tried if reasons}}
