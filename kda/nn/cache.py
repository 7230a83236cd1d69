"""The state that layers keep between calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda.checks.calls import dtype_name

from ..errors import InputError, InputTypeError

Tensor = torch.Tensor


@dataclass(frozen=True)
class LayerState:
    """The state of one layer after the last token of each of N sequences."""

    recurrent: Tensor                        # (N, HV, V, K), float32
    conv: tuple[Tensor, Tensor, Tensor]      # for q, k and v: (N, W - 1, channels), the last inputs, oldest first

    @property
    def N(self) -> int:
        return self.recurrent.shape[0]

    def select(self, sequences: Tensor) -> LayerState:
        """The states of these sequences, in this order: for beams, or if some have left the batch."""
        return LayerState(self.recurrent[sequences], tuple(x[sequences] for x in self.conv))  # type: ignore[arg-type]


class Cache:
    """The states of a model's layers, by `layer_idx`; pass it to every call, which updates it.

    A call changes no tensor that anybody else may hold, so a copy of the cache (`copy`) costs nothing and keeps the
    earlier states: a decoding step updates states in place only if it was the one that created them, and nobody has
    asked the cache for them since.
    """

    def __init__(self, states: dict[int, LayerState] | None = None):
        self._states = dict(states or {})
        self._own: dict[int, Tensor | None] = {}  # for layers whose tensors nobody else holds: what conv are views of

    def __getitem__(self, layer_idx: int) -> LayerState:
        self._own.pop(layer_idx, None)
        return self._states[layer_idx]

    def __setitem__(self, layer_idx: int, state: LayerState) -> None:
        if not isinstance(state, LayerState):
            fix = "Pass kda.nn.LayerState(recurrent, (conv_q, conv_k, conv_v))."
            raise InputTypeError("kda.nn.Cache", "a layer's state", "a LayerState", type(state).__name__, fix,
                                 "nn.cache.state")
        self._own.pop(layer_idx, None)
        self._states[layer_idx] = state

    def __repr__(self) -> str:
        batches = sorted({state.N for state in self._states.values()})
        batch = f", of {' or '.join(map(str, batches))} sequence{'s' * (batches != [1])}" if batches else ""
        return f"Cache({len(self)} layer{'s' * (len(self) != 1)}{batch})"

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self):
        return iter(self._states)

    def get(self, layer_idx: int) -> LayerState | None:
        self._own.pop(layer_idx, None)
        return self._states.get(layer_idx)

    def copy(self) -> Cache:
        self._own.clear()
        return Cache(self._states)

    __copy__ = copy

    def __getstate__(self) -> dict[str, dict[int, LayerState]]:
        """What pickle, torch.save and copy.deepcopy keep: states alone, because pickle separates views."""
        return {"_states": self._states}

    def __setstate__(self, pickled: dict[str, dict[int, LayerState]]) -> None:
        Cache.__init__(self, pickled["_states"])

    def select(self, sequences: Tensor) -> Cache:
        """The states of some sequences, in the order of their numbers (M,), or those where a mask (N,) is True.

        Numbers on a GPU are not compared with N, which would wait for the GPU.
        """
        if isinstance(sequences, (list, tuple, range)):
            sequences = torch.tensor(sequences, dtype=None if len(sequences) else torch.long, device="cpu")
        N = min((state.N for state in self._states.values()), default=None)
        if what := _no_numbers(sequences, N):
            expected = "the numbers of some sequences (M,)" + (f", from 0 to {N - 1}" if N else "")
            fix = "Pass a tensor of one axis, also for one sequence."
            raise InputError("kda.nn.Cache.select", "sequences", expected, what, fix, "nn.cache.select")
        selected = Cache({layer: state.select(sequences) for layer, state in self._states.items()})
        selected._own = dict.fromkeys(selected._states)                              # they are copies
        return selected

    def clear(self) -> None:
        self._own.clear()
        self._states.clear()

    def in_place(self, layer_idx: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A layer's recurrent states (N, HV, V, K) and its tails of q, k and v side by side (N, W - 1, C) in `dtype`,
        to be updated in place: copies if somebody else may hold the cache's tensors, or if they come from
        `torch.inference_mode`, outside of which nothing may update them."""
        state, tails = self._states[layer_idx], self._own.get(layer_idx)
        wide = torch.promote_types(dtype, torch.float32)
        fixed = _is_fixed(state.recurrent)
        if fixed or tails is None or tails.dtype != dtype or state.recurrent.dtype != wide:
            mine = layer_idx in self._own and not fixed
            recurrent = state.recurrent.detach().to(wide, copy=not mine, memory_format=torch.contiguous_format)
            tails = torch.cat(state.conv, -1).detach().to(dtype)
            state = LayerState(recurrent, tails.split([each.shape[-1] for each in state.conv], -1))  # type: ignore
            self._states[layer_idx], self._own[layer_idx] = state, tails
        return state.recurrent, tails


def state_of(
    cache: Cache | None, layer_idx: int | None, N: int, recurrent: tuple[int, ...], conv: tuple[tuple[int, int], ...],
    device: torch.device,
) -> LayerState | None:
    """The layer's state of N sequences, if there is one; of each: recurrent (HV, V, K), conv three times (W - 1, C)."""
    if cache is None:
        return None
    if layer_idx is None:
        raise InputError(
            "KimiDeltaAttention", "layer_idx", "a number, with a cache", "None",
            "Create each layer with its layer_idx=, so that it finds its own state.", "nn.layer_idx",
        )
    state = cache._states.get(layer_idx)
    if state is not None and state.N != N:
        raise InputError(
            "KimiDeltaAttention", "cache", f"a cache of {N} sequences, as in the call", f"one of {state.N}",
            "Use a new Cache() for another batch, or cache.select(numbers).", "nn.cache.sequences",
        )
    if state is not None and (state.recurrent.shape[1:] != recurrent or tuple(x.shape[1:] for x in state.conv) != conv):
        raise InputError(
            "KimiDeltaAttention", "cache", f"a cache with states {[*recurrent]} and {[*map(list, conv)]} of this layer",
            f"{[*state.recurrent.shape[1:]]} and {[[*x.shape[1:]] for x in state.conv]} of layer_idx={layer_idx}",
            "Create each layer with a layer_idx of its own, and each model's cache anew.", "nn.cache.layer",
        )
    elsewhere = [x.device for x in (state.recurrent, *state.conv) if x.device != device] if state is not None else []
    if elsewhere:
        raise InputError(
            "KimiDeltaAttention", "cache", f"a cache on {device}, as x", f"states on {elsewhere[0]}",
            "Move the states, or use a new Cache().", "nn.cache.device",
        )
    return state


def _is_fixed(x: Tensor) -> bool:
    """Whether x was created in inference mode and nothing may update it here; torch.compile traces no such question."""
    return not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()


def _no_numbers(x: object, N: int | None) -> str:
    """Why x does not number sequences, of which there are N; empty if it does."""
    if not isinstance(x, Tensor):
        return f"{type(x).__name__} {x}"
    if x.dim() != 1:
        return f"shape {list(x.shape)}"
    if x.is_floating_point() or x.is_complex():
        return dtype_name(x)
    if x.dtype == torch.bool:
        return f"a mask of {len(x)}" if N not in (None, len(x)) else ""
    if N is None or x.device.type != "cpu" or not len(x):
        return ""
    low, high = map(int, x.aminmax())
    return f"{low if low < 0 else high}" if low < 0 or high >= N else ""
