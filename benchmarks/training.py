"""Does a model train faster with kda, and to the same losses?  `python -m benchmarks.training`, on a GPU, with FLA.

FLA's KDA language model is trained on bytes of Python sources, by each side in a process of its own: from the same
seed, on the same batches.  Sides are `fla`, FLA's kernels; `kda`, the same model after one line, `import kda.fla`; and
`kda.nn`, the same model whose layers are kda's own, with the same weights.  Right first: a side whose losses begin or
end elsewhere than those of the first side, or that runs a call of FLA in place of kda's, is not saved.

    python -m benchmarks.training --json model.json --plot losses.svg        # needs pip install flash-linear-attention
    python -m benchmarks.training --sides fla,kda,kda.nn --heads 64          # 4 layers of hidden size 4,096
    python -m benchmarks.training --sides kda.nn --device cpu --heads 2 --head-dim 16 --hidden 32 --layers 2 \
        --batch 2 --tokens 64 --steps 6
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import hashlib
import importlib
import importlib.metadata
import json
import math
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kda.tools.measure.timing import commit
from ptxkit.commands.layout import table

from . import common

WIDTHS = {8: dict(hidden=1024, layers=12, batch=8), 64: dict(hidden=4096, layers=4, batch=2)}      # by heads
BYTES, MOST = 256, 32 << 20                  # the vocabulary, and bytes of text
START, END = 0.01, 0.03                      # how far a side's first loss and its last ones may be off, relative
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "fla-core", "flash-linear-attention", "transformers")


@dataclass(frozen=True)
class Settings:
    heads: int = 8
    head_dim: int = 128
    hidden: int = 1024
    layers: int = 12
    batch: int = 8
    tokens: int = 4096
    steps: int = 40
    lower_bound: float | None = None         # None: a softplus gate
    seed: int = 0
    lr: float = 3e-4
    device: str = "cuda"
    text: str = ""                           # a folder of Python sources; "": the standard library

    @property
    def gate(self) -> str:
        return "softplus" if self.lower_bound is None else "bounded"

    @property
    def timed_from(self) -> int:
        """Return the first step that counts for the rate: those before it build, autotune and warm up."""
        return self.steps // 2 + 1


# ---- models


def model_of_fla(s: Settings) -> nn.Module:
    """Return FLA's model.  On a CPU all but its layers is torch's, since FLA's are Triton kernels."""
    from fla.models import KDAConfig, KDAForCausalLM

    unfused = dict.fromkeys(("fuse_norm", "fuse_swiglu", "fuse_cross_entropy"), False) if s.device == "cpu" else {}
    config = KDAConfig(
        hidden_size=s.hidden, num_heads=s.heads, head_dim=s.head_dim, num_hidden_layers=s.layers, vocab_size=BYTES,
        max_position_embeddings=s.tokens, lower_bound=s.lower_bound, safe_gate=s.lower_bound is not None,
        use_cache=False, **unfused,
    )
    torch.manual_seed(s.seed)
    model = KDAForCausalLM(config)
    if s.device == "cpu":
        for block in model.model.layers:
            block.mlp.forward = functools.partial(in_torch, block.mlp)
    return model


def in_torch(mlp: Any, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def model_with_kda(s: Settings) -> nn.Module:
    registered = importlib.import_module("kda.fla")                            # the one line
    if (order := registered.asked()["chunk_kda"])[:1] != ["kda"]:
        raise RuntimeError(f"FLA asks {', '.join(order) or 'no backend'} for chunk_kda, not kda first")
    return model_of_fla(s)


def model_of_layers(s: Settings) -> nn.Module:
    """Return FLA's model with kda's layers, which have the weights of FLA's."""
    model = model_of_fla(s)
    for number, block in enumerate(model.model.layers):
        block.attn = Layer(block.attn, number, s)
    return model


class Layer(nn.Module):
    """kda's layer where a block of FLA's has its own."""

    def __init__(self, theirs: nn.Module, number: int, s: Settings):
        super().__init__()
        from kda.nn import KimiDeltaAttention

        self.layer = KimiDeltaAttention.from_checkpoint(
            theirs.state_dict(), norm_eps=theirs.o_norm.eps, lower_bound=s.lower_bound, layer_idx=number
        )

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None, None]:
        return self.layer(hidden_states), None, None


MODELS: dict[str, Callable[[Settings], nn.Module]] = {
    "fla": model_of_fla, "kda": model_with_kda, "kda.nn": model_of_layers,
}


# ---- training


def text_of(folder: str) -> torch.Tensor:
    """Return the bytes of the Python sources of a folder, in the order of their names."""
    files = sorted(Path(folder or sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    data, size = [], 0
    for file in files:
        if size < MOST and "site-packages" not in file.parts:
            data.append(file.read_bytes())
            size += len(data[-1])
    return torch.frombuffer(bytearray(b"\n".join(data)[:MOST]), dtype=torch.uint8)


def batch_of(text: torch.Tensor, step: int, s: Settings) -> torch.Tensor:
    """Return the tokens of a step, (batch, tokens): the same for every side."""
    random = torch.Generator().manual_seed(1_000_003 * s.seed + step)
    starts = torch.randint(0, len(text) - s.tokens, (s.batch,), generator=random)
    return text[starts[:, None] + torch.arange(s.tokens)].long()


def train(side: str, s: Settings, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Return the row of a side: losses of all steps, the rate of the median of the later ones, seconds of the first,
    memory."""
    from kda.notices import KdaNotice

    on_gpu = s.device.startswith("cuda")
    text, losses, seconds = text_of(s.text), [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error", KdaNotice)                              # FLA would run the call instead
        model = MODELS[side](s).to(s.device).train()
        optimizer = optimizer_of(model, s)
        for step in range(1, s.steps + 1):
            tokens = batch_of(text, step, s).to(s.device)
            begun = now(on_gpu, clock)
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(now(on_gpu, clock) - begun)
            losses.append(loss.item())
            print(f"{side}: step {step}, loss {losses[-1]:.3f}, {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    timed = seconds[s.timed_from - 1:]
    row = {
        "side": side, "tokens_per_second": s.batch * s.tokens / statistics.median(timed), "from_step": s.timed_from,
        "first_step_seconds": seconds[0], "step_seconds": timed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": {str(step): loss for step, loss in enumerate(losses, 1)},
        "text": {"bytes": len(text), "sha256": hashlib.sha256(text.numpy().tobytes()).hexdigest()},
    }
    return row | ({"GiB": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def optimizer_of(model: nn.Module, s: Settings) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay for matrices alone."""
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=s.lr, betas=(0.9, 0.95))


def now(on_gpu: bool, clock: Callable[[], float]) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return clock()


# ---- comparing


def wrong(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the sides that did not train as the first one, and how."""
    found = {}
    first, *_ = rows
    for row in rows:
        losses, expected = (each["losses"] for each in (row, first))
        if not all(map(math.isfinite, losses.values())):
            found[row["side"]] = "a loss is not finite"
        elif row["text"] != first["text"] or losses.keys() != expected.keys():
            found[row["side"]] = f"it was trained on another text or for another time than {first['side']}"
        elif (off := abs(losses["1"] / expected["1"] - 1)) > START:
            found[row["side"]] = f"its first loss is {off:.1%} off that of {first['side']}"
        elif (off := abs(end_of(losses) / end_of(expected) - 1)) > END:
            found[row["side"]] = f"its last losses are {off:.1%} off those of {first['side']}"
    return found


def end_of(losses: dict[str, float]) -> float:
    """Return the mean of the last quarter of the losses: single ones differ by roundings that grew."""
    last = [*losses.values()][-max(1, len(losses) // 4):]
    return sum(last) / len(last)


def in_a_process(side: str, s: Settings) -> dict[str, Any]:
    """Train a side in a process of its own: what FLA asks is the process's, and so are memory and first steps."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.json")
        command = common.again(__spec__, "--one", side, "--settings", json.dumps(dataclasses.asdict(s)), "--json", file)
        if subprocess.run(command, cwd=common.ROOT).returncode:
            sys.exit(f"{side} was not trained: what its process said stands above")
        row: dict[str, Any] = json.loads(file.read_text())
    return row


def report(s: Settings, rows: Sequence[dict[str, Any]]) -> list[str]:
    shown = sorted({1, *range(10, s.steps + 1, 10), s.steps})
    head = ("side", "tokens/s", "", "first step", "GiB", *(f"loss {step}" for step in shown))
    cells = [
        (row["side"], f"{(rate := row['tokens_per_second']):,.0f}", f"{rate / rows[0]['tokens_per_second']:.2f} x",
         f"{row['first_step_seconds']:.1f} s", f"{row['GiB']:.1f}" if "GiB" in row else "-",
         *(f"{row['losses'][str(step)]:.3f}" for step in shown)) for row in rows
    ]
    return table(cells, head)


def about(s: Settings) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if s.device.startswith("cuda") else "a CPU"
    what = ("FLA's KDA language model on bytes of Python sources, by side, in processes of their own: the same seed "
            f"and data; tokens per second of the median of steps {s.timed_from} to {s.steps}")
    return {"what": what, "gate": s.gate, "device": device, "date": str(datetime.date.today()), "commit": commit(),
            "versions": versions, "settings": dataclasses.asdict(s)}


def draw(file: Path, s: Settings, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the losses of all sides over steps, with their rates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        label = f"{row['side']}, {row['tokens_per_second']:,.0f} tokens/s"
        axes.plot([*map(int, row["losses"])], [*row["losses"].values()], label=label, linewidth=1.4)
    axes.set_xlabel(f"step of {s.batch} x {s.tokens:,} tokens")
    axes.set_ylabel("loss")
    axes.set_title(f"{s.layers} layers of {s.heads} heads, {s.gate} gate", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file)


def compare(
    sides: Sequence[str], s: Settings, run: Callable[[str, Settings], dict[str, Any]] = in_a_process,
    json_file: Path | None = None, plot: Path | None = None,
) -> int:
    """Train all sides and say how they compare; return 1 if one did not train as the first."""
    rows = [run(side, s) for side in sides]
    bad = wrong(rows)
    right = [row for row in rows if row["side"] not in bad]
    print(*report(s, rows), *(f"wrong: {side}: {why}" for side, why in bad.items()), sep="\n")
    if right and json_file:
        common.write(json_file, about(s) | {"left_out": bad, "rows": right})
    if plot:
        draw(plot, s, rows)
    return int(bool(bad))


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__spec__, __doc__)
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    kinds: dict[str, Any] = dict.fromkeys(fields, int) | {"lr": float, "lower_bound": float, "device": str, "text": str}
    for name, field in fields.items():
        usual = "by --heads" if name in WIDTHS[8] else field.default
        parser.add_argument(f"--{name.replace('_', '-')}", type=kinds[name], default=None, help=f"default: {usual}")
    parser.add_argument("--sides", type=common.words, default=["fla", "kda"], help=f"of {','.join(MODELS)}")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the losses (.svg, .png)")
    parser.add_argument("--one", metavar="SIDE", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [side for side in args.sides if side not in MODELS]:
        parser.error(f"--sides: there is no side {unknown[0]!r}; there are {', '.join(MODELS)}")
    if args.device == "cpu" and (gpu := [side for side in args.sides if side != "kda.nn"]):
        parser.error(f"--device cpu: the layer of {gpu[0]!r} is FLA's, whose kernels need a GPU; use --sides kda.nn")
    if args.one:
        common.write(args.json, train(args.one, Settings(**json.loads(args.settings))))
        return 0
    given = {name: value for name in fields if (value := getattr(args, name)) is not None}
    settings = Settings(**WIDTHS.get(given.get("heads", 8), {}) | given)
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this needs a GPU, and torch finds none; --device cpu --sides kda.nn runs here, at a small size")
    return compare(args.sides, settings, json_file=args.json, plot=args.plot)


if __name__ == "__main__":
    sys.exit(main())
