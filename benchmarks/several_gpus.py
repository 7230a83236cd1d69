"""A row of tokens over several GPUs of one host, beside one GPU and FLA.

    python -m benchmarks.several_gpus --json FILE

    --ranks 2,4 --shape 131072x64 --shape 524288x8       # tokens x heads; channels: --dim
    --layers 4                                           # and steps of so many layers, one after the other
    --device cpu --shape 512x2 --dim 32 --calls 1        # processes with gloo and the reference, to see that it runs

One process per GPU.  Each makes the whole row by itself, which is what one GPU takes, and then its own part together
with the others, by each exchange of `build_cp_context`, and by the default one with all of a forward behind the
exchange.  o and all gradients are compared with those of the whole row first, in the norm; what is further off than
CLOSE is not timed.  Gates are slow, so that states matter across ranks.

A call is timed by events on each GPU.  Ahead of it, every stream waits long enough for the host to issue the call, and
then for all the others, by a small all-reduce.  A call lasts as long as on its slowest rank; milliseconds, medians.
`map` and `map_bwd` are what a rank in the middle computes beyond its own tokens' forward and backward; `first` and
`second` are the halves of a forward on the last rank, `first_map` is the first one with the map.  They need no other
rank: --ranks 1 has them alone.  `send` is the all-gather of the maps.  `layer` is a layer's share of a step of several:
all forwards, then all backwards, as in a model, where ranks may be apart by a layer.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import kda
from kda.checks.calls import Call, problem_of
from kda.model.bundles import Save
from kda.model.force import forcing
from kda.model.problem import Inputs, Options
from kda.parallel import exchange, halves
from kda.parallel.maps import segment_map, segment_map_bwd
from ptxkit.commands.layout import table

from . import common
from .group import free_port, join

EXCHANGES = "gather", "chain", "tree", "hops"
PER_TOKEN = "q", "k", "v", "g", "beta"       # a rank has a part of each of these; A_log and dt_bias are whole on each
GATE: dict[str, Any] = dict(
    use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0
)
CLOSE = 2e-2
WAIT = 10_000_000                            # clocks, 5 ms: longer than the host needs to issue a step
Tensor = torch.Tensor
Row = dict[str, Any]


class Rank(NamedTuple):
    """One process of a group."""

    number: int
    world: int
    device: torch.device
    calls: int
    layers: int

    def part(self, x: Tensor) -> Tensor:
        """This rank's tokens of x (B, T, ..)."""
        return x.chunk(self.world, dim=1)[self.number].contiguous()

    def parts(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.part(x) if name in PER_TOKEN else x for name, x in tensors.items()}

    def once(self, call: Callable[[], Any]) -> float:
        """Milliseconds on this rank, of a call that all ranks begin together."""
        signal = torch.zeros(1, device=self.device)
        if self.device.type == "cpu":
            dist.all_reduce(signal)
            began = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - began)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT)
        dist.all_reduce(signal)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """The median of calls, each as long as on its slowest rank."""
        for _ in range(2):
            call()
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, [self.once(call) for _ in range(self.calls)])
        return statistics.median(map(max, zip(*everyone, strict=True)))


def row_of(tokens: int, heads: int, dim: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """All tensors of one row, the same on every rank, and the gradient of o."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator, device=device, dtype=dtype)

    tensors = {name: normal(heads, dim) for name in ("q", "k", "v", "g")} | {"beta": normal(heads)}
    bias = torch.rand(heads * dim, generator=generator, device=device)
    return tensors | {"A_log": torch.zeros(heads, device=device), "dt_bias": -8 + 2 * bias}, normal(heads, dim)


class Side(NamedTuple):
    """What makes a row, or on each rank a part of it."""

    function: Callable[..., Any]
    words: dict[str, Any]

    def forward(self, tensors: dict[str, Tensor], do: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [self.function(**tensors, **GATE, **self.words)[0]]

    def step(self, tensors: dict[str, Tensor], do: Tensor) -> list[Tensor]:
        """o and the gradients of all tensors."""
        leaves = leaves_of(tensors)
        o = self.function(**leaves, **GATE, **self.words)[0]
        return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do)]

    def layers(self, count: int, tensors: dict[str, Tensor], do: Tensor) -> None:
        """The forward of all layers, and the backward from the last to the first."""
        leaves = leaves_of(tensors)
        results = [self.function(**leaves, **GATE, **self.words)[0] for _ in range(count)]
        while results:
            torch.autograd.grad(results.pop(), list(leaves.values()), do)

    def times(self, rank: Rank, tensors: dict[str, Tensor], do: Tensor) -> Row:
        found: Row = {name: rank.milliseconds(functools.partial(call, tensors, do))
                      for name, call in (("forward", self.forward), ("step", self.step))}
        if rank.layers:
            all_layers = functools.partial(self.layers, rank.layers, tensors, do)
            found["layer"] = rank.milliseconds(all_layers) / rank.layers
        return found


def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().requires_grad_() for name, x in tensors.items()}


def furthest(rank: Rank, results: list[Tensor], whole: list[Tensor], names: tuple[str, ...]) -> tuple[float, str]:
    """The result of all ranks that is furthest from the whole row's, relative in the norm, and its name."""
    apart = []
    for name, x, y in zip(names, results, whole, strict=True):
        if name in PER_TOKEN or name == "o":
            sums = torch.stack([(x.float() - rank.part(y).float()).norm() ** 2, rank.part(y).float().norm() ** 2])
        else:
            dist.all_reduce(x)                                       # a parameter's gradient is a sum over ranks
            sums = torch.stack([(x.float() - y.float()).norm() ** 2, y.float().norm() ** 2])
        dist.all_reduce(sums)
        apart.append(((sums[0] / sums[1]).sqrt().item(), name))
    return max(apart)


def at_once(**words: Any) -> Any:
    """A call none of whose forwards is in two halves."""
    with forcing(halves=False):
        return kda.chunk_kda(**words)


def sides_of(device: torch.device, offsets: Tensor, fla: bool) -> dict[str, Side]:
    """Return, by name, the functions that compute the row on several ranks."""
    def over_ranks(way: str) -> Side:
        return Side(kda.chunk_kda, {"cp_context": kda.parallel.build_cp_context(offsets, exchange=way)})

    sides = {way: over_ranks(way) for way in EXCHANGES}
    sides["forwards at once"] = sides["gather"]._replace(function=at_once)
    if fla:
        from fla.ops.cp import build_cp_context
        from fla.ops.kda import chunk_kda

        context = build_cp_context(offsets, group=dist.group.WORLD)
        sides["FLA"] = Side(chunk_kda, {"cp_context": context, "safe_gate": True})
    return sides


def in_halves(rank: Rank, mine: dict[str, Tensor], o: Tensor) -> Row:
    """The halves of a forward of a rank's tokens alone, and how far its o is from that of a forward at once."""
    B, T, H, K = mine["k"].shape
    states = dict(cu_seqlens=torch.tensor([0, T], device=rank.device), initial_state=o.new_zeros(
        B, H, K, K, dtype=torch.float32))
    call = Call("chunk_kda", Inputs(**mine, **states), Options(scale=K**-0.5, **GATE))
    with forcing(halves=True):
        def first(of_map: bool = False) -> Any:
            return halves.begin_forward(call, Save.NOTHING, of_map)

        if (begun := first()) is None:
            return {}
        apart = (begun.finish(call).o.float() - o.float()).norm() / o.float().norm()
        return {"halves apart": apart.item(), "first": rank.milliseconds(first),
                "first_map": rank.milliseconds(lambda: first(True)),
                "second": rank.milliseconds(lambda: begun.finish(call))}


def maps(rank: Rank, mine: dict[str, Tensor], do: Tensor) -> Row:
    """The maps of a rank's tokens alone, and the all-gather of one map."""
    inputs = Inputs(**mine)
    problem = problem_of(Call("chunk_kda", inputs, Options(scale=mine["k"].shape[-1] ** -0.5, **GATE)))
    context = kda.parallel.build_cp_context(torch.tensor([0, rank.world * do.shape[1]], device=rank.device))
    one = segment_map(problem, inputs, "auto", True)
    both = torch.cat([one.M, one.added], -1)
    return {
        "map": rank.milliseconds(lambda: segment_map(problem, inputs, "auto", True)),
        "map_bwd": rank.milliseconds(lambda: segment_map_bwd(problem, inputs, do, None, "auto")),
        "send": rank.milliseconds(lambda: exchange.gather(context, both, "chunk_kda")),
        "bytes": both.nbytes,
    }


def measured(rank: Rank, tokens: int, heads: int, dim: int, fla: bool) -> list[Row]:
    tensors, do = row_of(tokens, heads, dim, rank.device)
    mine, do_of_rank = rank.parts(tensors), rank.part(do)
    shape: Row = {"tokens": tokens, "heads": heads, "dim": dim, "ranks": rank.world}
    alone = Side(kda.chunk_kda, {})
    whole = alone.step(tensors, do)
    rows = [
        shape | {"side": "one GPU"} | alone.times(rank, tensors, do),
        shape | {"side": "a part by itself"} | alone.times(rank, mine, do_of_rank) | maps(rank, mine, do_of_rank)
        | in_halves(rank, mine, alone.forward(mine, do_of_rank)[0]),
    ]
    if rank.world == 1:
        return rows
    for name, side in sides_of(rank.device, torch.tensor([0, tokens], device=rank.device), fla).items():
        row: Row = shape | {"side": name}
        try:
            row["apart"], row["of"] = max(
                furthest(rank, side.step(mine, do_of_rank), whole, ("o", *tensors)),
                furthest(rank, side.forward(mine, do_of_rank), whole[:1], ("o",)))
            if row["apart"] <= CLOSE:
                row |= side.times(rank, mine, do_of_rank)
        except Exception as failure:
            if name != "FLA":
                raise
            row["not run"] = f"{type(failure).__name__}: {failure}"[:300]      # a peer that does not run here
        rows.append(row)
    return rows


def on_a_rank(number: int, world: int, port: int, args: argparse.Namespace, pipe: Connection) -> None:
    rank = Rank(number, world, join(number, world, port, args.device, 120), args.calls, args.layers)
    for tokens, heads in args.shape:
        rows = measured(rank, tokens, heads, args.dim, args.fla)
        if number == 0:
            pipe.send(rows)
    dist.barrier()
    dist.destroy_process_group()


def started(world: int, args: argparse.Namespace) -> tuple[Connection, list[Any]]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    port = free_port()
    processes = [context.Process(target=on_a_rank, args=(n, world, port, args, theirs)) for n in range(world)]
    for process in processes:
        process.start()
    theirs.close()
    return ours, processes


def shape(text: str) -> tuple[int, int]:
    tokens, heads = map(int, text.split("x"))
    return tokens, heads


def printed(rows: list[Row]) -> str:
    def number(x: float | None) -> str:
        return "" if x is None else f"{x:.2g}" if x < 1 else f"{x:,.2f}"

    numbers = "forward", "step", "layer", "map", "map_bwd", "first", "first_map", "second", "send", "apart"
    cells = [
        [f"{r['tokens']:,} x {r['heads']}", str(r["ranks"]), r["side"], *(number(r.get(name)) for name in numbers)]
        for r in rows
    ]
    return "\n".join(table(cells, ("tokens x heads", "ranks", "side", *numbers), "lrl" + "r" * len(numbers)))


def main() -> int:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--ranks", type=common.numbers, default=[2])
    parser.add_argument("--shape", type=shape, action="append", help="TOKENSxHEADS")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--layers", type=int, default=0, help="also a step of so many layers; one layer's share of it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--fla", action="store_true", help="FLA's context parallelism beside")
    args = parser.parse_args()
    args.shape = args.shape or [(131072, 64), (131072, 32), (524288, 8)]
    for tokens, _ in args.shape:
        if any(tokens % world for world in args.ranks):
            parser.error(f"{tokens} tokens are not a multiple of every number of ranks in {args.ranks}")
    rows: list[Row] = []
    document = dict(
        what="A row over several GPUs (benchmarks/several_gpus.py); milliseconds, medians, the slowest rank",
        device=torch.cuda.get_device_name() if args.device == "cuda" else "CPU", torch=torch.__version__,
        kda=kda.__version__, date=str(datetime.date.today()), rows=rows,
    )
    failed = 0
    for world in args.ranks:
        pipe, processes = started(world, args)
        try:
            while True:
                rows += (more := pipe.recv())
                print(printed(more), flush=True)
                common.write(args.json, document)
        except EOFError:
            pass
        for process in processes:
            process.join()
            failed |= process.exitcode != 0
    wrong = [row for row in rows if max(row.get("apart", 0), row.get("halves apart", 0)) > CLOSE]
    for row in wrong:
        print(f"wrong, not timed: {row}", file=sys.stderr)
    return int(bool(failed or wrong))


if __name__ == "__main__":
    sys.exit(main())
