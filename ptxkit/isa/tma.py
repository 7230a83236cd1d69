"""cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, their prefetch; tensormap.replace and tensormap.cp_fenceproxy."""

from ptxkit.isa import copies
from ptxkit.isa.common import ALIGNED, Op, one_of
from ptxkit.isa.copies import GROUP, HINT, MBARRIER, MULTICAST, PLAIN, REDUCTIONS, SPACES, needs, operands_of
from ptxkit.isa.fields import TENSORMAP_COPY, TENSORMAP_REPLACE, TMA_LOAD, TMA_PREFETCH, TMA_STORE
from ptxkit.ptx.syntax import Immediate

RANKS = {f"{n}d": n for n in range(1, 6)}
# 1: four rows, each with a coordinate of its own; 2: pixels, one after the other
TILE, ROWS, PIXELS = 0, 1, 2
MODES = {"tile": TILE, "tile::gather4": ROWS, "tile::scatter4": ROWS, "im2col": PIXELS, "im2col_no_offs": PIXELS}
PAIRS = {"cta_group::1": 0, "cta_group::2": 1}
LOAD, STORE = {("shared::cta", "global"), ("shared::cluster", "global")}, {("global", "shared::cta")}


def map_place(b, operand):
    """Return the place of a tensor map, by its generic address."""
    if b.space_of(operand) not in (None, "global"):
        b.fail(f"a tensor map named by a .{b.space_of(operand)} symbol", "its generic address, as cvta gives it")
    return copies.place(b, operand)


def _coordinates(b, operands, rank, mode):
    """Return the coordinates, and the offsets of im2col if it has them."""
    given, offsets = operands["map"].coordinates, []
    wanted, which = (5, "{column, row, row, row, row}") if mode == ROWS else (rank, "one for each dimension")
    if len(given) != wanted:
        b.fail(f"{len(given)} coordinates", f"{wanted}: {which}")
    registers = [b.value(each, "s32") for each in given]
    if "offsets" in operands:
        offsets = getattr(operands["offsets"], "items", ())
        if len(offsets) != rank - 2:
            b.fail(f"{len(offsets)} im2col offsets", f"{rank - 2}: one for each dimension but the first and the last")
    return registers + [b.value(each, "b16") for each in offsets]


def lower_tensor(b, ins):
    needs(b, 90, "a tensor copy")
    parts = set(ins.parts)
    if any(p.startswith("im2col::w") for p in parts):
        b.fail("im2col::w copies are not simulated", ", ".join(MODES))
    rank, mode = one_of(ins.parts, RANKS), one_of(ins.parts, MODES, TILE)
    if rank is None:
        b.fail("the number of dimensions is missing", ", ".join(RANKS))
    if mode == PIXELS and rank < 3:
        b.fail(f".{rank}d with im2col", ".3d, .4d, .5d")
    if mode == ROWS:
        needs(b, 100, ".tile::gather4 or .tile::scatter4")
        if rank != 2:
            b.fail(f".{rank}d with gather4 or scatter4", ".2d")
    direction = tuple(p for p in ins.parts if p in SPACES)
    if "prefetch" in parts:
        return _lower_prefetch(b, ins, rank, mode)
    if direction in LOAD and "reduce" not in parts:
        return _lower_load(b, ins, rank, mode)
    if direction in STORE:
        return _lower_store(b, ins, rank, mode)
    b.fail(f"a tensor copy {' <- '.join(direction)}", "; ".join(" <- ".join(d) for d in sorted(LOAD | STORE)))


def _lower_load(b, ins, rank, mode):
    forms = {"async", "bulk", "tensor", "tile", "tile::gather4", "im2col", MBARRIER, MULTICAST, HINT}
    copies.refuse_unknown(b, ins, forms | {*RANKS, *SPACES, *PAIRS})
    if (pair := one_of(ins.parts, PAIRS)) is not None:
        needs(b, 100, ".cta_group")
    if MBARRIER not in ins.parts:
        b.fail("a load without a way to tell that it is done", f".{MBARRIER}")
    operands = copies.loaded(b, ins, "destination", "map", "mbarrier", mode == PIXELS and "offsets")
    (to, barrier), where = copies.places(b, operands, "destination", "mbarrier")
    tensor, tensor_place = map_place(b, operands["map"])
    args = [to, tensor, barrier, copies.cta_mask(b, operands), *_coordinates(b, operands, rank, mode)]
    own_cta = "shared::cta" in ins.parts
    mods = TMA_LOAD(**where, map=tensor_place, rank=rank, mode=mode, pair=pair or 0, own_cta=own_cta)
    return Op("tma_load", args, mods)


def _lower_store(b, ins, rank, mode):
    forms = {"async", "bulk", "tensor", "reduce", "tile", "tile::scatter4", "im2col_no_offs", GROUP, HINT}
    copies.refuse_unknown(b, ins, forms | {*RANKS, *SPACES, *REDUCTIONS})
    if GROUP not in ins.parts:
        b.fail("a store without a way to tell that it is done", f".{GROUP}")
    reduces = ins.parts[1] == "reduce"
    op = one_of(ins.parts, REDUCTIONS, PLAIN)
    if reduces != (op != PLAIN):
        b.fail("a reduction without its operation, or the other way round", ", ".join(REDUCTIONS))
    if reduces and mode == ROWS:
        b.fail("a reduction with scatter4", "tile")
    operands = operands_of(b, ins, "map", "source", HINT in ins.parts and "policy")
    source, source_place = copies.place(b, operands["source"])
    tensor, tensor_place = map_place(b, operands["map"])
    args = [source, tensor, *_coordinates(b, operands, rank, mode)]
    return Op("tma_store", args, TMA_STORE(source=source_place, map=tensor_place, rank=rank, mode=mode, op=op))


def _lower_prefetch(b, ins, rank, mode):
    forms = {"async", "bulk", "prefetch", "tensor", "L2", "global", "tile", "tile::gather4", "im2col", HINT}
    copies.refuse_unknown(b, ins, forms | {*RANKS})
    operands = operands_of(b, ins, "map", mode == PIXELS and "offsets", HINT in ins.parts and "policy")
    tensor, tensor_place = map_place(b, operands["map"])
    args = [tensor, *_coordinates(b, operands, rank, mode)]
    return Op("tma_prefetch", args, TMA_PREFETCH(map=tensor_place, rank=rank, mode=mode))


# ---- tensormap

# field -> (the engine's number, dimensions it is given for, bits, least, most, multiple of)
FIELDS = {
    "global_address": (0, 0, 64, 0, (1 << 64) - 1, 16),
    "rank": (1, 0, 32, 0, 4, 1),  # one less than the rank
    "elemtype": (2, 0, 32, 0, 15, 1),
    "interleave_layout": (3, 0, 32, 0, 0, 1),
    "swizzle_mode": (4, 0, 32, 0, 4, 1),
    "global_dim": (5, 5, 32, 1, (1 << 32) - 1, 1),
    "global_stride": (6, 4, 64, 0, (1 << 40) - 1, 16),
    "box_dim": (8, 5, 32, 1, 256, 1),
    "element_stride": (9, 5, 32, 1, 8, 1),
    "swizzle_atomicity": (10, 0, 32, 0, 3, 1),
    "fill_mode": (11, 0, 32, 0, 1, 1),
}
MAP_SPACES = {"global": 1, "shared": 2, "shared::cta": 2}


def lower_tensormap(b, ins):
    needs(b, 90, "tensormap")
    forms = {"replace": _lower_replace, "cp_fenceproxy": _lower_copy}
    if ins.parts[1] not in forms:
        b.fail(f"no tensormap.{ins.parts[1]}", ", ".join(forms))
    return forms[ins.parts[1]](b, ins)


def _lower_replace(b, ins):
    copies.refuse_unknown(b, ins, {"replace", "tile", "b1024", "b32", "b64", *FIELDS, *MAP_SPACES})
    if (name := next((p for p in ins.parts if p in FIELDS), None)) is None:
        b.fail("no field", ", ".join(FIELDS))
    number, dimensions, bits, least, most, multiple = FIELDS[name]
    if ins.parts[-1] != f"b{bits}":
        b.fail(f".{ins.parts[-1]} for {name}", f".b{bits}")
    if name == "swizzle_atomicity":
        needs(b, 100, ".swizzle_atomicity")
    operands = operands_of(b, ins, "address", dimensions and "dimension", "value")
    ordinal = operands.get("dimension", Immediate(0, None, "0"))
    if not isinstance(ordinal, Immediate) or not 0 <= int(ordinal.value) < max(dimensions, 1):
        b.fail(f"dimension {getattr(ordinal, 'text', ordinal)} of {name}", f"an immediate from 0 to {dimensions - 1}")
    address, where = copies.place(b, operands["address"])
    mods = TENSORMAP_REPLACE(
        map=where, space=one_of(ins.parts, MAP_SPACES, 0), field=number, dimension=int(ordinal.value), least=least,
        most=most, wide=bits == 64, multiple=multiple,
    )
    return Op("tensormap_replace", [address, b.value(operands["value"], f"b{bits}")], mods)


def _lower_copy(b, ins):
    forms = {"cp_fenceproxy", "global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"}
    copies.refuse_unknown(b, ins, forms | {"cta", "cluster", "gpu", "sys"})
    operands = operands_of(b, ins, "destination", "source", "size")
    if not isinstance(operands["size"], Immediate) or int(operands["size"].value) != 128:
        b.fail(f"{getattr(operands['size'], 'text', operands['size'])} bytes", "128")
    registers, where = copies.places(b, operands, "destination", "source")
    return Op("tensormap_copy", registers, TENSORMAP_COPY(**where), ALIGNED)


ALL_FORMS = copies.FORMS | {
    ("async", "bulk", "tensor"): lower_tensor,
    ("async", "bulk", "prefetch", "tensor"): lower_tensor,
    ("reduce", "async", "bulk", "tensor"): lower_tensor,
}


def lower_cp(b, ins):
    for length in (4, 3, 2):
        form = ins.parts[1 : 1 + length]
        if len(form) == length and form in ALL_FORMS:
            return ALL_FORMS[form](b, ins)
    b.fail("no such copy", ", ".join(".".join(("cp", *form)) for form in ALL_FORMS))


LOWERINGS = {"cp": lower_cp, "tensormap": lower_tensormap}
