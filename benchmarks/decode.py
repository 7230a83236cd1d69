"""Decoding and short prompts on the Triton backend: `python -m benchmarks.decode`, on a GPU.

Each call reads and writes one state for each of N sequences in a pool, in place.  Calls are replayed from a CUDA graph
that walks over pools of four times the L2 cache, as the layers of a model do; the time is that of one of them.  Results
are compared with the reference in float32 before anything is timed.  Bytes are those of states, q, k, v, g, beta and o;
beside them stands what a large copy reaches in the same run.

    python -m benchmarks.decode --heads 32 --sequences 1,8,64 --tokens 1 --states kv,vk
    python -m benchmarks.decode --columns 8,16,32 --warps 1,2,4          # instead of the plan's own choice
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from kda.backends.reference import launch as reference
from kda.backends.triton.decode import launch, recurrent_plan
from kda.checks.calls import Call, problem_of
from kda.model.problem import Inputs, Options, Problem
from ptxkit.commands.layout import table

from . import common

K = V = 128
REPLAYS, L2_TIMES = 21, 4
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


def make(N: int, HV: int, T: int, order: str, states: torch.dtype, device: str) -> tuple[Problem, Inputs]:
    """N rows of T tokens; each sequence has a slot somewhere in a pool of N + 1."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device, dtype=torch.float32).to(dtype)

    x = Inputs(
        q=normal(N, T, HV, K), k=normal(N, T, HV, K), v=normal(N, T, HV, V), g=normal(N, T, HV, K),
        beta=normal(N, T, HV), A_log=torch.rand(HV, generator=random, device=device), dt_bias=normal(HV * K),
        initial_state=normal(N + 1, HV, K, V, dtype=states),
        ssm_state_indices=(1 + torch.randperm(N, generator=random, device=device)).int(),
    )
    options = Options(
        scale=K**-0.5, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        lower_bound=-5.0, state_v_first=order == "vk", inplace_final_state=True,
    )
    return problem_of(Call("fused_recurrent_kda", x, options)), x


def moved(x: Inputs, T: int) -> int:
    """Bytes that a call cannot do without."""
    N, _, HV, _ = x.q.shape
    rows = N * T * HV * (3 * K + 2 * V + 1) * x.q.element_size()
    return 2 * N * HV * K * V * x.initial_state.element_size() + rows


def error(p: Problem, x: Inputs) -> float:
    """The largest difference from the reference, over what is allowed: 1 is too much."""
    ours, exact = (x._replace(initial_state=x.initial_state.clone()) for _ in range(2))
    o, _ = launch.recurrent(p, ours)
    floats = {n: t.float() for n, t in exact._asdict().items() if t is not None and t.is_floating_point()}
    exact = exact._replace(**floats)
    o_exact, _ = reference.recurrent(p, exact)
    return max(
        float((a.float() - b).abs().max() / b.abs().max()) / TOLERANCE[a.dtype]
        for a, b in ((o, o_exact), (ours.initial_state, exact.initial_state))
    )


def graph_of(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def seconds(calls: list[Callable[[], Any]]) -> float:
    """Return the time of one call, replayed among the others: the median."""
    graph, taken = graph_of(calls), []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(taken)


def copy_speed(device: str) -> float:
    """Bytes per second, read and written, of a kernel that copies 1 GiB: a graph's copy reaches two thirds."""
    source = torch.zeros(1 << 28, device=device)
    target = torch.empty_like(source)
    return 8 * source.numel() / seconds([lambda: torch.mul(source, 1, out=target)])


def measure(p: Problem, x: Inputs) -> float:
    """Seconds of a call; there are as many pools as it takes to push each other out of L2."""
    states = x.initial_state.numel() * x.initial_state.element_size()
    L2 = torch.cuda.get_device_properties(x.q.device).L2_cache_size
    pools = [torch.randn_like(x.initial_state) for _ in range(max(4, -(-L2_TIMES * L2 // states)))]
    return seconds([lambda pool=pool: launch.recurrent(p, x._replace(initial_state=pool)) for pool in pools])


def chosen(
    columns: int, warps: int, plan: Callable = recurrent_plan.config
) -> Callable[[Problem, int], recurrent_plan.RecurrentConfig]:
    def config(p: Problem, sms: int) -> recurrent_plan.RecurrentConfig:
        found = plan(p, sms)
        return recurrent_plan.RecurrentConfig(columns or found.BV, warps or found.num_warps)

    return config


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--heads", type=common.numbers, default=[32, 64, 96])
    parser.add_argument("--sequences", type=common.numbers, default=[1, 4, 16, 64, 256])
    parser.add_argument("--tokens", type=common.numbers, default=[1])
    parser.add_argument("--states", type=common.words, default=["kv", "vk"], help="orders: kv, vk")
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--columns", type=common.numbers, default=[0],
                        help="of the state that a program holds; 0: the plan's")
    parser.add_argument("--warps", type=common.numbers, default=[0], help="of a program; 0: the plan's")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    sms, copy = torch.cuda.get_device_properties(device).multi_processor_count, copy_speed(str(device))
    found = []
    shapes = itertools.product(args.heads, args.sequences, args.tokens, args.states, args.columns, args.warps)
    for HV, N, T, order, columns, warps in shapes:
        recurrent_plan.config = chosen(columns, warps)
        launch._prepared.cache_clear()
        p, x = make(N, HV, T, order, getattr(torch, args.state_dtype), str(device))
        wrong, c = error(p, x), recurrent_plan.config(p, sms)
        if wrong > 1:
            raise SystemExit(f"{p}, {c}: the result is {wrong:.1f} times as far off as allowed; nothing was timed.")
        taken = measure(p, x)
        found.append({
            "HV": HV, "N": N, "T": T, "states": order, "BV": c.BV, "warps": c.num_warps, "error": wrong,
            "seconds": taken, "bytes": moved(x, T), "share_of_copy": moved(x, T) / taken / copy,
        })
    rows = [
        (f"{r['HV']}", f"{r['N']}", f"{r['T']}", r["states"], f"{r['BV']}x{r['warps']}", f"{1e6 * r['seconds']:.1f}",
         f"{r['bytes'] / r['seconds'] / 1e12:.2f}", f"{r['share_of_copy']:.0%}")
        for r in found
    ]
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, K=V={K} bfloat16, states {args.state_dtype}; a copy of 1 GiB: {copy / 1e12:.2f} TB/s")
    header = ("HV", "N", "T", "states", "columns x warps", "us", "TB/s", "of a copy")
    print("\n".join(table(rows, header=header, align="rrrlrrrr")))
    common.write(args.json, {"gpu": gpu, "copy": copy, "found": found})


if __name__ == "__main__":
    main()
