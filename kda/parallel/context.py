"""The context of a call on several ranks: which rank has which part of a row of packed sequences."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kda.checks.calls import is_finite, is_number, number
from kda.errors import InputError, InputTypeError, KdaError, in_words
from kda.model.offsets import ASKED, FIX, bad_offsets

from .agreement import Ask, group_of
from .layout import LAYOUTS, Local, RankPart, crosses, edges_of, equal_edges, local_of, part_numbers

Tensor = torch.Tensor

EXCHANGES = ("gather", "chain", "tree", "hops")

_numbers = itertools.count()
_contexts: weakref.WeakValueDictionary[int, CPContext] = weakref.WeakValueDictionary()
_adopted: dict[int, tuple[weakref.ref, CPContext]] = {}              # for FLA's contexts, by their id


class CPContext:
    """What `build_cp_context` returns: the local view of a rank, with FLA's names where FLA has one.

    group, rank, world_size: the ranks.  layout, exchange, conv1d_kernel_size: as requested.
    cu_seqlens, cu_seqlens_cpu: (N + 1,) offsets of this rank's sequences, int32; the first may have begun on an
        earlier rank, and the last may continue on a later one.
    tokens: their number on this rank.  lengths: of all parts.  parts: of this rank (`layout.Part`).
    """

    def __init__(self, group: dist.ProcessGroup, local: Local, lengths: Sequence[int], device: torch.device,
                 layout: str, exchange: str, crosses: bool, timeout: float,
                 conv1d_kernel_size: int | None = None, agreed: int = 0):
        self._group = weakref.ref(group)     # it ends with destroy_process_group, whoever has a context still
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.layout, self.exchange, self.crosses, self.timeout = layout, exchange, crosses, timeout
        self.conv1d_kernel_size, self.agreed = conv1d_kernel_size, agreed      # the round in which it was built
        self.parts, self.lengths, self.tokens = local.parts, tuple(lengths), local.parts[-1].end
        self.num_seqs, self.num_parts = len(local.offsets) - 1, len(local.parts)
        self.cu_seqlens_cpu = torch.tensor(local.offsets, dtype=torch.int32, device="cpu")
        self.cu_seqlens = on(device, self.cu_seqlens_cpu)
        self.places: dict[Any, Any] = {}     # where `halo` keeps its places, once computed
        number = next(_numbers)
        self.handle = torch.tensor(number, device="cpu")     # passed to operators: no graph is specialised to a context
        self.handle.context = self  # type: ignore[attr-defined]  # alive as long as a backward that saved its handle
        _contexts[number] = self

    def __repr__(self) -> str:
        return (f"CPContext(rank {self.rank} of {self.world_size}, {self.layout}, {self.tokens} tokens, "
                f"{self.num_seqs} sequences, exchange={self.exchange!r})")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; None once it was destroyed."""
        return self._group()

    pre_num_ranks = property(lambda c: _scalar(c, len(c.parts[0].before)))
    post_num_ranks = property(lambda c: _scalar(c, len(c.parts[0].after)))
    is_first_rank = property(lambda c: _scalar(c, not c.parts[0].before))
    is_last_rank = property(lambda c: _scalar(c, not c.parts[0].after))
    pre_num_conv_tokens = property(lambda c: _scalar(c, c.parts[0].past))


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on(device: torch.device, x: Tensor) -> Tensor:
    """A copy on a GPU, for which no call waits."""
    if capturing(device):                                                      # a graph reads the pinned copy later
        raise KdaError("kda.parallel: a context and the places of its halo are made before a CUDA graph is captured; "
                       "found a capture. Make the same calls once before it.")
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _scalar(c: CPContext, value: Any) -> Any:
    """Return what FLA's context has: a number for a contiguous layout, else None."""
    return value if c.layout == "contiguous" else None


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup | None = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    *,
    lengths: Sequence[int] | None = None,
    exchange: str = "gather",
    timeout: float | None = None,
) -> CPContext:
    """The context for `kda.chunk_kda(..., cp_context=...)`; has the arguments of FLA's function of this name, and more.

    All ranks of the group call it together, with equal arguments, and each gets its own view. If `cu_seqlens` is on a
    GPU and `cu_seqlens_cpu` is left out, this function waits for that GPU; calls with the context never do.

    Args:
        cu_seqlens: (N + 1,) int32 or int64, offsets of the packed sequences in the whole row of all ranks.
        group: of torch.distributed; None is the world.
        conv1d_kernel_size: of the preceding convolution, for `conv_halo`.
        cu_seqlens_cpu: a copy on the CPU.
        use_tf32x3_affine_chain: accepted without effect: maps are folded in float64, independent of torch's flags.
        layout: "contiguous": rank r holds part r of W equal ones; "zigzag": parts r and 2W - 1 - r of 2W.
        lengths: the number of tokens of each rank, possibly zero, for a contiguous layout with unequal parts. Tokens
            past the last offset belong to no sequence, as in chunk_kda.
        exchange: for a contiguous layout; a zigzag layout uses "gather". "gather": one all-gather of the parts' maps
            per direction. "chain": states go from rank to rank through the maps, with the fewest bytes. "tree": maps
            are composed in log2 W steps, for very many ranks. "hops": no maps; each rank waits for the previous one:
            slow, but with the bits of one process, given `batch_invariant` and cuts at multiples of the chunk, with
            an exception (docs/parallel.md).
        timeout: seconds to wait for missing ranks; None is the time-out of the group's store.

    Returns:
        CPContext, whose `tokens` is the length of this rank's rows and whose `cu_seqlens` are this rank's offsets.

    Raises:
        InputError: an argument is invalid, or ranks passed different arguments (then on all ranks).
        RankLost: not all ranks called within the time-out.
    """
    op = "build_cp_context"
    group = _group(op, group)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if layout not in LAYOUTS:
        raise InputError(op, "layout", _either(LAYOUTS), repr(layout), "Pass one of them, or leave it out.",
                         "cp_layout.value")
    if exchange not in EXCHANGES or (exchange != "gather" and layout == "zigzag"):
        raise InputError(op, "exchange", _either(EXCHANGES) + '; with a zigzag layout only "gather"',
                         f"{exchange!r} with a {layout} layout", 'Leave it out for "gather".',
                         "cp_exchange.value")
    conv1d_kernel_size, timeout = number(conv1d_kernel_size), number(timeout)
    if conv1d_kernel_size is not None and not (is_number(conv1d_kernel_size, int) and conv1d_kernel_size > 0):
        raise InputError(op, "conv1d_kernel_size", "an int of at least 1, or None", in_words(conv1d_kernel_size),
                         "Pass the number of tokens that the convolution reads.", "cp_conv.value")
    if timeout is not None and not (is_number(timeout, int, float) and is_finite(timeout) and timeout > 0):
        raise InputError(op, "timeout", "a positive number of seconds, or None", in_words(timeout),
                         "None means the time-out of the group's store.", "cp_timeout.value")
    offsets = _offsets(op, cu_seqlens, cu_seqlens_cpu)
    edges = _edges(op, offsets, lengths, layout, world)
    found = bad_offsets(offsets, edges[-1])
    if found is not None:
        raise InputError(op, "cu_seqlens", ASKED + f", the {edges[-1]} tokens of all ranks", found, FIX,
                         "cp_offsets.values")
    joined = group_of(group)
    timeout = joined.store.timeout.total_seconds() if timeout is None else timeout  # type: ignore[attr-defined]
    text = f"{world} ranks, {layout}, {exchange}, convolution {conv1d_kernel_size}, edges {edges}, offsets {offsets}"
    joined.agree(text, Ask(op, "cu_seqlens", "cp_context.agreed", timeout))
    local = local_of(offsets, edges, part_numbers(layout, rank, world))
    lengths = [b - a for a, b in zip(edges, edges[1:])]
    return CPContext(group, local, lengths, cu_seqlens.device, layout, exchange, crosses(offsets, edges), timeout,
                     conv1d_kernel_size, joined.round)


def _group(op: str, group: Any) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(op, "group", "a group of torch.distributed, which must be initialised", "no process group",
                         "Call torch.distributed.init_process_group first.", "cp_group.missing")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise InputTypeError(op, "group", "a ProcessGroup that this rank is in", type(group).__name__,
                             "Pass what torch.distributed.new_group or a mesh's get_group returned.",
                             "cp_group.type")
    return group


def _either(words: Sequence[str]) -> str:
    return " or ".join(f'"{word}"' for word in words)


def _offsets(op: str, cu_seqlens: Any, cu_seqlens_cpu: Any) -> list[int]:
    source = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", source)):
        if not (isinstance(x, Tensor) and x.dim() == 1 and len(x) > 0 and x.dtype in (torch.int32, torch.int64)):
            found = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputTypeError(op, name, "[N + 1] offsets of dtype int32 or int64", found,
                                 "Pass the offsets of the packed sequences of all ranks.",
                                 "cp_offsets.type")
    offsets = source.tolist()
    beside = cu_seqlens.tolist() if cu_seqlens.device.type == "cpu" else None    # no call waits for a GPU
    if len(cu_seqlens) != len(offsets) or beside not in (None, offsets):
        raise InputError(op, "cu_seqlens_cpu", "equal to cu_seqlens",
                         f"{offsets} beside {beside or f'{len(cu_seqlens)} offsets'}", "Pass cu_seqlens.cpu().",
                         "cp_offsets.differs")
    return offsets


def _edges(op: str, offsets: list[int], lengths: Any, layout: str, world: int) -> list[int]:
    """Return where each part of the row begins, and where the last one ends."""
    if lengths is None:
        parts = world if layout == "contiguous" else 2 * world
        if offsets[-1] % parts:
            raise InputError(op, "cu_seqlens", f"offsets of a number of tokens that {parts} parts can share equally",
                             f"{offsets[-1]} tokens", "Pad the row, or pass lengths with a contiguous layout.",
                             "cp_offsets.parts")
        return equal_edges(offsets[-1], parts)
    listed = isinstance(lengths, Iterable) and not isinstance(lengths, str)
    if listed:
        lengths = [number(n) for n in (lengths.flatten().tolist() if isinstance(lengths, Tensor) else lengths)]
    good = listed and len(lengths) == world and all(is_number(n, int) and n >= 0 for n in lengths)
    if not good or layout == "zigzag":
        raise InputError(op, "lengths", f"{world} ints of 0 or more, one per rank, for a contiguous layout",
                         f"{lengths!r} for a {layout} one", "Leave it out for equal parts.",
                         "cp_lengths.value")
    return edges_of(lengths)


# contexts in the form that a call uses


def context_of(handle: Tensor) -> CPContext:
    return _contexts[int(handle)]


_OF_FLA = ("group", "cu_seqlens", "cu_seqlens_cpu", "pre_num_ranks", "post_num_ranks", "layout")


def adopt(context: Any, op: str = "chunk_kda") -> CPContext:
    """kda's own context unchanged; FLA's as one of kda's, built once."""
    if type(context) is CPContext:
        return context
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{op}: torch.compile does not trace a {type(context).__name__}. Pass "
                           "kda.parallel.adopt(cp_context), called outside the traced code.")
    if not all(hasattr(context, name) for name in _OF_FLA):
        raise InputTypeError(op, "cp_context", "a context of kda.parallel.build_cp_context or FLA's",
                             type(context).__name__, "Call kda.parallel.build_cp_context(cu_seqlens, group).",
                             "cp_context.type")
    known = _adopted.get(id(context))
    if known is None or known[0]() is not context:
        key = id(context)
        gone = weakref.ref(context, lambda ref: _adopted.pop(key, None))
        known = _adopted[key] = gone, _of_fla(op, context)
    return known[1]


def _of_fla(op: str, c: Any) -> CPContext:
    """FLA's context counts the ranks that hold parts of the first and of the last sequence; its parts are equal."""
    group = _group(op, c.group)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    offsets = (c.cu_seqlens if c.cu_seqlens_cpu is None else c.cu_seqlens_cpu).tolist()
    numbers = part_numbers(c.layout, rank, world)
    zigzag = c.layout == "zigzag"
    before = c.pre_num_ranks_by_part if zigzag else (c.pre_num_ranks,)
    after = c.post_num_ranks_by_part if zigzag else (c.post_num_ranks,)
    past = c.pre_num_conv_tokens_by_part if zigzag else (getattr(c, "pre_num_conv_tokens", None) or 0,)
    total = world * len(numbers)
    if any(n - pre < 0 or n + post >= total for n, pre, post in zip(numbers, before, after)):
        raise InputError(op, "cp_context", f"a context of a group of {world} ranks",
                         f"{max(before)} parts before and {max(after)} after those of rank {rank}",
                         "Build the context for the group that uses it.", "cp_context.world")
    rows = [0, *([c.front_num_seqs] if zigzag else []), len(offsets) - 1]
    tokens = offsets[-1] // len(numbers)
    parts = tuple(
        RankPart(n, i * tokens, (i + 1) * tokens, rows[i], rows[i + 1] - 1,
                 offsets[rows[i] + 1], offsets[rows[i + 1] - 1],
                 tuple(range(n - before[i], n)), tuple(range(n + 1, n + 1 + after[i])), past[i])
        for i, n in enumerate(numbers)
    )
    timeout = group_of(group).store.timeout.total_seconds()  # type: ignore[attr-defined]
    return CPContext(group, Local(offsets, parts), [tokens] * total, c.cu_seqlens.device, c.layout, "gather",
                     crosses=world > 1, timeout=timeout,
                     conv1d_kernel_size=getattr(c, "conv1d_kernel_size", None))
