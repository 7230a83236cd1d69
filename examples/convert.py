"""Reads one KDA layer of a checkpoint, writes it back or in another layout, and compares both.

    python examples/convert.py FOLDER                     # of safetensors and a config.json; the first layer
    python examples/convert.py FOLDER --layer 5 --to fla --out layer.safetensors
    python examples/convert.py --demo kimi_linear         # a small random layer, written in a layout and read again

Only the layer's tensors are read, so a checkpoint of 100 GB is no harder than a small one.  Where transformers
has the model, its own layer makes the same outputs, and the difference is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kda.errors import KdaError
from kda.nn import LAYOUTS, KimiDeltaAttention, layout_of, prefixes_of

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MODULES = {                                  # model_type -> module of transformers, its layer, its config
    "kimi_linear": ("kimi_linear.modeling_kimi_linear", "KimiLinearDeltaAttention", "KimiLinearConfig"),
    "glm5_next_text": ("glm5_next.modeling_glm5_next", "Glm5NextTextLinearAttention", "Glm5NextTextConfig"),
    "bailing_hybrid": ("bailing_hybrid.modeling_bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridConfig"),
}


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """What a file of safetensors says of its tensors, and where their bytes begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise SystemExit(f"{path} is no complete safetensors file: the header is longer than it. Copy it again.")
        return json.loads(file.read(length)), 8 + length


class Checkpoint(Mapping):
    """The tensors of all files in a folder by name; each is read when it is asked for."""

    def __init__(self, folder: Path):
        self.where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            header, begin = header_of(path)
            self.where |= {name: (path, begin, about) for name, about in header.items() if name != "__metadata__"}
        if not self.where:
            found = "has no *.safetensors" if folder.is_dir() else "is no folder"
            raise SystemExit(f"{folder} {found}. Give the folder of a checkpoint, or --demo.")

    def __getitem__(self, name: str) -> torch.Tensor:
        path, begin, about = self.where[name]
        if about["dtype"] not in DTYPES:
            raise SystemExit(f"{name} is {about['dtype']}; a layer takes {', '.join(DTYPES)}. Dequantise it before.")
        start, end = about["data_offsets"]
        with path.open("rb") as file:
            file.seek(begin + start)
            read = bytearray(file.read(end - start))
        return torch.frombuffer(read, dtype=DTYPES[about["dtype"]]).view(about["shape"])

    def __iter__(self):
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """As safetensors."""
    names, header, at = {dtype: name for name, dtype in DTYPES.items()}, {}, 0
    for name, x in tensors.items():
        size = x.numel() * x.element_size()
        header[name] = {"dtype": names[x.dtype], "shape": [*x.shape], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            held = x.cpu().contiguous()
            file.write(ctypes.string_at(held.data_ptr(), held.numel() * held.element_size()))


def demo(layout: str, folder: Path) -> None:
    """A small random layer as a checkpoint with this layout has it."""
    torch.manual_seed(0)
    to = LAYOUTS[layout]
    ranks = {option: "head" if rank == "low" else None for option, rank in
             (("forget_rank", to.forget), ("gate_rank", to.gate))}  # fmt: skip
    model = {"transformers.glm5_next": "glm5_next_text", "glm5_next": "glm5_next_text", "kimi_k3": "kimi_linear"}.get(
        layout, layout.removeprefix("transformers."))  # fmt: skip
    bound = None if layout.endswith(("kimi_linear", "fla")) else -5.0
    layer = KimiDeltaAttention(64, 2, 32, lower_bound=bound, **ranks)
    save(layer.to_checkpoint(layout, "model.layers.0.self_attn."), folder / "model.safetensors")
    config = {"model_type": model, "rms_norm_eps": 1e-5, "hidden_size": 64,
              "linear_head_dim": 32, "linear_num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
              "head_dim": 32, "linear_lower_bound": bound, "kda_lower_bound": bound, "num_hidden_layers": 1,
              "layer_types": ["linear_attention"], "qk_rope_head_dim": 0, "lower_bound": bound,
              "linear_attn_config": {"gate_lower_bound": bound}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """What no tensor tells, of a model that kda knows; of another, its config must have a lower_bound."""
    if config["model_type"] in ("kimi_linear", "glm5_next", "glm5_next_text", "bailing_hybrid"):
        return {"config": config}
    if "lower_bound" not in config:
        raise SystemExit(f"the config of {config['model_type']} names no lower bound of the gate. Pass --lower-bound.")
    return {"lower_bound": config["lower_bound"], "norm_eps": config["rms_norm_eps"]}


def of_transformers(config: dict[str, Any], layer: KimiDeltaAttention) -> torch.nn.Module | str:
    """transformers' own layer with the same weights, or why there is none."""
    model = config["model_type"]
    if model not in MODULES or (model == "kimi_linear" and layer.lower_bound is not None):
        return "transformers has none that kda knows for this model"
    module, kind, configuration = MODULES[model]
    try:
        found = importlib.import_module(f"transformers.models.{module}")
        made = getattr(importlib.import_module("transformers"), configuration)(**config)
        theirs = getattr(found, kind)(made, 0)
        for name in ("chunk_kimi_delta_attention", "causal_conv1d_fn"):        # torch's, whatever else is installed
            setattr(found, name, getattr(getattr(found, name), "__wrapped__", getattr(found, name)))
    except ImportError as error:
        return f"transformers or its model is missing ({error})"
    theirs.load_state_dict(layer.to_checkpoint(f"transformers.{model.removesuffix('_text')}"))
    return theirs


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Also of nan, which equals nothing."""
    both = x.dtype == y.dtype and x.shape == y.shape
    return both and torch.equal(x.contiguous().flatten().view(torch.uint8), y.contiguous().flatten().view(torch.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of a checkpoint: its .safetensors and config.json")
    parser.add_argument("--demo", choices=LAYOUTS, metavar="LAYOUT",
                        help=f"instead of a folder: {', '.join(LAYOUTS)}")  # fmt: skip
    parser.add_argument("--layer", type=int, default=0, help="number of the KDA layer in the checkpoint, from 0")
    parser.add_argument("--lower-bound", type=float, help="of the gate, where the config does not say it")
    parser.add_argument("--to", choices=LAYOUTS, metavar="LAYOUT", help="write it in this layout, one of the same")
    parser.add_argument("--out", type=Path, default=Path("layer.safetensors"), help="the file that --to writes")
    args = parser.parse_args()
    if (args.folder is None) == (args.demo is None):
        parser.error("give a folder, or --demo" + (", and not both" if args.demo else ""))
    if args.to and not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}. Create it, or name another file.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if args.demo:
            demo(args.demo, folder)
        tensors, config = Checkpoint(folder), folder / "config.json"
        if not config.is_file():
            raise SystemExit(f"{folder} has no config.json, which says what the gate of its layers is.")
        sys.exit(convert(tensors, json.loads(config.read_text()), args))


def convert(tensors: Checkpoint, config: dict[str, Any], args: argparse.Namespace) -> int:
    config = config.get("text_config", config)
    prefixes = prefixes_of(tensors)
    if not 0 <= args.layer < len(prefixes):
        many = f"{len(prefixes)} KDA layer{'s' * (len(prefixes) != 1)}"
        raise SystemExit(f"the checkpoint has {many}; --layer counts them from 0, found {args.layer}.")
    prefix = prefixes[args.layer]
    own = {name: tensors[name] for name in tensors if name.startswith(prefix)}
    layout = layout_of(own, prefix)
    options = options_of(config if args.lower_bound is None else config | {"lower_bound": args.lower_bound})
    layer = KimiDeltaAttention.from_checkpoint(own, prefix, **options)
    if args.lower_bound not in (None, layer.lower_bound):
        raise SystemExit(f"--lower-bound {args.lower_bound:g} is for a config that does not say it; this one means "
                         f"{layer.lower_bound}.")  # fmt: skip
    print(f"{prefix}: {len(own)} tensors, in the layout {layout}\n{layer}")
    wrong = 0
    if layout is None:
        print("not written back: no layout has just these names")
    else:
        back = layer.to_checkpoint(layout, prefix)
        same = back.keys() == own.keys() and all(same_bits(x, own[name]) for name, x in back.items())
        wrong += not same
        print(f"back in that layout: {'the same bits' if same else 'OTHER BITS'}")
    layer = layer.float()
    theirs = of_transformers(config, layer)
    if isinstance(theirs, str):
        print(f"not compared with another layer:\n  {theirs}")
    else:
        x = torch.randn(1, 100, layer.hidden_size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            y, expected = layer(x), theirs.float()(x)
        off = ((y - expected).norm() / expected.norm()).item()
        wrong += off > 1e-5
        print(f"outputs of 100 tokens beside transformers' own layer: {off:.1e} apart, relative")
    if args.to:
        save(KimiDeltaAttention.from_checkpoint(own, prefix, **options).to_checkpoint(args.to), args.out)
        print(f"wrote {args.out} in the layout {args.to}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        main()
    except KdaError as error:
        sys.exit(str(error))
