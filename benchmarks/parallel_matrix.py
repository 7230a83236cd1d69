"""Sequences over two GPUs of one host against one GPU: all options of a context, any three of them together.

    python -m benchmarks.parallel_matrix --json FILE --minutes 4
    python -m benchmarks.parallel_matrix --device cpu --only hops       gloo and the reference, to see that it runs

Each case is a step of the whole row on one GPU and of its parts on two.  o, final states and all gradients of the parts
may be twice as far from float64 as those of one GPU, and FLOOR more.  A step is repeated, and in between all memory
that torch has freed is filled with nan: that shows a kernel that works in freed memory, or reads what nothing wrote.
After these cases come a step in a CUDA graph for each exchange, DTensors, FSDP2, the layer with a context for each
layout, and a rank that skips a backward, which must end in an error on both ranks.

One process for each GPU runs all cases; after a failure both are started again.  FILE has a row for each case; cases
that are "ok" in it do not run again.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import kda
from kda.model.force import forcing
from kda.parallel import layout as layouts

from . import common
from .group import free_port, join

Tensor = torch.Tensor
Case = dict[str, Any]

WORLD = 2
OPTIONS: dict[str, tuple[Any, ...]] = {
    "exchange": ("gather", "chain", "tree", "hops"),
    "layout": ("contiguous", "lengths", "zigzag"),
    "sequences": ("one", "packed"),
    "kept": (False, True),
    "gate": ("bounded", "softplus"),
    "dim": (128, 64),
    "heads": ("2", "2 for 4"),               # heads of q and k for those of v
    "backend": ("auto", "triton"),
}
GRAPH = "a step in a CUDA graph, exchange "
LAYER = "a layer with a context, layout "
LONG = "a long row in halves, kept "         # whose backward is one grid that begins before the exchange
HALVES = {f"a forward in halves, {gate}, dim {dim}": {"gate": gate, "dim": dim}
          for gate in OPTIONS["gate"] for dim in OPTIONS["dim"]}
OTHERS = (*(GRAPH + exchange for exchange in OPTIONS["exchange"]), "DTensors", "FSDP2",
          *(LAYER + layout for layout in OPTIONS["layout"]), *HALVES, *(f"{LONG}{kept}" for kept in OPTIONS["kept"]),
          "a rank that skips a backward")
ROWS = ("q", "k", "v", "g", "beta")
TOKENS = {"cuda": 1300, "cpu": 84}
REPEATS = 3
FLOOR = 1e-3                                 # relative to the norm
LIMIT = 60                                   # seconds that a rank waits for another
PATIENCE = 150                               # seconds for a case, with its kernels


def possible(case: Case) -> bool:
    return not (case.get("layout") == "zigzag" and case.get("exchange", "gather") != "gather")


def covering(many: int = 3) -> list[Case]:
    """Few cases, among which all values of so many options meet in all ways, from those that show most."""
    cases = [case for values in itertools.product(*OPTIONS.values()) if possible(case := dict(zip(OPTIONS, values)))]
    random.Random(0).shuffle(cases)
    shown = {name_of(case): {*itertools.combinations(case.items(), many)} for case in cases}
    missing, cover = set().union(*shown.values()), []
    while missing:
        best = max(cases, key=lambda case: len(missing & shown[name_of(case)]))
        missing -= shown[name_of(best)]
        cover.append(best)
    return cover


def cases() -> list[Case | str]:
    return [*covering(), *OTHERS]


def name_of(case: Case | str) -> str:
    return case if isinstance(case, str) else ", ".join(f"{option} {value}" for option, value in case.items())


class Rank(NamedTuple):
    """One process of the group."""

    number: int
    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


class Row(NamedTuple):
    """A row of tokens on one GPU: what goes in, and what comes out."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]
    do: Tensor
    dht: Tensor
    offsets: list[int]


def row_of(case: Case, rank: Rank) -> Row:
    """The same on every rank.  Gates are so slow that a sequence's first tokens count at its end."""
    T, D, H = case.get("tokens", TOKENS)[rank.device.type], case["dim"] if rank.cuda else 8, 2
    HV = 2 * H if case["heads"] == "2 for 4" else H
    offsets = [0, T] if case["sequences"] == "one" else [0, T // 5, T // 5, T // 2 + 1, T - 3]
    generator = torch.Generator().manual_seed(len(name_of(case)))
    dtype = torch.bfloat16 if rank.cuda else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(rank.device, dtype)

    N = len(offsets) - 1
    tensors = {name: normal(1, T, heads, D) for name, heads in (("q", H), ("k", H), ("v", HV), ("g", HV))}
    tensors |= {"beta": normal(1, T, HV), "initial_state": normal(N, HV, D, D, dtype=torch.float32)}
    tensors |= {"A_log": normal(HV, dtype=torch.float32) / 4 - 4, "dt_bias": normal(HV * D, dtype=torch.float32)}
    options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                   lower_bound=-0.2 if case["gate"] == "bounded" else None, output_final_state=True,
                   disable_recompute=case["kept"])
    do, dht = normal(1, T, HV, D), normal(N, HV, D, D, dtype=torch.float32)
    return Row(tensors, options, do, dht, offsets)


def step(tensors: dict[str, Tensor], do: Tensor, dht: Tensor, **options: Any) -> dict[str, Tensor]:
    """o, the final states, and the gradients of all tensors."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o, ht = kda.chunk_kda(**leaves, **options)
    grads = torch.autograd.grad((o, ht), list(leaves.values()), (do, dht.to(ht.dtype)))
    return {"o": o.detach(), "ht": ht.detach()} | dict(zip((f"d{name}" for name in leaves), grads))


def poison(rank: Rank) -> None:
    """Fill every block that torch's allocator keeps for later calls with nan."""
    if not rank.cuda:
        return
    torch.cuda.synchronize()
    free = [block["size"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]
            if block["state"] == "inactive"]
    blocks = [torch.empty(size, dtype=torch.uint8, device=rank.device) for size in sorted(free, reverse=True)]
    for block in blocks:
        block.fill_(255)                     # a nan in every floating-point type of 16 bits and more


class View(NamedTuple):
    """What a rank has of the row."""

    tokens: list[int]
    rows: list[int]                          # its sequences
    ends: Tensor                             # those that end here
    begun: Tensor                            # the numbers of those that began on another rank


def view_of(context: Any, offsets: list[int], device: torch.device) -> View:
    edges = layouts.edges_of(context.lengths)
    tokens, rows, ends = [], [], []
    for part in context.parts:
        tokens += range(edges[part.number], edges[part.number + 1])
        mine = layouts.sequences_of(offsets, edges, part.number)
        rows += mine
        ends += [offsets[n + 1] <= edges[part.number + 1] for n in mine]
    begun = [part.first for part in context.parts if part.before]
    return View(tokens, rows, torch.tensor(ends, dtype=torch.bool, device=device),
                torch.tensor(begun, dtype=torch.long, device=device))


def part_of(view: View, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's part of what one GPU found."""
    part = {}
    for name, x in results.items():
        if name == "o" or name[1:] in ROWS:
            x = x[:, view.tokens]
        elif name == "ht":
            x = x[view.rows][view.ends]
        elif name == "dinitial_state":
            x = x[view.rows].index_fill(0, view.begun, 0)                      # their states came from another rank
        part[name] = x
    return part


def words_of(layout: str, T: int) -> dict[str, Any]:
    """The arguments of build_cp_context for a layout of T tokens."""
    uneven = [T // 3 + 1, T - T // 3 - 1]
    return {"contiguous": {}, "lengths": {"lengths": uneven}, "zigzag": {"layout": "zigzag"}}[layout]


def context_of(case: Case, row: Row, rank: Rank) -> Any:
    T = row.do.shape[1]
    words = {"exchange": case["exchange"]} | words_of(case["layout"], T)
    offsets = torch.tensor(row.offsets, device=rank.device)
    if row.offsets[-1] < T and case["layout"] != "lengths":                    # equal parts end with the last sequence
        offsets[-1] = T
        row.offsets[-1] = T
    return kda.parallel.build_cp_context(offsets, dist.group.WORLD, **words)


def differences(case: Case, rank: Rank) -> dict[str, str]:
    """What is too far from float64, in words."""
    row, backend = row_of(case, rank), case["backend"] if rank.cuda else "reference"
    context = context_of(case, row, rank)
    packed = {"cu_seqlens": torch.tensor(row.offsets, device=rank.device)}
    one = step(row.tensors, row.do, row.dht, **row.options, **packed, backend=backend)
    wide = {name: x.double() for name, x in row.tensors.items()}
    exact = step(wide, row.do.double(), row.dht.double(), **row.options, **packed, backend="reference")
    view = view_of(context, row.offsets, rank.device)
    mine = {name: x[:, view.tokens] if name in ROWS else x[view.rows] if name == "initial_state" else x
            for name, x in row.tensors.items()}
    dht = row.dht[view.rows] * view.ends.view(-1, 1, 1, 1)                     # a state at a cut is no output of one
    one, exact = part_of(view, one), part_of(view, exact)
    wrong = {}
    for turn in range(REPEATS):
        poison(rank)
        results = step(mine, row.do[:, view.tokens], dht, **row.options, cp_context=context, backend=backend)
        results["ht"] = results["ht"][view.ends]
        for name in ("dA_log", "ddt_bias"):
            dist.all_reduce(results[name])
        wrong |= {f"{name}, turn {turn}": words for name, words in further(results, one, exact).items()}
    return wrong


def further(results: dict[str, Tensor], one: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, str]:
    """What is too far from float64.  A parameter's gradient is a sum over dg's terms, of a few numbers that may be near
    their exact values by chance on one GPU: it may be as far off as dg."""
    wrong, alone = {}, {name: far(x, exact[name]) for name, x in one.items()}
    for name, x in results.items():
        theirs = max(alone[name], alone["dg"]) if name in ("dA_log", "ddt_bias") else alone[name]
        if not (ours := far(x, exact[name])) <= 2 * theirs + FLOOR:
            wrong[name] = f"{ours:.1e} from float64; one GPU {theirs:.1e}"
    return wrong


def far(x: Tensor, exact: Tensor) -> float:
    if x.shape != exact.shape:
        return float("inf")
    norm = exact.norm().item()
    return (x.double() - exact).norm().item() / norm if norm else float(x.abs().max()) if x.numel() else 0.0


# ---- other cases


BASE: Case = {option: values[0] for option, values in OPTIONS.items()}


def captured(rank: Rank, exchange: str) -> dict[str, str]:
    """A replayed step has the bits of a call, also where memory is poisoned in between."""
    if not rank.cuda:
        return {}
    case = BASE | {"exchange": exchange}
    row = row_of(case, rank)
    context = context_of(case, row, rank)
    view = view_of(context, row.offsets, rank.device)
    mine = {name: x[:, view.tokens].contiguous() if name in ROWS else x for name, x in row.tensors.items()}
    del mine["initial_state"]
    do = row.do[:, view.tokens].contiguous()
    dht = row.dht * 0
    words = dict(row.options, cp_context=context)
    for _ in range(2):
        step(mine, do, dht, **words)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(mine, do, dht, **words)
    wrong = {}
    for turn in range(REPEATS):
        mine["v"].copy_(mine["v"].roll(1, 1))
        poison(rank)
        graph.replay()
        called = step(mine, do, dht, **words)
        other = [name for name, x in called.items() if not torch.equal(x, replayed[name])]
        wrong |= {f"{name}, turn {turn}": "other bits" for name in other}
    torch.cuda.synchronize()
    return wrong


def on_a_mesh(rank: Rank) -> dict[str, str]:
    """DTensors by heads, by batch and along the sequence."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(rank.device.type, (WORLD,))
    row = row_of(BASE | {"heads": "2 for 4"}, rank)
    tensors = {name: x for name, x in row.tensors.items() if name != "initial_state"}
    options = dict(row.options, output_final_state=False)
    wrong = {}
    for way, rows_axis, others_axis in (("heads", 2, 0), ("sequence", 1, None)):
        def results(**words: Any) -> list[Tensor]:
            leaves = {name: x.detach().requires_grad_() for name, x in words["tensors"].items()}
            o, _ = kda.chunk_kda(**leaves, **options, **words["more"])
            return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), words["do"])]

        placements = {name: Shard(rows_axis) if name in ROWS else Replicate() if others_axis is None else Shard(0)
                      for name in tensors}
        more = {}
        if way == "sequence":
            more["cp_context"] = kda.parallel.build_cp_context(torch.tensor(row.offsets, device=rank.device),
                                                               mesh.get_group(0))
        sharded = {name: distribute_tensor(x, mesh, [placements[name]]) for name, x in tensors.items()}
        do = distribute_tensor(row.do, mesh, [Shard(rows_axis)])
        poison(rank)
        gathered = [x.full_tensor() for x in results(tensors=sharded, do=do, more=more)]
        one = results(tensors=tensors, do=row.do, more={})
        wide = {name: x.double() for name, x in tensors.items()}
        exact = results(tensors=wide, do=row.do.double(), more={"backend": "reference"})
        names = ("o", *(f"d{name}" for name in tensors))
        ours, theirs, right = (dict(zip(names, results)) for results in (gathered, one, exact))
        wrong |= {f"{way}: {name}": words for name, words in further(ours, theirs, right).items()}
    return wrong


def fully_sharded(rank: Rank) -> dict[str, str]:
    """The layer under FSDP2, each rank with its own batch, against the layer on both batches."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    from kda.nn import KimiDeltaAttention

    D, dim = (256, 64) if rank.cuda else (32, 8)
    dtype = torch.bfloat16 if rank.cuda else torch.float32

    def layer() -> Any:
        torch.manual_seed(0)
        return KimiDeltaAttention(hidden_size=D, num_heads=2, head_dim=dim, layer_idx=0).to(rank.device, dtype)

    x = torch.randn(WORLD, 200, D, generator=torch.Generator().manual_seed(1)).to(rank.device, dtype)
    one, many = layer(), fully_shard(layer(), mesh=init_device_mesh(rank.device.type, (WORLD,)))
    one(x).square().mean().backward()
    wrong = {}
    for turn in range(REPEATS):
        many.zero_grad()
        poison(rank)
        many(x[rank.number:rank.number + 1]).square().mean().backward()
        for (name, p), q in zip(one.named_parameters(), many.parameters()):
            apart = far(q.grad.full_tensor().double(), p.grad.double())        # two roundings of 16 bits
            if not apart <= (0.02 if rank.cuda else 1e-4):
                wrong[f"{name}, turn {turn}"] = f"{apart:.1e} from one GPU"
    return wrong


def in_parts(rank: Rank, layout: str) -> dict[str, str]:
    """The layer on packed sequences in parts, with the halos of its convolutions, against the layer on one GPU."""
    from kda.nn import KimiDeltaAttention

    T, D, dim = TOKENS[rank.device.type], *((256, 64) if rank.cuda else (32, 8))
    offsets = [0, T // 5, T // 5, T // 2 + 1, T]
    packed = torch.tensor(offsets, device=rank.device)
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if rank.cuda else torch.float32
    x, dy = (torch.randn(1, T, D, generator=generator).to(rank.device, dtype) for _ in range(2))

    def results(x: Tensor, dy: Tensor, **words: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layer = KimiDeltaAttention(hidden_size=D, num_heads=2, head_dim=dim, layer_idx=0).to(rank.device, dtype)
        layer, x = layer.to(x.dtype), x.detach().requires_grad_()              # float64, too, has rounded weights
        y = layer(x, **words)
        grads = torch.autograd.grad(y, [x, *layer.parameters()], dy)
        return dict(zip(("y", "dx", *(name for name, _ in layer.named_parameters())), (y.detach(), *grads)))

    one = results(x, dy, cu_seqlens=packed)
    with kda.use_backend("reference"):                                         # no other takes float64 on a GPU
        exact = results(x.double(), dy.double(), cu_seqlens=packed)
    context = kda.parallel.build_cp_context(packed, dist.group.WORLD, 4, **words_of(layout, T))
    tokens = view_of(context, offsets, rank.device).tokens
    wrong = {}
    for turn in range(REPEATS):
        poison(rank)
        for name, result in results(x[:, tokens], dy[:, tokens], cp_context=context).items():
            share = (slice(None), tokens) if name in ("y", "dx") else ()
            if not share:
                result = result.float()
                dist.all_reduce(result)                                         # a gradient is a sum over ranks
            ours, theirs = far(result, exact[name][share]), far(one[name][share], exact[name][share])
            if not ours <= 2 * theirs + FLOOR:
                wrong[f"{name}, turn {turn}"] = f"{ours:.1e} from float64; one GPU {theirs:.1e}"
    return wrong


def in_halves(rank: Rank, case: Case) -> dict[str, str]:
    """A step whose forward is in two halves, however short it is."""
    with forcing(halves=True):
        return differences(BASE | case, rank)


SINGLE: dict[str, Callable[[Rank], dict[str, str]]] = {
    **{GRAPH + exchange: functools.partial(captured, exchange=exchange) for exchange in OPTIONS["exchange"]},
    "DTensors": on_a_mesh, "FSDP2": fully_sharded,
    **{LAYER + layout: functools.partial(in_parts, layout=layout) for layout in OPTIONS["layout"]},
    **{name: functools.partial(in_halves, case=case) for name, case in HALVES.items()},
    **{f"{LONG}{kept}": functools.partial(in_halves, case={"kept": kept, "tokens": {"cuda": 40_000, "cpu": 84}})
       for kept in OPTIONS["kept"]},
}


def skipping(number: int, port: int, device: str, pipe: Connection) -> None:
    """Rank 1 skips a backward; both ranks say how they ended."""
    rank = Rank(number, join(number, WORLD, port, device, 20))
    row = row_of(BASE, rank)
    context = context_of(BASE, row, rank)
    view = view_of(context, row.offsets, rank.device)
    leaves = {name: (x[:, view.tokens].contiguous() if name in ROWS else x).detach().requires_grad_()
              for name, x in row.tensors.items()}
    words, numbers, end = dict(row.options, cp_context=context), [], "all steps ran"
    try:
        for turn in range(5):
            o, _ = kda.chunk_kda(**leaves, **words)
            if not (number == 1 and turn == 2):
                o.float().square().sum().backward()
            numbers.append(o.float().norm().item())
    except Exception as error:
        end = f"{type(error).__name__}: {error}"[:300]
    pipe.send((end, numbers))
    os._exit(0)


def a_rank_that_skips(device: str) -> dict[str, str]:
    """Return what is wrong: nothing if both ranks end in an error and earlier numbers are those of the first step."""
    port, context = free_port(), mp.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(WORLD)]
    processes = [context.Process(target=skipping, args=(n, port, device, pipes[n][1])) for n in range(WORLD)]
    for process in processes:
        process.start()
    wrong, deadline = {}, time.monotonic() + PATIENCE
    for n, (ours, theirs) in enumerate(pipes):
        theirs.close()
        try:
            if not ours.poll(max(0.0, deadline - time.monotonic())):
                wrong[f"rank {n}"] = f"no end within {PATIENCE} s"
                continue
            end, numbers = ours.recv()
        except EOFError:
            continue                                                           # NCCL or an assertion ended the process
        if end == "all steps ran" or any(x != numbers[0] for x in numbers):
            wrong[f"rank {n}"] = f"{end}; norms of o {numbers}"
    for process in processes:
        process.kill()
        process.join()
    return wrong


# ---- processes


def serve(number: int, port: int, device: str, pipe: Connection) -> None:
    """Run the cases that come, until the pipe ends."""
    rank = Rank(number, join(number, WORLD, port, device, LIMIT))
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            os._exit(0)                      # NCCL does not let go of a group whose collectives a graph holds
        try:
            pipe.send(("found", SINGLE[case](rank) if isinstance(case, str) else differences(case, rank)))
        except Exception as error:
            pipe.send(("error", {type(error).__name__: f"{error}\n{traceback.format_exc()}"[-2000:]}))


class Pair:
    """The processes of both ranks."""

    def __init__(self, device: str):
        context, port = mp.get_context("spawn"), free_port()
        pipes = [context.Pipe() for _ in range(WORLD)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [context.Process(target=serve, args=(n, port, device, theirs))
                          for n, (_, theirs) in enumerate(pipes)]
        for process, (_, theirs) in zip(self.processes, pipes):
            process.start()
            theirs.close()

    def run(self, case: Case | str) -> tuple[str, dict[str, str]]:
        """The outcome, and what each rank says is wrong."""
        wrong, outcome, deadline = {}, "ok", time.monotonic() + PATIENCE
        for pipe in self.pipes:
            pipe.send(case)
        for n, pipe in enumerate(self.pipes):
            try:
                in_time = pipe.poll(max(0.0, deadline - time.monotonic()))
                kind, answer = pipe.recv() if in_time else ("error", {"time": f"no answer within {PATIENCE} s"})
            except EOFError:
                kind, answer = "error", {"process": "it ended"}
            wrong |= {f"rank {n}: {name}": words for name, words in answer.items()}
            outcome = "error" if "error" in (kind, outcome) else "failed" if wrong else "ok"
        return outcome, wrong

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()


def rows(device: str, cases: list[Case | str], deadline: float) -> Iterator[dict[str, Any]]:
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    pair = None
    for case in cases:
        if time.monotonic() > deadline:
            break
        began = time.monotonic()
        if case == OTHERS[-1]:
            errors = a_rank_that_skips(device)
            outcome = "failed" if errors else "ok"
        else:
            pair = pair or Pair(device)
            outcome, errors = pair.run(case)
            if outcome != "ok" or name_of(case).startswith(GRAPH):             # a graph keeps its collectives
                pair.end()
                pair = None
        yield {
            "case": name_of(case), "outcome": outcome, "errors": errors,
            "seconds": round(time.monotonic() - began, 1), "card": card,
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
        }
    if pair is not None:
        pair.end()


def main() -> int:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--minutes", type=float, default=10, help="that all cases may take  [default: 10]")
    parser.add_argument("--only", metavar="TEXT", help="cases whose names contain it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < WORLD:
        print(f"needs {WORLD} GPUs; found {torch.cuda.device_count()}. --device cpu runs it with gloo.")
        return 3
    done = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    done = [row for row in done if row["outcome"] == "ok"]
    ran = {row["case"] for row in done}
    chosen = [case for case in cases() if name_of(case) not in ran and (args.only or "") in name_of(case)]
    for row in rows(args.device, chosen, time.monotonic() + 60 * args.minutes):
        done.append(row)
        print(f"{row['outcome']:7} {row['seconds']:6.1f} s  {row['case']}", flush=True)
        for name, words in row["errors"].items():
            print(f"        {name}: {words}", flush=True)
        common.write(args.json, done)
    bad = sum(row["outcome"] != "ok" for row in done)
    print(f"{len(done)} of {len(ran) + len(chosen)} cases ran, {bad} are not ok")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
