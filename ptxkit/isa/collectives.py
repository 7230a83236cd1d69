"""shfl, vote, match, redux, elect, activemask: what the lanes of a warp do together."""

from ptxkit.isa.common import SYNC, Op, exists_from, operands, registers
from ptxkit.isa.fields import MATCH, MEMBERS, REDUX, SHFL, VOTE
from ptxkit.ptx.syntax import Pair

# modifier -> the engine's number
SHFL_MODES = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
VOTE_MODES = {"all": 0, "any": 1, "uni": 2, "ballot": 3}
REDUX_OPS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5}
REDUX_TYPES = {"u32": 0, "b32": 0, "s32": 1, "f32": 2}
REDUX_FORMS = {  # type -> the operations that take it
    "u32": ("add", "min", "max"),
    "s32": ("add", "min", "max"),
    "b32": ("and", "or", "xor"),
    "f32": ("min", "max"),
}


def _sync(b, ins):
    if "sync" not in ins.parts:
        b.fail(f"{ins.parts[0]} without .sync is gone since sm_70", f"{ins.parts[0]}.sync with a mask of lanes")


def _form(b, ins, *choices):
    """Return the modifiers after `sync`, one from each of the choices in their order."""
    given = tuple(p for p in ins.parts[1:] if p != "sync")
    if len(given) != len(choices) or any(p not in choice for p, choice in zip(given, choices)):
        forms = " and ".join(f"one of .{{{', '.join(choice)}}}" for choice in choices)
        b.fail(f"modifiers {'.'.join(given)}", forms)
    return given


def _results(b, operand):
    """Return the offsets of the register and of the predicate that `d|p`, or d alone, names."""
    if isinstance(operand, Pair):
        return [b.target(operand.first, "b32"), b.target(operand.second, "pred")]
    return [b.target(operand, "b32"), -1]


def lower_shfl(b, ins):
    _sync(b, ins)
    mode, _ = _form(b, ins, SHFL_MODES, ("b32",))
    target, *sources = operands(b, ins, "d|p", "a", "b", "c", "membermask")
    args = [*_results(b, target), *(b.value(s, "b32") for s in sources)]
    return Op("shfl", args, SHFL(members=MEMBERS(mask=5), mode=SHFL_MODES[mode]), SYNC)


def lower_vote(b, ins):
    _sync(b, ins)
    ballot = "ballot" in ins.parts
    mode, _ = _form(b, ins, VOTE_MODES, ("b32",) if ballot else ("pred",))
    target, source, mask = operands(b, ins, "d", "{!}a", "membermask")
    predicate, negated = b.predicate(source)
    args = [b.target(target, "b32" if ballot else "pred"), predicate, b.value(mask, "b32")]
    return Op("vote", args, VOTE(members=MEMBERS(mask=2), mode=VOTE_MODES[mode], negated=negated), SYNC)


def lower_match(b, ins):
    _sync(b, ins)
    mode, type_ = _form(b, ins, ("any", "all"), ("b32", "b64"))
    target, source, mask = operands(b, ins, "d", "a", "membermask")
    if isinstance(target, Pair) and mode == "any":
        b.fail("match.any gives no predicate", "match.all with d|p")
    args = [*_results(b, target), b.value(source, type_), b.value(mask, "b32")]
    mods = MATCH(members=MEMBERS(mask=3), all=mode == "all", wide=type_ == "b64")
    return Op("match", args, mods, SYNC)


def lower_redux(b, ins):
    _sync(b, ins)
    given = [p for p in ins.parts[1:] if p != "sync"]
    operation, *flags, type_ = given if len(given) > 1 else ("", "")
    known_flags = ("abs", "NaN") if type_ == "f32" else ()
    if operation not in REDUX_FORMS.get(type_, ()) or not all(flag in known_flags for flag in flags):
        forms = "; ".join(f".{{{', '.join(operations)}}}.{t}" for t, operations in REDUX_FORMS.items())
        b.fail(f"modifiers {'.'.join(ins.parts[1:])}", f"{forms}; with f32 also .abs and .NaN")
    if type_ == "f32" and b.arch not in (100, 103):
        b.fail(f"redux.sync of f32 does not exist on sm_{b.arch}", "sm_100a, sm_103a")
    args = registers(b, ins, d=f"={type_}", a=type_, membermask="b32")
    kind = {"op": REDUX_OPS[operation], "type": REDUX_TYPES[type_], "abs": "abs" in flags, "nan": "NaN" in flags}
    return Op("redux", args, REDUX(members=MEMBERS(mask=2), **kind), SYNC)


def lower_elect(b, ins):
    _sync(b, ins)
    _form(b, ins)
    exists_from(b, 90, "elect.sync")
    target, mask = operands(b, ins, "d|p", "membermask")
    if not isinstance(target, Pair):
        b.fail("one result", "d|p, membermask")
    return Op("elect", [*_results(b, target), b.value(mask, "b32")], MEMBERS(mask=2), SYNC)


def lower_activemask(b, ins):
    _form(b, ins, ("b32",))
    return Op("activemask", registers(b, ins, d="=b32"))


LOWERINGS = {
    "shfl": lower_shfl, "vote": lower_vote, "match": lower_match, "redux": lower_redux, "elect": lower_elect,
    "activemask": lower_activemask,
}
