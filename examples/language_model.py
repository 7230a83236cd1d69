"""The small language model of train.py and serve.py: tokens are bytes, layers are KDA and, every fourth, attention.

`write` makes a folder of it as checkpoints are: model.safetensors and config.json.  `read` makes a model of such a
folder, and of one whose KDA layers convert.py has written in another layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from checkpoint_files import Checkpoint, config_of, not_finite, save
from torch import nn

from kda.errors import KdaError
from kda.nn import Cache, KimiDeltaAttention

BYTES = 256
MODEL_TYPE = "kda_example"
SIZES = {"hidden": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers"}    # -> in a config
Kept = tuple[torch.Tensor, torch.Tensor]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return what q's tokens, the last of k's, read of themselves and of all before them; all (B, T, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if 1 < queries < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=1 < queries == keys).transpose(1, 2)


class Keys:
    """Keys and values of all tokens so far, by layer: for layers of attention what a Cache is for those of KDA."""

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in self.kept:
            k, v = (torch.cat(both, 1) for both in zip(self.kept[layer], (k, v)))
        self.kept[layer] = k, v
        return attention(q, k, v)


class Attention(nn.Module):
    """Causal softmax attention without positions, which the KDA layers provide."""

    def __init__(self, hidden: int, heads: int, layer: int):
        super().__init__()
        self.heads, self.layer = heads, layer
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, keys: Any = None) -> torch.Tensor:
        """Mix x (B, T, hidden); `keys` has those of what came before, as Keys."""
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in self.qkv(x).chunk(3, -1))
        o = attention(q, k, v) if keys is None else keys.attend(self.layer, q, k, v)
        return self.out(o.flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, layer: int):
        super().__init__()
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mixes = (Attention(hidden, heads, layer) if layer % 4 == 3
                      else KimiDeltaAttention(hidden, heads, hidden // heads, layer_idx=layer))
        self.up, self.down = nn.Linear(hidden, 6 * hidden, bias=False), nn.Linear(3 * hidden, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, cache: Cache | None, cu_seqlens: torch.Tensor | None, keys: Any
    ) -> torch.Tensor:
        given = self.before(x)
        if isinstance(self.mixes, Attention):
            x = x + self.mixes(given, keys)
        else:
            x = x + self.mixes(given, cache=cache, cu_seqlens=cu_seqlens)
        a, b = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class Model(nn.Module):
    """Three layers of KDA, then one of attention, and so on, as in Kimi-Linear."""

    def __init__(self, hidden: int, heads: int, layers: int):
        super().__init__()
        self.sizes = {"hidden": hidden, "heads": heads, "layers": layers}
        self.embed = nn.Embedding(BYTES, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, n) for n in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, BYTES, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(
        self, tokens: torch.Tensor, cache: Cache | None = None, cu_seqlens: torch.Tensor | None = None, keys: Any = None
    ) -> torch.Tensor:
        """Return logits (B, T, 256) of tokens (B, T), from the states and keys before them, which move on."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cache, cu_seqlens, keys)
        return self.head(self.norm(x))

    @torch.no_grad()
    def continued(self, prompt: bytes, tokens: int) -> bytes:
        """Return the tokens that the model finds most likely after the prompt."""
        cache, keys, found = Cache(), Keys(), bytearray()
        given = torch.tensor([[*prompt]], device=self.embed.weight.device)
        for _ in range(tokens):
            given = self(given, cache, keys=keys)[:, -1:].argmax(-1)
            found.append(int(given))
        return bytes(found)

    # files

    def write(self, folder: Path) -> None:
        save(self.state_dict(), folder / "model.safetensors")
        sizes = {SIZES[name]: size for name, size in self.sizes.items()}
        config = {"model_type": MODEL_TYPE, **sizes, "lower_bound": None, "rms_norm_eps": 1e-5}
        (folder / "config.json").write_text(json.dumps(config, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Model:
        """Return the model of a folder; what is wrong with it ends the program with one line."""
        config = config_of(folder / "config.json")
        wrong = [name for name in SIZES.values() if type(config.get(name)) is not int or config[name] < 1]
        if config["model_type"] != MODEL_TYPE or wrong:
            said = [f"model_type {config['model_type']!r}", *(f"{name} {config.get(name)!r}" for name in wrong)]
            raise SystemExit(f"{folder / 'config.json'} must be that of a model of examples/train.py: model_type "
                             f"{MODEL_TYPE!r}, and {', '.join(SIZES.values())} as positive whole numbers; found "
                             f"{', '.join(said)}. Train one first.")
        sizes = [config[name] for name in SIZES.values()]
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        if hidden % heads:
            raise SystemExit(f"{folder / 'config.json'} must have a hidden_size that its num_attention_heads divide; "
                             f"found {hidden} and {heads}. Copy it again.")
        model, tensors = cls(*sizes), Checkpoint(folder)
        held = []
        for n, block in enumerate(model.blocks):
            if isinstance(block.mixes, KimiDeltaAttention):
                held.append(f"blocks.{n}.mixes.")
                try:                                       # in whatever layout; the sizes are those of the tensors
                    block.mixes = KimiDeltaAttention.from_checkpoint(
                        tensors.under(held[-1]), held[-1], lower_bound=config.get("lower_bound"),
                        norm_eps=config.get("rms_norm_eps", 1e-5), layer_idx=n)
                except KdaError as error:
                    raise SystemExit(f"{folder}: {error}") from None
                if block.mixes.hidden_size != config["hidden_size"]:
                    raise SystemExit(f"{folder}: {held[-1]} must have a hidden size of {config['hidden_size']}, as "
                                     f"config.json says; found {block.mixes.hidden_size}. Copy both files again.")
        rest = {name: x for name, x in model.state_dict().items() if not name.startswith(tuple(held))}
        for name, x in rest.items():
            if name not in tensors or tensors.shape(name) != [*x.shape]:
                found = tensors.shape(name) if name in tensors else "none of that name"
                raise SystemExit(f"{folder}: {name} must be a tensor of shape {[*x.shape]}, as config.json says; "
                                 f"found {found}. Copy both files again.")
        if more := [name for name in tensors if name not in rest and not name.startswith(tuple(held))]:
            raise SystemExit(f"{folder}: {more[0]} must be a tensor of the model that config.json says; found one that "
                             "this has no place for. Copy both files again.")
        model.load_state_dict({name: tensors[name] for name in rest}, strict=False)
        if damaged := not_finite(model.state_dict()):
            raise SystemExit(f"{folder}: {damaged} must have finite numbers; found nan or infinity. Train it again, or "
                             "copy it from an earlier checkpoint.")
        return model
