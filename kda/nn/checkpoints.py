"""Names and shapes of the layer's weights in checkpoints, as a table, and the conversion to kda's and back.

kda's own are those of Kimi-Linear's files.  Names of any layout are accepted wherever weights are loaded: by
`load_state_dict` of the layer, or of a model that contains such layers, and by `KimiDeltaAttention.from_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import InputError, in_words

Tensor = torch.Tensor


class CheckpointError(InputError):
    """Weights of another layout, or of another layer."""


class CheckpointLayout(NamedTuple):
    whose: str
    names: Mapping[str, str] = {}            # ours -> theirs, where they differ
    A_log: str = "(HV)"                      # its shape, or "(1, 1, HV, 1)"
    forget: str = "low"                      # rank of f: "low", "full"
    gate: str = "low"                        # rank of g
    gate_bias: bool = False                  # g_b_proj has one
    one_conv: bool = False                   # one convolution for q, k and v, concatenated


_FLA = {
    "f_a_proj.weight": "f_proj.0.weight", "f_b_proj.weight": "f_proj.1.weight",
    "g_a_proj.weight": "g_proj.0.weight", "g_b_proj.weight": "g_proj.1.weight", "g_b_proj.bias": "g_proj.1.bias",
}
_HELD = {                                    # our names -> those of transformers' modules
    name: f"forget_gate.{name}"
    for name in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight", "f_proj.weight")
}
LAYOUTS = {
    "kimi_linear": CheckpointLayout("files of Kimi-Linear, and ours", A_log="(1, 1, HV, 1)"),
    "kimi_k3": CheckpointLayout("files of Kimi-K3", gate="full"),
    "glm5_next": CheckpointLayout("files of GLM-5.3-Flash"),
    "bailing_hybrid": CheckpointLayout(
        "files of Ling 3", {"o_proj.weight": "dense.weight"}, forget="full", gate="full"
    ),
    "transformers.kimi_linear": CheckpointLayout(
        "KimiLinearDeltaAttention", _HELD, A_log="(1, 1, HV, 1)", one_conv=True
    ),
    "transformers.glm5_next": CheckpointLayout("Glm5NextTextLinearAttention", _HELD, one_conv=True),
    "transformers.bailing_hybrid": CheckpointLayout("BailingHybridDeltaAttention", _HELD, forget="full", gate="full",
                                                    one_conv=True),
    "fla": CheckpointLayout("fla.layers.KimiDeltaAttention", _FLA, gate_bias=True),
}

PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "b_proj.weight", "o_proj.weight", "o_norm.weight")
CONVOLUTIONS = tuple(f"{letter}_conv1d" for letter in "qkv")
ONE_CONV = "conv1d.weight"
# rank -> names
FORGET = {"low": ("f_a_proj.weight", "f_b_proj.weight"), "full": ("f_proj.weight",)}
GATE = {"low": ("g_a_proj.weight", "g_b_proj.weight"), "full": ("g_proj.weight",)}
OURS = {
    *PROJECTIONS, "A_log", "dt_bias", *sum(FORGET.values(), ()), *sum(GATE.values(), ()), "g_proj.bias",
    "g_b_proj.bias", *(f"{conv}.{kind}" for conv in CONVOLUTIONS for kind in ("weight", "bias")),
}
DIMENSIONS = {                               # how many a weight with our name may have, if not two
    "A_log": (1, 2, 3, 4), "dt_bias": (1, 2), "o_norm.weight": (1,), ONE_CONV: (2, 3),
    **dict.fromkeys((name for name in OURS if name.endswith(".bias")), (1,)),
    **dict.fromkeys((f"{conv}.weight" for conv in CONVOLUTIONS), (2, 3)),
}
THEIRS = {theirs: ours for layout in LAYOUTS.values() for ours, theirs in layout.names.items()}


def names_of(layout: str) -> set[str]:
    """The names of a layer's weights in a layout, without biases of convolutions."""
    to = LAYOUTS[layout]
    convolutions = {ONE_CONV} if to.one_conv else {f"{conv}.weight" for conv in CONVOLUTIONS}
    mine = {*PROJECTIONS, "A_log", "dt_bias", *FORGET[to.forget], *GATE[to.gate], *convolutions}
    return {to.names.get(name, name) for name in (*mine, *(["g_b_proj.bias"] if to.gate_bias else []))}


def layout_of(tensors: Mapping[str, Tensor], prefix: str = "") -> str | None:
    """The layout with these names under a prefix and an A_log of that shape, or None."""
    given = {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
    names = {name for name in given if not name.endswith("conv1d.bias")}
    for layout, to in LAYOUTS.items():
        A_log = to.names.get("A_log", "A_log")
        if names == names_of(layout) and (given[A_log].dim() == 1) == (to.A_log == "(HV)"):
            return layout
    return None


def prefixes_of(names: Iterable[str]) -> list[str]:
    """The prefixes of all KDA layers in a checkpoint, in its order."""
    return [name.removesuffix("A_log").removesuffix("forget_gate.") for name in names if name.endswith("A_log")]


# model_type -> where its config has the lower bound.  The text_config of Kimi-K3 has the model_type kimi_linear.
BOUNDS: dict[str, Callable[[Any], float | None]] = {
    "kimi_linear": lambda c: _linear(c, None),
    "glm5_next": lambda c: _field(c, "linear_lower_bound", _linear(c, -5.0)),
    "glm5_next_text": lambda c: _field(c, "linear_lower_bound", _linear(c, -5.0)),
    "bailing_hybrid": lambda c: _bailing(c),
}
REPAIR = "Repair the config, or pass lower_bound= and norm_eps= instead."


def _linear(config: Any, default: float | None) -> float | None:
    return _field(_part(config, "linear_attn_config") or {}, "gate_lower_bound", default)


def _bailing(config: Any) -> float | None:
    safe = _field(config, "kda_safe_gate", True)
    if not isinstance(safe, bool):
        raise _error("one whose config has True or False as kda_safe_gate", in_words(safe), REPAIR, "config")
    return _field(config, "kda_lower_bound", -5.0) if safe else None


def _part(config: Any, name: str) -> Any:
    """A field of a config that has fields itself, or None: a dict or an object, not a value of JSON."""
    part = _field(config, name)
    if isinstance(part, str | int | float | list | tuple):
        raise _error(f"one where {name} is a dict, or an object with attributes", in_words(part), REPAIR, "config")
    return part


def _error(asked: str, found: str, fix: str, check: str) -> CheckpointError:
    return CheckpointError("KimiDeltaAttention", "the checkpoint", asked, found, fix, f"nn.checkpoint.{check}")


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "nothing"


def ours(
    tensors: Mapping[str, Tensor], sizes: tuple[int, int, int] | None = None
) -> tuple[dict[str, Tensor], set[str]]:
    """Weights of one layer with kda's names and shapes, and the names that no layout has.

    `sizes`: channels of q, k and v, to split one convolution; None: those of their projections in `tensors`.
    """
    weights: dict[str, Tensor] = {}
    unknown = set()
    for name, x in tensors.items():
        _is_weight(name, x)
    for name, x in tensors.items():
        if name == ONE_CONV:
            rows = sizes or tuple(len(tensors[f"{each}_proj.weight"]) for each in "qkv"
                                  if f"{each}_proj.weight" in tensors)
            if len(rows) != 3 or len(x) != sum(rows):
                raise _error(f"one whose {ONE_CONV} has the channels of q, k and v", f"{len(x)} beside {rows}",
                             "Compare num_heads, head_dim and num_v_heads of both.", "conv")
            parts = {f"{conv}.weight": part for conv, part in zip(CONVOLUTIONS, x.split(rows))}
        else:
            parts = {THEIRS.get(name, name): x}
        for mine, part in parts.items():
            if mine not in OURS:
                unknown.add(name)
            elif mine in weights:
                raise _error("one with each weight once", f"{mine} under two names", "Remove one of them.", "twice")
            else:
                weights[mine] = _shaped(mine, part)
    return weights, unknown


def _is_weight(name: str, x: Any) -> None:
    """Whether a weight of a layer is a tensor with as many dimensions as it has in a layout, and not empty."""
    mine = THEIRS.get(name, name)
    if mine not in OURS and mine != ONE_CONV:
        return
    allowed = DIMENSIONS.get(mine, (2,))
    if not isinstance(x, Tensor) or x.dim() not in allowed or not x.numel():
        found = f"one of shape {[*x.shape]}" if isinstance(x, Tensor) else in_words(x)
        raise _error(f"one with {name} as a tensor of {' or '.join(map(str, allowed))} dimensions, not empty", found,
                     "The file is damaged, or these are not the weights of a KDA layer.", "dimensions")


def _shaped(name: str, x: Tensor) -> Tensor:
    if name in ("A_log", "dt_bias"):
        return x.reshape(-1)
    return x.unsqueeze(1) if name.endswith("conv1d.weight") and x.dim() == 2 else x


def translate(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename weights in `state_dict` before a layer loads them.  A layer with other sizes or parts is an error."""
    given = {name[len(prefix) :]: x for name, x in state_dict.items() if name.startswith(prefix)}
    shapes = {name: x.shape for name, x in (*layer.named_parameters(), *layer.named_buffers())}
    if all(name in shapes and x.shape == shapes[name] for name, x in given.items()):
        return
    sizes = tuple(conv.channels for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d))  # type: ignore[union-attr]
    weights, unknown = ours(given, sizes)  # type: ignore[arg-type]
    for name, x in weights.items():
        _fits(name, x, shapes)
    for name in given:
        if name not in unknown:
            del state_dict[prefix + name]
    state_dict.update({prefix + name: x for name, x in weights.items()})


def _fits(name: str, x: Tensor, shapes: Mapping[str, torch.Size]) -> None:
    """Whether a layer with these shapes accepts a weight."""
    if name in shapes:
        if x.shape != shapes[name]:
            raise _error(f"one with {name} of shape {[*shapes[name]]}", f"{[*x.shape]}",
                         "Create the layer with the checkpoint's sizes, or with KimiDeltaAttention.from_checkpoint.",
                         "shape")
        return
    if name.endswith("bias"):
        option = "gate_bias" if name.startswith("g_") else "conv_bias"
        fix = f"Create the layer with {option}=True, or with KimiDeltaAttention.from_checkpoint."
        raise _error(f"one without {name}, which the layer does not have", f"one of shape {[*x.shape]}", fix, "bias")
    option = "forget_rank" if name.startswith("f_") else "gate_rank"
    kinds = ("two projections", "one") if name.endswith(("f_proj.weight", "g_proj.weight")) else ("one", "two")
    rank = None if kinds[1] == "one" else len(x) if "_a_" in name else "head"
    raise _error(
        f"one that computes {name[0]} by {kinds[0]}, as the layer does", f"{name}, of {kinds[1]}",
        f"Create the layer with {option}={rank!r}, or with KimiDeltaAttention.from_checkpoint.", "rank",
    )


def read(tensors: Mapping[str, Tensor], prefix: str, options: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict]:
    """Weights with kda's names, and the options of a layer for them."""
    if not isinstance(tensors, Mapping):
        raise _error("a dict of tensors by name", type(tensors).__name__,
                     "Load a file first, as with safetensors.torch.load_file; examples/convert.py reads a folder.",
                     "type")
    given = {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
    weights, unknown = ours(given)
    if "A_log" not in weights:
        held = prefixes_of(tensors)
        raise _error(f"one with a layer's weights under {prefix!r}", _some(given),
                     f"Prefixes with an A_log: {_some(map(repr, held)) if held else 'none'}.", "prefix")
    if unknown:
        raise _error(f"in one of the layouts {', '.join(LAYOUTS)}", f"names that no layout has: {_some(unknown)}",
                     "Remove them, or rename them: `layer.to_checkpoint(layout)` has the names of a layout.",
                     "names")
    ranks = {letter: next((kind for kind, names in table.items() if names[0] in weights), None)
             for letter, table in (("f", FORGET), ("g", GATE))}
    wanted = {*PROJECTIONS, "dt_bias", *(f"{conv}.weight" for conv in CONVOLUTIONS),
              *FORGET[ranks["f"] or "low"], *GATE[ranks["g"] or "low"]}
    if missing := wanted - set(weights):
        fix = "Read all files of the checkpoint first: a layer may span two."
        if missing == {f"{conv}.weight" for conv in CONVOLUTIONS}:
            fix = "This layer always has convolutions; one of FLA with use_short_conv=False cannot be read."
        raise _error("one with all weights of a layer", f"none named {_some(missing)}", fix, "missing")
    sizes = _sizes(weights, ranks) | _unseen(options)
    return weights, sizes


def _sizes(weights: Mapping[str, Tensor], ranks: Mapping[str, str | None]) -> dict[str, Any]:
    HV, V = weights["A_log"].numel(), weights["o_norm.weight"].numel()
    K = weights["dt_bias"].numel() // HV
    keys, hidden = weights["q_proj.weight"].shape
    if weights["dt_bias"].numel() != K * HV or keys % K or len(weights["v_proj.weight"]) != HV * V:
        shapes = {name: [*weights[name].shape] for name in ("A_log", "dt_bias", "q_proj.weight", "v_proj.weight")}
        raise _error("one with A_log (HV), dt_bias (HV K), q_proj (H K, D) and v_proj (HV V, D)", str(shapes),
                     "This is not a KDA layer, or weights of two layers are mixed.", "sizes")
    dtype, device = weights["q_proj.weight"].dtype, weights["q_proj.weight"].device
    return {
        "hidden_size": hidden, "num_heads": keys // K, "head_dim": K, "num_v_heads": HV, "head_v_dim": V,
        "conv_size": weights["q_conv1d.weight"].shape[-1], "conv_bias": "q_conv1d.bias" in weights,
        "forget_rank": len(weights["f_a_proj.weight"]) if ranks["f"] == "low" else None,
        "gate_rank": len(weights["g_a_proj.weight"]) if ranks["g"] == "low" else None,
        "gate_bias": "g_b_proj.bias" in weights or "g_proj.bias" in weights, "dtype": dtype, "device": device,
    }


def _unseen(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that no tensor contains: the caller's, completed from a model's config."""
    given = dict(options)
    config = given.pop("config", None)
    if config is not None:
        config = _part({"config": config}, "config")
        config = _part(config, "text_config") or config                        # if the model is multimodal
        model = _field(config, "model_type")
        if not (isinstance(model, str) and model in BOUNDS) and "lower_bound" not in given:
            fix = "Pass lower_bound= and norm_eps= instead, as in that model's own code."
            raise _error(f"one whose config has a model_type among {', '.join(BOUNDS)}", f"{model!r}", fix, "config")
        if "lower_bound" not in given:
            given["lower_bound"] = BOUNDS[model](config)
        given.setdefault("norm_eps", _field(config, "rms_norm_eps"))
        given.setdefault("allow_neg_eigval", bool(_field(config, "allow_neg_eigval", False)))
    if given.get("norm_eps", 0) is None:                                       # a config without it
        del given["norm_eps"]
    missing = [name for name in ("lower_bound", "norm_eps") if name not in given]
    if missing:
        raise _error(f"read with {' and '.join(missing)}, which no tensor contains",
                     "neither" if missing[1:] else "none",
                     "Pass them, or config=: lower_bound=None is the unbounded gate of Kimi-Linear, and -5.0 that "
                     "of K3, GLM and Ling.", "options")
    return given


def _field(config: Any, name: str, default: Any = None) -> Any:
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def write(layer: nn.Module, layout: str, prefix: str = "") -> dict[str, Tensor]:
    """The weights of a layer in a layout."""
    if layout not in LAYOUTS:
        raise _error(f"written in one of the layouts {', '.join(LAYOUTS)}", repr(layout), "Pass one of them.", "layout")
    to = LAYOUTS[layout]
    ranks = tuple("full" if getattr(layer, option) is None else "low" for option in ("forget_rank", "gate_rank"))
    for letter, rank, has in zip("fg", ranks, (to.forget, to.gate)):
        if rank != has:
            fit = [name for name, one in LAYOUTS.items() if (one.forget, one.gate) == ranks]
            raise _error(f"written in a layout with {letter} of {rank} rank", f"{layout!r}, where its rank is {has}",
                         f"Use {' or '.join(fit)}." if fit else "No layout has both of its ranks.",
                         "layout.rank")
    weights = {name: x.detach() for name, x in layer.named_parameters()}
    convolutions = [weights.get(f"{conv}.bias") for conv in CONVOLUTIONS]
    if to.one_conv and convolutions[0] is not None:
        raise _error("written in a layout whose convolutions have a bias", f"{layout!r}, where they have none",
                     "Take 'fla'.", "layout.bias")
    bias = "g_proj.bias" if to.gate == "full" else "g_b_proj.bias"
    if to.gate_bias and bias not in weights:
        weight = layer.g_b_proj.weight  # type: ignore[union-attr]
        weights[bias] = weight.new_zeros(len(weight))  # type: ignore[arg-type, operator]
    if not to.gate_bias and bias in weights:
        if weights[bias].count_nonzero():
            raise _error(f"written in a layout with {bias}", f"{layout!r}, which has none",
                         "Use 'fla', or a layer whose bias is zero.", "layout.bias")
        del weights[bias]
    if to.A_log != "(HV)":
        weights["A_log"] = weights["A_log"].view(1, 1, -1, 1)
    if to.one_conv:
        weights[ONE_CONV] = torch.cat([weights.pop(f"{conv}.weight") for conv in CONVOLUTIONS])
    return {prefix + to.names.get(name, name): x for name, x in weights.items()}
