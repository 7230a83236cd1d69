"""Where something is wrong, in words: the worst place, and the shape of all wrong places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kda.model.stages import SHAPES

from .cases import Case
from .layout import ChunkLayout

Tensor = torch.Tensor

PER_SEQUENCE = ("h0", "ht", "dh0", "dht")
PER_HEAD = ("dA_log", "ddt_bias")
COLUMNS = {"(C, K)": "k", "(C, V)": "v", "(C, C)": "col"}


def has_rows(name: str) -> bool:
    return SHAPES[name].startswith("(C")


def axes_of(name: str) -> tuple[str, str]:
    """Return names for the last two axes of a stage's tensor; "" for an axis without a meaning."""
    if has_rows(name):
        return "row", COLUMNS.get(SHAPES[name], "")
    return ("", "k") if SHAPES[name] == "(K)" else ("k", "v")


def place(name: str, index: tuple[int, ...] | None, case: Case, whole: bool) -> dict[str, int]:
    """{"seq": 0, "chunk": 1, "head": 3, "row": 2, "k": 64}; `whole`: an element of a call's results, not a stage's."""
    if index is None:
        return {}
    layout = case.layout
    if name in PER_HEAD:
        flat = index[-1]
        if not whole:
            return dict(zip(("head", "k"), index))
        return {"head": flat} if name == "dA_log" else {"head": flat // case.spec.K, "k": flat % case.spec.K}
    if name in PER_SEQUENCE:
        return dict(zip(("seq", "head", "k", "v"), index))
    if not whole:
        piece = layout.pieces[index[0]]
        within = {axis: i for axis, i in zip(axes_of(name), index[2:]) if axis}
        return {"seq": piece.seq, "chunk": piece.chunk, "head": index[1], **within}
    token = index[0] * case.spec.shape[1] + index[1]
    column = {COLUMNS[SHAPES[name]]: index[3]} if len(index) > 3 else {}
    for piece in layout.pieces:
        if piece.start <= token < piece.start + piece.rows:
            return {"seq": piece.seq, "chunk": piece.chunk, "head": index[2], "row": token - piece.start, **column}
    return {"token": token, "head": index[2], **column}


def pattern(name: str, wrong: Tensor, case: Case, whole: bool) -> str:
    """Return one sentence on the wrong places, if they fill a simple box; "" if they do not."""
    layout = case.layout
    if not wrong.any() or name in PER_HEAD or wrong.dim() != 4:
        return ""
    total = int(wrong.sum())
    if total == 1:
        return "A single element is wrong."
    if whole and name not in PER_SEQUENCE:
        heads = wrong.shape[2]
        wrong = layout.chunk(wrong.reshape(layout.tokens, heads, -1).to(torch.uint8)).bool()
        if not wrong.any():
            return "Only tokens of no sequence are wrong."
    axes = axes_of(name)
    hit = [wrong.any(dim=tuple(d for d in range(4) if d != axis)).nonzero().flatten().tolist() for axis in range(4)]
    if name in PER_SEQUENCE:
        where = run("seq", hit[0], wrong.shape[0], "every sequence")
    else:
        where = chunks(hit[0], layout, hit[2][0] if has_rows(name) else 0)
    if axes[1] == "col" and not (wrong & ~torch.eye(layout.C, dtype=torch.bool)).any():
        return f"Wrong: {', '.join(filter(None, ('the diagonal', run('head', hit[1], wrong.shape[1]), where)))}."
    words = [
        run("head", hit[1], wrong.shape[1]),
        *(run(a, hit[i], wrong.shape[i]) for i, a in enumerate(axes, 2) if a),
        where,
    ]
    box = wrong[hit[0]][:, hit[1]][:, :, hit[2]][:, :, :, hit[3]]
    if has_rows(name):
        box = box[layout.valid[hit[0]][:, :, hit[2]].expand(box.shape)]       # rows past the end are never wrong
    if None in words or int(box.sum()) < 0.2 * box.numel():
        return f"{total} elements are wrong, in no simple shape."
    return f"Wrong: {', '.join(filter(None, words))}."


def run(axis: str, hit: Sequence[int], size: int, all_: str = "") -> str | None:
    """ "" for all of an axis, words for a simple part of it, None for any other."""
    first, last = hit[0], hit[-1]
    if len(hit) == size:
        return all_
    if len(hit) == 1:
        return f"{axis} {first}"
    if len(hit) == last - first + 1:
        return f"{axis} {first}..{last}"
    steps = {b - a for a, b in zip(hit, hit[1:])}
    if len(steps) == 1 and len(hit) > 2:
        return f"one {axis} in {steps.pop()} from {first}"
    return f"{axis} {', '.join(map(str, hit))}" if len(hit) <= 4 else None


def chunks(hit: Sequence[int], layout: ChunkLayout, row: int) -> str | None:
    """Return the chunks of `hit` in words, among those that have the row."""
    pieces = layout.pieces
    last = {group[-1] for group in layout.chunks_of if group}
    shapes = {
        "every chunk": lambda i: True,
        "the first chunk of every sequence": lambda i: pieces[i].chunk == 0,
        "every chunk but the first of its sequence": lambda i: pieces[i].chunk > 0,
        "the last chunk of every sequence": lambda i: i in last,
        "every chunk but the last of its sequence": lambda i: i not in last,
        "short chunks": lambda i: pieces[i].rows < layout.C,
        "every second chunk": lambda i: pieces[i].chunk % 2 == 1,
    }
    if len(hit) == 1 and len(pieces) > 1:
        return f"seq {pieces[hit[0]].seq} chunk {pieces[hit[0]].chunk}"
    for words, inside in shapes.items():
        if list(hit) == [i for i in range(len(pieces)) if inside(i) and pieces[i].rows > row]:
            return words
    return ", ".join(f"seq {pieces[i].seq} chunk {pieces[i].chunk}" for i in hit) if len(hit) <= 3 else None
