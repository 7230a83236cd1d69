"""Reads the KDA layers of a checkpoint, compares them, and writes them in another layout.

    python examples/convert.py FOLDER                     # every layer: the folder has safetensors and a config.json
    python examples/convert.py FOLDER --layer 5           # one of them
    python examples/convert.py FOLDER --to fla --out NEW  # the checkpoint again, with its KDA layers in this layout
    python examples/convert.py --demo kimi_linear         # a small random layer, written in a layout and read again

One layer is read at a time, so a checkpoint of 100 GB is no harder than a small one.  A layer that is written back in
its layout must have the same bits.  Where transformers has the model, its own layer must make the same outputs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import Checkpoint, config_of, not_finite, save, write_index

from kda.errors import InputError, KdaError
from kda.nn import LAYOUTS, KimiDeltaAttention, layout_of, prefixes_of

KNOWN = ("kimi_linear", "glm5_next", "glm5_next_text", "bailing_hybrid")       # kda finds the gate in their configs
FIXES = {                                    # id of an error of the layer -> what to do here
    "nn.checkpoint.config": "Repair config.json.",
    "nn.lower_bound": "Correct it in config.json, or in --lower-bound.",
    "nn.norm_eps": "Correct it in config.json, or in --norm-eps.",
}
MODULES = {                                  # model_type -> module of transformers, its layer, its config
    "kimi_linear": ("kimi_linear.modeling_kimi_linear", "KimiLinearDeltaAttention", "KimiLinearConfig"),
    "glm5_next_text": ("glm5_next.modeling_glm5_next", "Glm5NextTextLinearAttention", "Glm5NextTextConfig"),
    "bailing_hybrid": ("bailing_hybrid.modeling_bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridConfig"),
}


def demo(layout: str, folder: Path) -> None:
    """Write a small random layer as a checkpoint with this layout has it."""
    torch.manual_seed(0)
    to = LAYOUTS[layout]
    forget, gate = ("head" if rank == "low" else None for rank in (to.forget, to.gate))
    model = {"transformers.glm5_next": "glm5_next_text", "glm5_next": "glm5_next_text", "kimi_k3": "kimi_linear"}.get(
        layout, layout.removeprefix("transformers."))
    bound = None if layout.endswith(("kimi_linear", "fla")) else -5.0
    layer = KimiDeltaAttention(64, 2, 32, lower_bound=bound, forget_rank=forget, gate_rank=gate)
    save(layer.to_checkpoint(layout, "model.layers.0.self_attn."), folder / "model.safetensors")
    config = {"model_type": model, "rms_norm_eps": 1e-5, "hidden_size": 64,
              "linear_head_dim": 32, "linear_num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
              "head_dim": 32, "linear_lower_bound": bound, "kda_lower_bound": bound, "num_hidden_layers": 1,
              "layer_types": ["linear_attention"], "qk_rope_head_dim": 0, "lower_bound": bound,
              "linear_attn_config": {"gate_lower_bound": bound}}
    (folder / "config.json").write_text(json.dumps(config))


def options_of(config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return what no tensor tells: of a model that kda knows its config, of another a lower bound and an epsilon."""
    config, model = dict(config), config["model_type"]
    for field, option, value in (
        ("lower_bound", "--lower-bound", args.lower_bound), ("rms_norm_eps", "--norm-eps", args.norm_eps)
    ):
        if value is not None:
            if config.get(field, value) != value:
                raise SystemExit(f"{option} {value:g} is for a config that does not say it; this one has "
                                 f"{config[field]} as {field}. Leave the option out.")
            config[field] = value
    if config.get("rms_norm_eps") is None:
        raise SystemExit(f"the config of {model} has no rms_norm_eps, the epsilon of the norm. Pass --norm-eps.")
    if model in KNOWN:
        return {"config": config}
    if "lower_bound" not in config:
        raise SystemExit(f"the config of {model} names no lower bound of the gate. Pass --lower-bound, or write "
                         '"lower_bound": null into it for a gate that has none.')
    return {"lower_bound": config["lower_bound"], "norm_eps": config["rms_norm_eps"],
            "allow_neg_eigval": bool(config.get("allow_neg_eigval", False))}


def of_transformers(config: dict[str, Any], layer: KimiDeltaAttention) -> torch.nn.Module | str:
    """Return transformers' own layer with the same weights, or why there is none."""
    model = config["model_type"]
    if model not in MODULES or (model == "kimi_linear" and layer.lower_bound is not None):
        return "transformers has none that kda knows for this model"
    module, kind, configuration = MODULES[model]
    try:
        found = importlib.import_module(f"transformers.models.{module}")
        filled = getattr(importlib.import_module("transformers"), configuration)(**config)
        theirs = getattr(found, kind)(filled, 0)
        for name in ("chunk_kimi_delta_attention", "causal_conv1d_fn"):        # torch's, whatever else is installed
            setattr(found, name, getattr(getattr(found, name), "__wrapped__", getattr(found, name)))
        theirs.load_state_dict(layer.to_checkpoint(f"transformers.{model.removesuffix('_text')}"))
    except ImportError as error:
        return f"transformers or its model is missing ({error})"
    except Exception as error:                                                 # a config is checked in many ways there
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SystemExit(f"config.json: transformers makes no layer of it for these weights. {what:.300}") from None
    return theirs


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Compare the bits of tensors; this works for nan too, which equals nothing."""
    both = x.dtype == y.dtype and x.shape == y.shape
    return both and torch.equal(x.contiguous().flatten().view(torch.uint8), y.contiguous().flatten().view(torch.uint8))


def layers_of(tensors: Checkpoint) -> list[str]:
    """Return the prefixes of all KDA layers, in the order of their numbers."""
    prefixes = sorted(prefixes_of(tensors), key=lambda prefix: [
        int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", prefix)])
    if not prefixes:
        raise SystemExit(f"the checkpoint has no KDA layer: none of its {len(tensors)} tensors has a name that ends "
                         "with A_log. Give the folder of a model with KDA.")
    return prefixes


def read(tensors: Checkpoint, prefix: str, options: dict[str, Any]) -> KimiDeltaAttention:
    try:
        return KimiDeltaAttention.from_checkpoint(tensors.under(prefix), prefix, **options)
    except InputError as error:
        fix = FIXES.get(error.check, error.fix)
        raise KdaError(f"{prefix}: {error.argument} must be {error.asked}; found {error.found}. {fix}") from None


def is_right(
    tensors: Checkpoint, prefix: str, config: dict[str, Any], args: argparse.Namespace, said: set[str]
) -> bool:
    """Compare a layer with its bits, and with transformers' own layer; say what is found."""
    given, layer = tensors.under(prefix), read(tensors, prefix, options_of(config, args))
    if args.lower_bound not in (None, layer.lower_bound):
        raise SystemExit(f"--lower-bound {args.lower_bound:g} is for a config that does not say it; this one means "
                         f"{layer.lower_bound}. Leave the option out.")
    layout = layout_of(given, prefix)
    print(f"{prefix}: {len(given)} tensors, named as in the layout {layout}")
    if name := not_finite(given):
        raise KdaError(f"{prefix}{name.removeprefix(prefix)} must have finite numbers; found nan or infinity. Get the "
                       "file again.")
    right = True
    if repr(layer) not in said:
        print(layer)
        said.add(repr(layer))
    if layout is None:
        print("not written back: no layout has just these names")
    else:
        back = layer.to_checkpoint(layout, prefix)
        same = back.keys() == given.keys() and all(same_bits(x, given[name]) for name, x in back.items())
        right = right and same
        print(f"back in that layout: {'the same bits' if same else 'OTHER BITS'}")
    if args.to:
        layer.to_checkpoint(args.to, prefix)               # what has no place there ends this before a file is written
    layer = layer.float()
    theirs = of_transformers(config, layer)
    if isinstance(theirs, str):
        print(f"not compared with another layer:\n  {theirs}")
    else:
        x = torch.randn(1, 100, layer.hidden_size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            y, expected = layer(x), theirs.float()(x)
        off = ((y - expected).norm() / expected.norm()).item()
        right = right and off <= 1e-5
        print(f"outputs of 100 tokens beside transformers' own layer: {off:.1e} apart, relative")
    return right


def write(tensors: Checkpoint, prefixes: list[str], options: dict[str, Any], to: str, folder: Path) -> None:
    """Write the checkpoint with these layers in a layout and all other tensors as they are; files keep their names."""
    files: dict[str, dict[str, Any]] = {}
    for name, (path, _, _) in tensors.where.items():
        if not name.startswith(tuple(prefixes)):
            files.setdefault(path.name, {})[name] = tensors.entry(name)
    for prefix in prefixes:                                # a layer may lie in two files, and is written into one
        path, _, _ = next(where for name, where in tensors.where.items() if name.startswith(prefix))
        files.setdefault(path.name, {})[prefix] = None
    total, index = 0, {}
    for file, entries in files.items():
        for prefix in [name for name, entry in entries.items() if entry is None]:
            del entries[prefix]
            entries |= read(tensors, prefix, options).to_checkpoint(to, prefix)
        total += save(entries, folder / file)
        index[file] = [*entries]
        entries.clear()
    if len(files) > 1:
        write_index(index, total, folder)


def convert(tensors: Checkpoint, folder: Path, args: argparse.Namespace) -> int:
    config, prefixes, said = config_of(folder / "config.json"), layers_of(tensors), set[str]()
    if args.layer is not None:
        if not 0 <= args.layer < len(prefixes):
            many = f"{len(prefixes)} KDA layer{'s' * (len(prefixes) != 1)}"
            raise SystemExit(f"the checkpoint has {many}; --layer counts them from 0, found {args.layer}.")
        prefixes = [prefixes[args.layer]]
    right = [is_right(tensors, prefix, config, args, said) for prefix in prefixes]
    if not all(right):
        print(f"{right.count(False)} of {len(right)} layers are wrong; nothing is written" if args.to else
              f"{right.count(False)} of {len(right)} layers are wrong")
        return 1
    if args.to:
        args.out.mkdir(exist_ok=True)
        write(tensors, prefixes, options_of(config, args), args.to, args.out)
        shutil.copyfile(folder / "config.json", args.out / "config.json")
        print(f"wrote {args.out}: {len(prefixes)} KDA layer{'s' * (len(prefixes) != 1)} in the layout {args.to}, "
              "all other tensors as they are, and config.json")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of a checkpoint: its .safetensors and config.json")
    parser.add_argument("--demo", choices=LAYOUTS, metavar="LAYOUT",
                        help=f"instead of a folder: {', '.join(LAYOUTS)}")
    parser.add_argument("--layer", type=int, help="this KDA layer alone, by its number in the checkpoint, from 0")
    parser.add_argument("--lower-bound", type=float, help="of the gate, where the config does not say it")
    parser.add_argument("--norm-eps", type=float, help="of the norm, where the config has no rms_norm_eps")
    parser.add_argument("--to", choices=LAYOUTS, metavar="LAYOUT", help="write the layers in this layout, of the same")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        help="the folder that --to writes, new or empty; converted by default")
    args = parser.parse_args()
    if args.out and not args.to:
        parser.error("--out is for --to: name a layout, or leave it out")
    args.out = args.out or Path("converted")
    if (args.folder is None) == (args.demo is None):
        parser.error("give a folder, or --demo" + (", and not both" if args.demo else ""))
    if args.to and not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}. Create it, or name another folder.")
    if args.to and args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        parser.error(f"--out: {args.out} exists and is no empty folder. Name a new one.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if args.demo:
            demo(args.demo, folder)
        try:
            sys.exit(convert(Checkpoint(folder), folder, args))
        except KdaError as error:
            raise SystemExit(f"{folder}: {error}" if args.folder else str(error)) from None
        except OSError as error:
            raise SystemExit(f"{error.filename or args.out}: {error.strerror}.") from None


if __name__ == "__main__":
    main()
