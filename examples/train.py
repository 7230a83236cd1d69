"""Trains a small language model of KDA and attention layers on the bytes of this repository's own pages.

    python examples/train.py                                         # one process, GPU if there is one
    torchrun --nproc-per-node 2 examples/train.py                    # two: gloo on CPUs, NCCL on GPUs
    python examples/train.py --out runs/a --steps 200                # stops at 200 ...
    python examples/train.py --out runs/a --steps 400 --resume       # ... and goes on as if it had not

The first line makes 300 steps on a GPU and 60 on a CPU, which take about 3 minutes on two busy cores.  Where other
processes use the cores, OMP_NUM_THREADS=1 makes it several times faster.

Writes to --out: checkpoint.pt, to resume from; model.safetensors and config.json, which serve.py and convert.py read;
losses.json and, with matplotlib, losses.png.  It prints the loss and, last, some text that the model makes token by
token, through the cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_model import Model
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
PROMPT = b"The state "


def text_of_the_repository() -> torch.Tensor:
    """The licence and the pages, as bytes; not those that `python docs/written.py` writes."""
    written = {ROOT / line for line in (ROOT / ".gitignore").read_text().split() if line.endswith(".md")}
    pages = [ROOT / "LICENSE", ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - written)]
    return torch.frombuffer(bytearray(b"\n".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()


def batch_of(text: torch.Tensor, step: int, rank: int, batch: int, length: int) -> torch.Tensor:
    """(batch, length + 1), the same for a step and a rank whenever it is asked for."""
    random = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(0, len(text) - length, (batch,), generator=random)
    return text[starts[:, None] + torch.arange(length + 1)]


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Weight decay for matrices alone: not for norms, nor for what says `_no_weight_decay`."""
    decayed = [p for p in model.parameters() if p.dim() > 1 and not getattr(p, "_no_weight_decay", False)]
    others = {id(p) for p in decayed}
    plain = [p for p in model.parameters() if id(p) not in others]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=lr)


def picture(losses: list[float], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    axes = (figure := Figure(figsize=(6, 4))).subplots()
    axes.plot(losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="KDA and attention on this repository's pages")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"wrote {path}")


def in_words(sizes: dict[str, int]) -> str:
    return " ".join(f"--{name} {size}" for name, size in sizes.items())


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def rate(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=positive, help="300 by default, 60 on a CPU")
    parser.add_argument("--batch", type=positive, default=8, help="sequences of each process")
    parser.add_argument("--length", type=positive, default=256, help="tokens of a sequence")
    parser.add_argument("--hidden", type=positive, default=128)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--lr", type=rate, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/train"),
                        help="folder of the checkpoint and the losses; runs/train by default")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint in --out")
    args = parser.parse_args()
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} must be a multiple of --heads {args.heads}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    text = text_of_the_repository()
    if args.length >= len(text):
        parser.error(f"--length {args.length}: the text has {len(text)} bytes")
    args.steps = args.steps or (60 if args.device == "cpu" else 300)

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    sizes = {name: getattr(args, name) for name in ("hidden", "heads", "layers")}
    model = Model(**sizes).to(device)
    optimizer, losses = optimizer_of(model, args.lr), []
    checkpoint = args.out / "checkpoint.pt"
    if args.resume and not checkpoint.exists():
        raise SystemExit(f"there is no {checkpoint} to resume from. Leave out --resume, or name another --out.")
    if args.resume:
        kept = torch.load(checkpoint, map_location=device, weights_only=True)
        if kept["sizes"] != sizes:
            raise SystemExit(f"{checkpoint} is of a model with {in_words(kept['sizes'])}, and this one has "
                             f"{in_words(sizes)}. Pass those, or name another --out.")
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        losses = kept["losses"]
    try:                                                   # now, not after hours of training
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"there can be no folder {args.out}: {error.strerror}. Name another --out.") from None
    trained = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    first = len(losses)
    loss = logits = None                                   # where the checkpoint has all steps already
    began = time.perf_counter()
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes of text, on {device}; "
              f"a step has\n{world} x {args.batch} sequences of {args.length} bytes")
        if first >= args.steps:
            print(f"the checkpoint has {first} steps already; more --steps go on from there")
    for step in range(first, args.steps):
        tokens = batch_of(text, step, rank, args.batch, args.length).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = trained(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach()
        if world > 1:
            dist.all_reduce(mean)
            mean /= world
        losses.append(mean.item())
        now = time.perf_counter()
        if step == first:
            warm = now                                     # the first step loads and builds what all others need, too
        if rank == 0 and (step % max(args.steps // 10, 1) == 0 or step == args.steps - 1):
            left = (now - warm) / max(step - first, 1) * (args.steps - step - 1)
            says = f", about {left:.0f} s left" if left >= 1 else ""
            print(f"step {step:5d}  loss {losses[-1]:.4f}  {now - began:.1f} s{says}", flush=True)
    if rank == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"sizes": sizes, **states, "losses": losses}, checkpoint)
        (args.out / "losses.json").write_text(json.dumps(losses))
        model.write(args.out)
        picture(losses, args.out / "losses.png")
        print(repr((PROMPT + model.eval().continued(PROMPT, 60)).decode(errors="replace")))
    if world > 1:
        del trained, loss, logits                                              # they hold the group, in a circle
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
