"""The layer of Kimi-Linear, Kimi-K3, GLM-5.3-Flash and Ling: projections, convolutions, gates, KDA, gated norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from kda.calls.api import chunk_kda, fused_recurrent_kda
from kda.checks.calls import bad_bound, dtype_name, is_finite, is_index, is_number, number, on_cpu, shape_of
from kda.checks.keywords import names_of, refuse_unknown
from kda.model.transforms import untransformed
from kda.routing.dispatch import check_backend_name

from ..errors import InputError
from . import checkpoints, step
from .cache import Cache, LayerState, state_of
from .convolution import ShortConvolution, next_state
from .norm import GatedRMSNorm
from .sequences import Padded, Sequences

Tensor = torch.Tensor

MODES = ("auto", "chunk", "recurrent")
_ALONE = "Leave it out: the layer returns y alone, and updates the cache that it is given."
ARGUMENTS_OF_FLA = {
    "hidden_states": "It is called x.",
    "past_key_values": "It is called cache: pass a kda.nn.Cache().",
    "use_cache": _ALONE,
    "output_attentions": _ALONE,
}
OPTIONS_OF_FLA = {
    "expand_v": "Pass head_v_dim, in channels: it is head_dim * expand_v.",
    "use_short_conv": "Leave it out: the layer has convolutions always.",
    "safe_gate": "Leave it out: lower_bound says by itself whether the gate is bounded.",
}
SHORT = 64                                   # up to so many tokens "auto" runs token by token, without gradients


class KimiDeltaAttention(nn.Module):
    """x (B, T, hidden_size) to y of the same shape, causal.

    With D = hidden_size, H heads of q and k of K = head_dim channels and HV of v of V = head_v_dim channels:

        q, k, v = silu(conv(q_proj x)), silu(conv(k_proj x)), silu(conv(v_proj x))     H K, H K, HV V
        o       = KDA(l2norm(q), l2norm(k), v, gate(f_b_proj f_a_proj x), sigmoid(b_proj x))
        y       = o_proj(rmsnorm(o) sigmoid(g_b_proj g_a_proj x))

    Args:
        hidden_size, num_heads, head_dim: D, H and K.
        num_v_heads: HV, a multiple of H; None: H.
        head_v_dim: V; None: K.
        lower_bound: of the gate: None is -exp(A_log) softplus(f + dt_bias), unbounded; a negative number is
            lower_bound sigmoid(exp(A_log) (f + dt_bias)). A checkpoint needs the bound that it was trained with.
        forget_rank, gate_rank: of f and g, which two projections compute; None: one projection of full rank, f_proj or
            g_proj. "head": head_dim for f, head_v_dim for g.
        gate_bias: a bias in g_b_proj (g_proj), which FLA has and checkpoints lack.
        allow_neg_eigval: beta is twice the sigmoid.
        conv_size, conv_bias: the width of the convolutions in tokens, and whether they have a bias.
        norm_eps: of the RMSNorm.
        layer_idx: the key of the layer's state in a cache.
        mode: "chunk", "recurrent" (token by token, no gradients) or "auto": recurrent for up to 64 tokens without
            gradients, else chunk. Up to 8 tokens that continue from a cache are one `kda.decode_step` if a backend has
            a kernel for it, unless the mode is "chunk"; `explain` says why a call is not.
        disable_recompute: keep the forward's intermediates for the backward: faster, more memory; or "states", as
            `chunk_kda`.
        backend: of kda.chunk_kda; None chooses.
        device, dtype: of the parameters; A_log (HV) and dt_bias (HV K) are always float32.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        *,
        lower_bound: float | None = None,
        forget_rank: int | str | None = "head",
        gate_rank: int | str | None = "head",
        gate_bias: bool = False,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        mode: str = "auto",
        disable_recompute: bool | str = False,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ):
        super().__init__()
        if unknown:
            refuse_unknown("KimiDeltaAttention", unknown, _OPTIONS, OPTIONS_OF_FLA)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = head_dim if head_v_dim is None else head_v_dim
        self.lower_bound, self.allow_neg_eigval = number(lower_bound), allow_neg_eigval
        self.forget_rank = head_dim if forget_rank == "head" else forget_rank
        self.gate_rank = self.head_v_dim if gate_rank == "head" else gate_rank
        self.conv_size, self.layer_idx, self.mode = conv_size, layer_idx, mode
        self.disable_recompute, self.backend = disable_recompute, backend
        flags = {"gate_bias": gate_bias, "conv_bias": conv_bias, "allow_neg_eigval": allow_neg_eigval}
        self._check_options(norm_eps, dtype, **flags)
        factory = {"device": device, "dtype": dtype}
        keys, values = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        decays = self.num_v_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False, **factory)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False, **factory)
        self.v_proj = nn.Linear(hidden_size, values, bias=False, **factory)
        self.q_conv1d = ShortConvolution(keys, conv_size, conv_bias, **factory)
        self.k_conv1d = ShortConvolution(keys, conv_size, conv_bias, **factory)
        self.v_conv1d = ShortConvolution(values, conv_size, conv_bias, **factory)
        self._two_projections("f", self.forget_rank, decays, False, factory)  # type: ignore[arg-type]
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False, **factory)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, device=device, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(decays, device=device, dtype=torch.float32))
        self._two_projections("g", self.gate_rank, values, gate_bias, factory)  # type: ignore[arg-type]
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, **factory)
        self.o_proj = nn.Linear(values, hidden_size, bias=False, **factory)
        self.reset_gate()
        _exempt_from_weight_decay(self)
        self.register_load_state_dict_pre_hook(checkpoints.translate)
        self.register_load_state_dict_post_hook(_exempt_from_weight_decay)     # assign=True brings other parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _exempt_from_weight_decay(self)                                        # copy.deepcopy drops attributes

    def _two_projections(self, letter: str, rank: int | None, size: int, bias: bool, factory: dict[str, Any]) -> None:
        """Low rank: `letter`_a_proj and _b_proj; full: `letter`_proj."""
        if rank is None:
            self.add_module(f"{letter}_proj", nn.Linear(self.hidden_size, size, bias=bias, **factory))
            return
        self.add_module(f"{letter}_a_proj", nn.Linear(self.hidden_size, rank, bias=False, **factory))
        self.add_module(f"{letter}_b_proj", nn.Linear(rank, size, bias=bias, **factory))

    def _check_options(self, norm_eps: Any, dtype: Any, **flags: Any) -> None:
        sizes = {name: getattr(self, name) for name in ("hidden_size", "num_heads", "head_dim", "num_v_heads",
                                                        "head_v_dim")}
        ranks = {name: getattr(self, name) for name in ("forget_rank", "gate_rank")}
        wrong = [name for name, size in sizes.items() if not is_number(size, int) or size < 1]
        recompute = isinstance(self.disable_recompute, bool) or self.disable_recompute == "states"
        shared = bool(wrong) or self.num_v_heads % self.num_heads == 0
        for option, holds, asked, found in (
            *((name, name not in wrong, "an int of 1 or more", repr(size)) for name, size in sizes.items()),
            ("num_v_heads", shared, f"a multiple of num_heads={self.num_heads}", self.num_v_heads),
            *((name, rank is None or (is_number(rank, int) and rank >= 1), "an int of 1 or more, 'head' or None",
               repr(rank)) for name, rank in ranks.items()),
            ("lower_bound", bad_bound(self.lower_bound) is None, "finite and negative, or None",
             repr(self.lower_bound)),
            *((name, isinstance(flag, bool), "True or False", repr(flag)) for name, flag in flags.items()),
            ("disable_recompute", recompute, "True, False or 'states'", repr(self.disable_recompute)),
            ("mode", self.mode in MODES, f"one of {', '.join(MODES)}", repr(self.mode)),
            ("conv_size", isinstance(self.conv_size, int) and self.conv_size >= 2, "an int of 2 or more",
             repr(self.conv_size)),
            ("norm_eps", is_number(norm_eps, int, float) and norm_eps >= 0 and is_finite(norm_eps),
             "a finite number >= 0", repr(norm_eps)),
            ("layer_idx", isinstance(self.layer_idx, int | None), "an int or None", repr(self.layer_idx)),
            ("dtype", dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point),
             "a torch.dtype such as torch.bfloat16, or None", repr(dtype)),
        ):
            if not holds:
                raise InputError("KimiDeltaAttention", option, asked, str(found),
                                 "See help(kda.nn.KimiDeltaAttention).", f"nn.{option}")
        if self.backend is not None:
            check_backend_name(self.backend)

    @property
    def gate_bias(self) -> bool:
        return (self.g_proj if self.gate_rank is None else self.g_b_proj).bias is not None  # type: ignore[union-attr]

    def reset_gate(self) -> None:
        """A_log and dt_bias as models are trained from: softplus(dt_bias) log-uniform between 0.001 and 0.1, exp(A_log)
        uniform between 1 and 16, or 1 with a lower bound."""
        with torch.no_grad():
            if self.lower_bound is None:
                self.A_log.uniform_(1, 16).log_()
            else:
                self.A_log.zero_()
            dt = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_()
            dt += torch.log(-torch.expm1(-dt))                                 # inverse of softplus

    def reset_parameters(self) -> None:
        """Initialise all parameters again."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]
        self.reset_gate()

    @classmethod
    def from_checkpoint(cls, tensors: Mapping[str, Tensor], prefix: str = "", **options: Any) -> KimiDeltaAttention:
        """A layer with the weights of a checkpoint; sizes, ranks and biases follow from the tensors' shapes.

        Args:
            tensors: by name, in any layout of `kda.nn.LAYOUTS`: of a file, or of a model's state_dict.
            prefix: of the layer's names, such as "model.layers.0.self_attn.".
            options: those of the class that no tensor contains: `lower_bound` and `norm_eps`, or instead `config`, the
                model's, a dict or an object; and `allow_neg_eigval`, if neither is its default.

        Raises:
            CheckpointError: with the names that were found, the layouts that exist, and what to do.
        """
        weights, sizes = checkpoints.read(tensors, prefix, options)
        layer = cls(**sizes)
        layer.load_state_dict(weights)
        return layer

    def to_checkpoint(self, layout: str = "kimi_linear", prefix: str = "") -> dict[str, Tensor]:
        """The weights with the names and shapes of a layout of `kda.nn.LAYOUTS`; tensors are shared."""
        return checkpoints.write(self, layout, prefix)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: Any = None,
        **unknown: Any,
    ) -> Tensor:
        """y (B, T, D).

        Args:
            x: (B, T, D).
            attention_mask: (B, S), S >= T, of which the last T columns are used: 1 or true where a token is real.
                Padding may be anywhere; it affects no other token, and y is zero there.
            cache: start from its states of this layer, and store the states after the last tokens in it.
            cu_seqlens: (N + 1,) offsets of N sequences packed in one row, B = 1.
            cu_seqlens_cpu: a copy on the CPU.
            cp_context: from kda.parallel, for a sequence that spans several ranks.
        """
        if unknown:
            refuse_unknown("KimiDeltaAttention", unknown, _ARGUMENTS, ARGUMENTS_OF_FLA)
        cp_context = self._check_call(x, attention_mask, cache, cu_seqlens, cu_seqlens_cpu, cp_context)
        B, T = x.shape[:2]
        if cache is not None and cu_seqlens is None:
            call = step.LayerCall(self, x, self._state(cache, B, x), attention_mask, cp_context=cp_context)
            if step.refusal(call) is None:
                return step.run(call, cache)
        padded = None
        if attention_mask is not None:
            padded = Padded.of(attention_mask[:, -T:] if T else attention_mask[:, :0], x.device)
            x, sequences = padded.packed(x), padded.sequences
        elif cp_context is not None:
            sequences = Sequences.of_offsets(cp_context.cu_seqlens, T, x.device)
        elif cu_seqlens is not None:
            sequences = Sequences.of_offsets(cu_seqlens, T, x.device, cu_seqlens_cpu)
        else:
            sequences = Sequences.of_rows(B)
        x = sequences.cleared(x)
        before = self._state(cache, sequences.N, x)
        projected = [proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        states = (None,) * 3 if before is None else before.conv
        if cp_context is not None:
            from ..parallel import conv_halo

            rows = conv_halo(torch.cat(projected, -1), cp_context, self.conv_size - 1)      # concatenated: one exchange
            states = rows.split([each.shape[-1] for each in projected], -1)
        q, k, v = (conv(each, state, sequences) for conv, each, state in zip(convolutions, projected, states))
        o, recurrent = self._attend(x, q, k, v, before, sequences, T, cache is not None, cp_context)
        if cache is not None:
            after = (next_state(each, self.conv_size, state, sequences) for each, state in zip(projected, states))
            cache[self.layer_idx] = LayerState(recurrent, tuple(after))  # type: ignore[arg-type, index]
        gate = self.g_proj(x) if self.gate_rank is None else self.g_b_proj(self.g_a_proj(x))  # type: ignore[operator]
        y = self.o_proj(self.o_norm(o, gate.unflatten(-1, o.shape[-2:])).flatten(-2))
        return y if padded is None else padded.padded(y, B)

    def explain(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        cp_context: Any = None,
        *,
        cu_seqlens_cpu: Tensor | None = None,
        **unknown: Any,
    ) -> str:
        """Whether such a call is one `kda.decode_step`, and which rule of `kda.nn.step` refuses it if not."""
        if unknown:
            refuse_unknown("KimiDeltaAttention.explain", unknown, _ARGUMENTS, ARGUMENTS_OF_FLA)
        cp_context = self._check_call(x, attention_mask, cache, cu_seqlens, cu_seqlens_cpu, cp_context)
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        state = self._state(cache, N, x)
        why = step.refusal(step.LayerCall(self, x, state, attention_mask, cu_seqlens, cp_context))
        return "the layer uses kda.decode_step" if why is None else f"the layer does not use kda.decode_step: {why}"

    def _state(self, cache: Cache | None, N: int, x: Tensor) -> LayerState | None:
        """This layer's state of N sequences, if the cache has one."""
        keys, values = self.num_heads * self.head_dim, self.num_v_heads * self.head_v_dim
        recurrent = (self.num_v_heads, self.head_v_dim, self.head_dim)
        conv = tuple((self.conv_size - 1, channels) for channels in (keys, keys, values))
        return state_of(cache, self.layer_idx, N, recurrent, conv, x.device)

    def _attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, before: LayerState | None, sequences: Sequences, T: int,
        keep: bool, cp_context: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """o (B, T, HV, V), and the final states if they are kept."""
        heads, value_heads = (self.num_heads, self.head_dim), (self.num_v_heads, self.head_v_dim)
        f = self.f_proj(x) if self.forget_rank is None else self.f_b_proj(self.f_a_proj(x))  # type: ignore[operator]
        tensors = (q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, value_heads),
                   f.unflatten(-1, (self.num_v_heads, self.head_dim)), self.b_proj(x))
        arguments: dict[str, Any] = {
            "A_log": self.A_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound,
            "initial_state": None if before is None else before.recurrent, "output_final_state": keep,
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval, "state_v_first": True, "backend": self.backend,
        }
        if cp_context is None:
            arguments |= {"cu_seqlens": sequences.cu_seqlens, "cu_seqlens_cpu": sequences.cu_seqlens_cpu}
        if self._goes_token_by_token(tensors, arguments, T, cp_context):
            return fused_recurrent_kda(*tensors, **arguments)
        return chunk_kda(*tensors, **arguments, disable_recompute=self.disable_recompute, cp_context=cp_context)  # type: ignore[return-value]

    def _goes_token_by_token(self, tensors: tuple, arguments: dict[str, Any], T: int, cp_context: Any) -> bool:
        given = (*tensors, arguments["A_log"], arguments["dt_bias"], arguments["initial_state"])
        training = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
        if self.mode == "recurrent" and (training or cp_context is not None):
            found = "a call that records gradients" if training else "a cp_context"
            raise InputError("KimiDeltaAttention", "mode", "'chunk' or 'auto' here", f"'recurrent' and {found}",
                             "Token by token there is neither a backward nor several ranks: set layer.mode = 'auto', "
                             "or use torch.no_grad().", "nn.mode.recorded")
        if self.mode != "auto" or training or cp_context is not None or not untransformed():
            return self.mode == "recurrent"
        return T <= SHORT                    # last, because a compiled or exported call is one for such T from here on

    def _computes(self, x: Tensor) -> bool:
        """Whether x has the dtype of the weights; of another kind of projection or weight nothing is known."""
        proj = self.q_proj
        known = type(proj) is nn.Linear and type(proj.weight) is nn.Parameter
        return not known or x.dtype == proj.weight.dtype or torch.is_autocast_enabled(x.device.type)

    def _check_call(self, x: Any, mask: Any, cache: Any, cu_seqlens: Any, copy: Any, cp_context: Any) -> Any:
        """The context as one of kda's, as chunk_kda takes it."""
        shape = list(x.shape) if isinstance(x, Tensor) else []
        apart = [name for name, given in (("attention_mask", mask), ("cu_seqlens", cu_seqlens),
                                          ("cp_context", cp_context)) if given is not None]
        rows = len(shape) == 3 and shape[2] == self.hidden_size
        batch, T = shape[:2] if rows else (0, 0)
        of_mask = list(mask.shape) if isinstance(mask, Tensor) else []
        masked = mask is None or (len(of_mask) == 2 and of_mask[0] == batch and of_mask[1] >= T)
        offsets = cu_seqlens is None or (isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1
                                         and cu_seqlens.numel() > 0 and is_index(cu_seqlens.dtype))
        for option, holds, asked, found, fix in (                              # torch.compile cannot print a size
            ("x", rows, f"[B, T, {self.hidden_size}]", lambda: _shape_or_type(x),
             "Pass hidden states, batch first."),
            ("x", not rows or self._computes(x), "of the dtype of the layer's weights", lambda: _dtypes(x, self),
             "Cast x, move the layer to its dtype with layer.to(x.dtype), or call it inside of torch.autocast."),
            ("attention_mask", masked, "[B, S] with S >= T, of 0 and 1",
             lambda: f"{_shape_or_type(mask)} beside x {_shape_or_type(x)}",
             "Pass a padding mask with a row for each of x; KDA is causal by itself."),
            ("attention_mask", not masked or not _is_additive(mask), "[B, S] with S >= T, of 0 and 1",
             lambda: "other numbers", "1 is a real token, 0 padding; this may be a mask that is added to logits."),
            ("cu_seqlens", offsets, "a tensor of N + 1 offsets", lambda: _shape_or_type(cu_seqlens, with_dtype=True),
             "Pass a tensor of int32 or int64."),
            ("cu_seqlens_cpu", copy is None or cu_seqlens is not None, "a copy of cu_seqlens",
             lambda: "cu_seqlens=None", "Pass cu_seqlens as well."),
            ("cu_seqlens", cu_seqlens is None or batch == 1, "with B = 1", lambda: f"B = {batch}",
             "Concatenate the sequences in one row."),
            (*_without_numbers(x, attention_mask=mask, cu_seqlens=cu_seqlens), "Move it there."),
            (" and ".join(apart), len(apart) < 2, "given alone", lambda: "together",
             "Each says where sequences begin and end: pass one."),
            ("cache", cache is None or isinstance(cache, Cache), "a kda.nn.Cache", lambda: type(cache).__name__,
             "Create one with kda.nn.Cache()."),
            ("cache", cache is None or cp_context is None, "None with a cp_context", lambda: "both",
             "States on several ranks are not kept: pass one of the two."),
        ):
            if not holds:
                raise InputError("KimiDeltaAttention", option, asked, found(), fix, f"nn.{option.split()[0]}")
        if cp_context is None:
            return None
        from ..parallel import adopt

        context = adopt(cp_context, "KimiDeltaAttention")
        if not torch.compiler.is_compiling() and context.tokens != T:          # a graph is for any T
            error = InputError("KimiDeltaAttention", "x", f"[1, {context.tokens}, {self.hidden_size}], this rank's "
                               "tokens", _shape_or_type(x), "Cut the row as the context does: context.tokens per rank.",
                               "nn.cp_context")
            if context.crosses:
                from ..parallel import exchange

                exchange.object_to(context, f"error: {error}")
            raise error
        return context

    def extra_repr(self) -> str:
        names = ["num_heads", "head_dim", "num_v_heads", "head_v_dim", "lower_bound"]
        names += ["allow_neg_eigval"] * self.allow_neg_eigval
        return ", ".join([str(self.hidden_size), *(f"{name}={getattr(self, name)}" for name in names)])


def _exempt_from_weight_decay(layer: nn.Module, *_: Any) -> None:
    """Mark the parameters of the gate in the way that optimizers of FLA and others read."""
    for x in (layer.A_log, layer.dt_bias):
        x._no_weight_decay = True  # type: ignore[union-attr]


_OPTIONS, _ARGUMENTS = names_of(KimiDeltaAttention.__init__), names_of(KimiDeltaAttention.forward)


def _shape_or_type(x: Any, with_dtype: bool = False) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return shape_of(x) + (f" of {dtype_name(x)}" if with_dtype else "")


def _dtypes(x: Tensor, layer: KimiDeltaAttention) -> str:
    return f"{dtype_name(x)} beside weights in {dtype_name(layer.q_proj.weight)}"


def _without_numbers(x: Any, **read: Any) -> tuple[str, bool, str, Callable[[], str]]:
    """Check that no tensor which is copied to x's device is on meta (and has no numbers) unless x is on meta itself."""
    home = getattr(x, "device", None)
    apart = not getattr(x, "is_meta", False)
    empty = [name for name, each in read.items() if apart and getattr(each, "is_meta", False)]
    asked = "on the device of x, or on another one with numbers"
    return (empty or [*read])[0], not empty, asked, lambda: f"meta beside x on {home}"


def _is_additive(mask: Any) -> bool:
    """Whether a mask on the CPU has other numbers than 0 and 1; one that is traced or transformed is not read."""
    if mask is None or mask.dtype == torch.bool or type(mask) is not Tensor or not on_cpu(mask):
        return False
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not torch._C._len_torch_dispatch_stack() and bool(((mask != 0) & (mask != 1)).any())
