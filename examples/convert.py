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
import math
import reprlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kda.errors import KdaError
from kda.nn import LAYOUTS, KimiDeltaAttention, layout_of, prefixes_of

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LARGEST_HEADER = 100_000_000                 # bytes, as for the library safetensors
MODULES = {                                  # model_type -> module of transformers, its layer, its config
    "kimi_linear": ("kimi_linear.modeling_kimi_linear", "KimiLinearDeltaAttention", "KimiLinearConfig"),
    "glm5_next_text": ("glm5_next.modeling_glm5_next", "Glm5NextTextLinearAttention", "Glm5NextTextConfig"),
    "bailing_hybrid": ("bailing_hybrid.modeling_bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridConfig"),
}


def damaged(path: Path, what: str) -> SystemExit:
    return SystemExit(f"{path} is no complete safetensors file: {what}. Copy it again.")


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """What a file of safetensors says of its tensors, and where their bytes begin."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        if begin > size:
            raise damaged(path, "the header is longer than it")
        if begin > LARGEST_HEADER:
            raise damaged(path, f"a header has at most {LARGEST_HEADER} bytes; found {begin}")
        text = file.read(begin - 8)
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise damaged(path, f"its header is not an object of JSON, but {reprlib.repr(header)}")
    header.pop("__metadata__", None)
    for name, about in header.items():
        if fault := fault_of(name, about):
            raise damaged(path, fault)
    end = 0
    for start, stop, name in sorted((*about["data_offsets"], name) for name, about in header.items()):
        if start != end:
            raise damaged(path, f"{name!r} begins at byte {start} of the data; the tensor before it ends at {end}")
        end = stop
    if begin + end != size:
        raise damaged(path, f"its tensors have {end} bytes; found {size - begin}")
    return header, begin


def fault_of(name: str, about: Any) -> str | None:
    """What is wrong with the description of a tensor in a header."""
    if not name.isprintable():
        return f"{name!r} is no name of a tensor"
    fields = about if isinstance(about, dict) else {}
    described: list[Any] = [fields.get(field) for field in ("dtype", "shape", "data_offsets")]
    dtype, shape, offsets = described
    numbers = all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in (shape, offsets))
    if not (isinstance(dtype, str) and numbers and len(offsets) == 2):
        return f"{name!r} needs a dtype, a shape and two data_offsets; found {reprlib.repr(about)}"
    if dtype in DTYPES and offsets[1] - offsets[0] != DTYPES[dtype].itemsize * math.prod(shape):
        return f"{name!r}, {dtype} of shape {reprlib.repr(shape)}, cannot have data_offsets {reprlib.repr(offsets)}"
    return None


class Checkpoint(Mapping):
    """The tensors of all files in a folder by name; each is read when it is asked for."""

    def __init__(self, folder: Path):
        self.where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            header, begin = header_of(path)
            self.where |= {name: (path, begin, about) for name, about in header.items()}
        if not self.where:
            found = "has no *.safetensors" if folder.is_dir() else "is no folder"
            raise SystemExit(f"{folder} {found}. Give the folder of a checkpoint, or --demo.")

    def __getitem__(self, name: str) -> torch.Tensor:
        path, begin, about = self.where[name]
        if about["dtype"] not in DTYPES:
            raise SystemExit(f"{path}: {name!r} is {reprlib.repr(about['dtype'])}; a layer takes {', '.join(DTYPES)}. "
                             "Dequantise it before.")
        if 0 in about["shape"]:
            raise SystemExit(f"{path}: {name!r} has no elements: its shape is {reprlib.repr(about['shape'])}. "
                             "Copy the file again, or write it with all weights.")
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
    """Write the tensors as a safetensors file."""
    names, header, offset = {dtype: name for name, dtype in DTYPES.items()}, {}, 0
    for name, x in tensors.items():
        size = x.numel() * x.element_size()
        header[name] = {"dtype": names[x.dtype], "shape": [*x.shape], "data_offsets": [offset, offset + size]}
        offset += size
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


def config_of(path: Path) -> dict[str, Any]:
    """The config of a model of text, which is a part of that of a multimodal one."""
    if not path.is_file():
        raise SystemExit(f"{path.parent} has no config.json, which says what the gate of its layers is.")
    try:
        config = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"{path} is not JSON: {error}. Copy it again.") from None
    text = config.get("text_config", config) if isinstance(config, dict) else config
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        raise SystemExit(f"{path} must be an object of JSON with a model_type, or with a text_config that has one; "
                         f"found {reprlib.repr(text)}. Copy it again.")
    return text


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """What no tensor tells, of a model that kda knows; of another, its config must have a lower_bound."""
    if config["model_type"] in ("kimi_linear", "glm5_next", "glm5_next_text", "bailing_hybrid"):
        return {"config": config}
    if "lower_bound" not in config:
        raise SystemExit(f"the config of {config['model_type']} names no lower bound of the gate. Pass --lower-bound.")
    return {"lower_bound": config["lower_bound"], "norm_eps": config.get("rms_norm_eps")}


def of_transformers(config: dict[str, Any], layer: KimiDeltaAttention) -> torch.nn.Module | str:
    """transformers' own layer with the same weights, or why there is none."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of a checkpoint: its .safetensors and config.json")
    parser.add_argument("--demo", choices=LAYOUTS, metavar="LAYOUT",
                        help=f"instead of a folder: {', '.join(LAYOUTS)}")
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
        try:
            sys.exit(convert(Checkpoint(folder), config_of(folder / "config.json"), args))
        except KdaError as error:
            raise SystemExit(f"{folder}: {error}" if args.folder else str(error)) from None
        except OSError as error:
            raise SystemExit(f"{error.filename or args.out}: {error.strerror}.") from None


def convert(tensors: Checkpoint, config: dict[str, Any], args: argparse.Namespace) -> int:
    prefixes = prefixes_of(tensors)
    if not 0 <= args.layer < len(prefixes):
        many = f"{len(prefixes)} KDA layer{'s' * (len(prefixes) != 1)}"
        raise SystemExit(f"the checkpoint has {many}; --layer counts them from 0, found {args.layer}.")
    prefix = prefixes[args.layer]
    given = {name: tensors[name] for name in tensors if name.startswith(prefix)}
    layout = layout_of(given, prefix)
    options = options_of(config if args.lower_bound is None else config | {"lower_bound": args.lower_bound})
    layer = KimiDeltaAttention.from_checkpoint(given, prefix, **options)
    if args.lower_bound not in (None, layer.lower_bound):
        raise SystemExit(f"--lower-bound {args.lower_bound:g} is for a config that does not say it; this one means "
                         f"{layer.lower_bound}.")
    print(f"{prefix}: {len(given)} tensors, in the layout {layout}\n{layer}")
    wrong = 0
    if layout is None:
        print("not written back: no layout has just these names")
    else:
        back = layer.to_checkpoint(layout, prefix)
        same = back.keys() == given.keys() and all(same_bits(x, given[name]) for name, x in back.items())
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
        save(KimiDeltaAttention.from_checkpoint(given, prefix, **options).to_checkpoint(args.to), args.out)
        print(f"wrote {args.out} in the layout {args.to}")
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
