"""Runs layers of KDA, forward and backward, over one long sequence, of which each rank has a part.

    torchrun --nproc-per-node 2 examples/long_context.py                     # gloo on CPUs
    torchrun --nproc-per-node 8 examples/long_context.py --tokens 1048576 --hidden 2304 --heads 32 --head-dim 128
    ... --lengths 100,900,1048 --layout zigzag                               # packed sequences, cut anywhere
    ... --check                                                              # rank 0 makes the whole, too, and compares

What goes from rank to rank, once per layer and direction: the maps of the parts, whose size does not depend on the
tokens, and the last inputs of the convolutions.  The gradients of weights are summed over the ranks, as of any data.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from kda import parallel
from kda.nn import KimiDeltaAttention

Context = parallel.CPContext | None
BLOCK = 256                                  # tokens that come from one seed


class Model(nn.Module):
    def __init__(self, hidden: int, heads: int, head_dim: int, layers: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(layers))
        self.layers = nn.ModuleList(KimiDeltaAttention(hidden, heads, head_dim) for _ in range(layers))

    def forward(self, x: torch.Tensor, context: Context, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """x (1, T, hidden): this rank's tokens with a context, all of them without."""
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), cp_context=context, cu_seqlens=cu_seqlens)
        return x


def tokens_between(a: int, b: int, hidden: int) -> torch.Tensor:
    """(b - a, hidden), the same on whichever rank."""
    blocks = [torch.randn(BLOCK, hidden, generator=torch.Generator().manual_seed(n))
              for n in range(a // BLOCK, -(-b // BLOCK))]
    return torch.cat([torch.empty(0, hidden), *blocks])[a - a // BLOCK * BLOCK :][: b - a]


def step(model: Model, x: torch.Tensor, total: int, context: Context, cu_seqlens: torch.Tensor | None):
    """The loss of these tokens, its share of that of all; gradients are added to those of the weights."""
    loss = model(x, context, cu_seqlens).square().sum() / (total * x.shape[-1])
    loss.backward()
    return loss.detach()


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def numbers(text: str) -> list[int]:
    found = [int(number) for number in text.split(",")]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text} are no lengths")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=positive, default=2048, help="of all ranks")
    parser.add_argument("--lengths", type=numbers, help="of packed sequences, with commas; left out: one sequence")
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="contiguous",
                        help="the part of a rank: one piece, or two")
    parser.add_argument("--hidden", type=positive, default=64)
    parser.add_argument("--heads", type=positive, default=2)
    parser.add_argument("--head-dim", type=positive, default=32)
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="compare loss and gradients with one process")
    args = parser.parse_args()
    lengths = args.lengths or [args.tokens]
    total = sum(lengths)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node RANKS examples/long_context.py")

    parts = int(os.environ["WORLD_SIZE"]) * (1 if args.layout == "contiguous" else 2)
    if total % parts:
        parser.error(f"{total} tokens cannot be cut into {parts} equal parts: change --lengths or --tokens")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(args.hidden, args.heads, args.head_dim, args.layers).to(device)

    offsets = torch.tensor([0, *lengths]).cumsum(0)
    context = parallel.build_cp_context(offsets.to(device), cu_seqlens_cpu=offsets, layout=args.layout)
    edges = [n * total // parts for n in range(parts + 1)]
    mine = [tokens_between(edges[p.number], edges[p.number + 1], args.hidden) for p in context.parts]
    x = torch.cat(mine)[None].to(device)
    for number in range(args.steps):
        model.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        loss = step(model, x, total, context, None)
        dist.all_reduce(loss)
        for p in model.parameters():
            dist.all_reduce(p.grad)
        value = loss.item()
        if rank == 0:
            print(f"step {number}: loss {value:.6f}, {time.perf_counter() - began:.2f} s for {total:,} tokens of "
                  f"{len(lengths)} sequence{'s' * (len(lengths) != 1)} on {world} ranks", flush=True)
    wrong = 0
    if rank == 0:
        size = 4 * args.heads * args.head_dim * 2 * args.head_dim * len(context.parts)
        print(f"maps: a rank sends {size:,} bytes per layer and direction")
        if args.check:
            wrong = compare(model, value, tokens_between(0, total, args.hidden)[None].to(device), offsets.to(device))
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def grads(model: Model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model: Model, loss: float, x: torch.Tensor, offsets: torch.Tensor) -> int:
    """The same on this rank alone: 1 if the loss or a gradient is another."""
    found = grads(model)
    model.zero_grad()
    alone = step(model, x, x.shape[1], None, offsets).item()
    apart = {name: ((found[name] - grad).norm() / grad.norm()).item() for name, grad in grads(model).items()}
    name = max(apart, key=lambda each: apart[each])
    print(f"beside one process: loss {abs(loss - alone) / alone:.1e} apart, relative;\n"
          f"  the worst gradient, of {name}, {apart[name]:.1e}")
    return int(abs(loss - alone) > 1e-5 * alone or apart[name] > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
