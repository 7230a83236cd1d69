"""`kda.decode_step` on the Triton backend beside its parts: `python -m benchmarks.decode_step`, on a GPU.

Before anything is timed, the outputs and the updated pools of a few sequences are held against the reference in
float32, and the outputs of all sequences against the parts.  Then calls are replayed from CUDA graphs that walk over
pools of four times the L2 cache, as the layers of a model do; the time is that of one of them.  `parts` is the layer
without decode_step: three convolutions, three new tails, the recurrence with norms and gate, the gated norm;
`recurrence` is that kernel alone, in brackets its share of the copy, by the bytes of its own.
Bytes are those that a call cannot do without; beside them stands what a large copy reaches in the same run.

    python -m benchmarks.decode_step --json decode_step.json
    python -m benchmarks.decode_step --heads 32 --configs plan,4x64,4x128x64x2  # as parse_config says
    python -m benchmarks.decode_step --heads 32 --sequences 64 --drafts 3 --tree      # speculative decoding
    python -m benchmarks.decode_step --recurrences vk,kv,vk:8x2 --drafts 3      # orders of states, columns x warps
    python -m benchmarks.decode_step --device cpu --heads 2 --sequences 2 --head-dim 16 --dtype float32
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import kda
from kda import nn
from kda.backends.common import triton_launch
from kda.backends.common.routine import forget_routines
from kda.backends.triton.decode import recurrent_plan, step_plan
from kda.model.force import forcing
from kda.nn.sequences import Sequences
from kda.tools.measure.clocks import CpuClock, CudaClock, clock_of
from kda.tools.measure.decoding import pools, time_of_one
from kda.tools.verify.steps import bytes_moved, copied, make_step, run_step
from ptxkit.commands.render import table
from ptxkit.compile.fetching import fetch_all
from ptxkit.temporary import replaced

from . import common

REPLAYS, FEW, SECONDS = 15, 3, 60.0
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 2e-5}
Arguments = dict[str, Any]


def parse_config(text: str) -> step_plan.StepConfig | None:
    """Warps x piece [x rows x blocks ahead]; None: the plan's own."""
    if text == "plan":
        return None
    return step_plan.StepConfig(*map(int, text.split("x")))


def using(config: step_plan.StepConfig | None) -> contextlib.AbstractContextManager[None]:
    """Launch decode_step in this configuration inside the block; None: in that of its plan."""
    return forcing(configs=(("decode_step", config),) if config else ())


def arguments(N: int, H: int, states: str, args: argparse.Namespace) -> Arguments:
    return make_step(
        N, args.drafts + 1, H, None, args.head_dim, args.head_dim, dtype=args.dtype, states=states, gate="bounded",
        drafts=args.drafts > 0, tree=args.tree, pool=N + 1, device=args.device,
    )


# the parts


def tails_of(x: Arguments) -> list[torch.Tensor]:
    """Return the tails of q, k and v for the sequences of a call, in the form in which the layer keeps them."""
    W, sizes = x["conv_weight"].shape[1], [x[name].flatten(2).shape[2] for name in ("q", "k", "v")]
    return [t.contiguous() for t in x["conv_states"][x["ssm_state_indices"].long(), : W - 1].split(sizes, -1)]


def parts(x: Arguments, tails: list[torch.Tensor], weights: list[torch.Tensor]) -> tuple[torch.Tensor, list]:
    """o and the new tails; states are updated in place.  With drafts every token has a slot for its state."""
    rows, convolved = Sequences.of_rows(len(x["q"])), []
    mixed = [x[name].flatten(2) for name in ("q", "k", "v")]
    for each, tail, weight in zip(mixed, tails, weights):
        convolved.append(nn.short_convolution(each, weight, None, tail, rows))
    new = [nn.next_state(each, weights[0].shape[-1], tail, rows) for each, tail in zip(mixed, tails)]
    q, k, v = (t.unflatten(2, x[name].shape[2:]) for t, name in zip(convolved, ("q", "k", "v")))
    names = ("A_log", "dt_bias", "lower_bound", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
             "use_beta_sigmoid_in_kernel")
    accepted = x["num_accepted_tokens"] if x["slots"].dim() == 2 else None
    o, _ = kda.fused_recurrent_kda(
        q, k, v, x["g"], x["beta"], **{name: x[name] for name in names}, initial_state=x["states"],
        ssm_state_indices=x["slots"], num_accepted_tokens=accepted, state_v_first=True,
    )
    return nn.gated_rms_norm(o, x["norm_gate"], x["norm_weight"]), new


def for_parts(x: Arguments) -> Arguments:
    """The call with what the parts want: a slot for each sequence, or, with drafts, for each of its tokens."""
    slots, T, pool = x["ssm_state_indices"], x["q"].shape[1], len(x["states"])
    if T > 1:
        slots = slots[:, None] + pool * torch.arange(T, dtype=torch.int32, device=slots.device)
    return x | {"slots": slots, "states": x["states"] if T == 1 else x["states"].repeat(T, 1, 1, 1)}


def parts_of(x: Arguments) -> Callable[[], tuple[torch.Tensor, list]]:
    sizes = [x[name].flatten(2).shape[2] for name in ("q", "k", "v")]
    weights = [w.contiguous() for w in x["conv_weight"].split(sizes, 0)]
    return functools.partial(parts, x, tails_of(x), weights)


class Recurrence(NamedTuple):
    """The recurrence alone, in words: "vk", the order of its states, "kv:8x4", with columns x warps of a program, or
    "vk+last", which writes the state behind a sequence's last token alone, as behind a short prompt."""

    words: str

    @property
    def name(self) -> str:
        return "recurrence" if self.words == "vk" else f"recurrence {self.words}"

    def call(self, x: Arguments, **options: Any) -> Callable[[], Any]:
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound")
        slots = x["ssm_state_indices"] if self.words.endswith("+last") else x["slots"]
        return functools.partial(
            kda.fused_recurrent_kda, **{name: x[name] for name in names}, initial_state=x["states"],
            ssm_state_indices=slots, state_v_first=self.words.startswith("vk"), use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **options,
        )

    def planned(self) -> contextlib.AbstractContextManager[None]:
        """Launch the kernel in the configuration of the words inside the block."""
        sizes = self.words.removesuffix("+last").partition(":")[2]
        chosen = recurrent_plan.RecurrentConfig(*map(int, sizes.split("x"))) if sizes else None
        return forcing(configs=(("recurrent", chosen),) if chosen else ())

    def error(self, x: Arguments, backend: str) -> float:
        """Return the distance of o and the states from the float32 reference, on the first sequences."""
        few = for_parts(first_of(x))
        mine, exact = copied(few), copied(few, torch.float32)
        o, expected = self.call(mine, backend=backend)()[0], self.call(exact, backend="reference")()[0]
        return max(distance(o, expected), distance(mine["states"], exact["states"]))


def moved(x: Arguments) -> int:
    """Return the bytes that the recurrence alone cannot do without."""
    N, T, H, D = x["v"].shape
    rows = N * T * H * (5 * D + 1) * x["q"].element_size()
    return 2 * N * H * D * D * x["states"].element_size() + rows


# right first


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, over what is allowed: 1 is too much."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30)) / TOLERANCE[a.dtype]


def error(x: Arguments, backend: str) -> float:
    """Return the distance of o and each updated pool from the float32 reference, on the first sequences."""
    few = first_of(x)
    ours = run_step(copied(few), backend=backend)
    exact = run_step(copied(few, torch.float32) | {"states": few["states"].clone()}, backend="reference")
    return max(distance(ours[name], exact[name]) for name in exact)


def first_of(x: Arguments) -> Arguments:
    """Return the call of the first sequences."""
    return {n: t[:FEW] if torch.is_tensor(t) and len(t) == len(x["q"]) and n in EACH else t for n, t in x.items()}


EACH = ("q", "k", "v", "g", "beta", "norm_gate", "ssm_state_indices", "num_accepted_tokens", "parents")


def error_of_parts(x: Arguments, backend: str) -> float:
    """Return a quarter of o's distance from that of the parts, which round to their dtype between them: four times as
    much.  The parts know no trees."""
    if x.get("parents") is not None:
        return 0.0
    mine, theirs = copied(x), for_parts(copied(x))
    return distance(run_step(mine, backend=backend)["o"], parts_of(theirs)()[0]) / 4


# timing


@functools.cache
def clock(device: str) -> CpuClock | CudaClock:
    return clock_of(device)


def seconds(functions: list[Callable[[], Any]], device: str) -> float:
    """Return the time of one call, replayed among the others: the median; on a CPU calls run as they are."""
    return time_of_one(functions, clock(device), 3 if device == "cpu" else REPLAYS, SECONDS).median


def copy_speed(device: str) -> float:
    """Return the bytes per second, read and written, of a large copy; 0 on a CPU."""
    return 0.0 if device == "cpu" else clock(device).copy_bandwidth()


def recipes_of(args: argparse.Namespace, configs: list[step_plan.StepConfig | None]) -> list[Any]:
    """All kernels of the step that will be asked for, so that they can be built side by side."""
    recipes: list[Any] = []
    with replaced(triton_launch, fetch=recipes.append):
        for config, states in itertools.product(configs, args.states):
            with using(config), contextlib.suppress(AttributeError):           # nothing is there to be launched yet
                run_step(arguments(64, 4, states, args), backend="triton")
    forget_routines()                                                          # they have no kernels
    return list(dict.fromkeys(recipes))


def measure(N: int, H: int, states: str, args: argparse.Namespace, configs: list[str]) -> list[Arguments]:
    on_cpu = args.device == "cpu"
    backend = "reference" if on_cpu else "triton"
    x, rows = arguments(N, H, states, args), []
    about = {"HV": H, "N": N, "T": args.drafts + 1, "states": states, "bytes": bytes_moved(x)}
    each = pools(x)
    for config in configs:
        with using(parse_config(config)):
            row = about | {"config": config, "error": max(error(x, backend), error_of_parts(x, backend))}
            if row["error"] <= 1:
                calls = [functools.partial(run_step, one, backend=backend) for one in each]
                row["seconds"] = seconds(calls, args.device)
        rows.append(row)
    apart = [for_parts(one) for one in each]
    if not args.tree:
        rows.append(about | {"config": "parts", "seconds": seconds([parts_of(one) for one in apart], args.device)})
        for recurrence in map(Recurrence, args.recurrences):
            row = about | {"config": recurrence.name, "moved": moved(x)}
            with recurrence.planned():
                row["error"] = recurrence.error(x, backend)
                if row["error"] <= 1:
                    row["seconds"] = seconds([recurrence.call(one) for one in apart], args.device)
            rows.append(row)
    return rows


def printed(rows: list[Arguments], copy: float, configs: list[str]) -> list[str]:
    """A line for each shape: microseconds of each configuration, of the parts and of the recurrence; the best beside
    the copy."""
    shapes: dict[tuple, dict[str, Arguments]] = {}
    for row in rows:
        shapes.setdefault((row["states"], row["HV"], row["N"]), {})[row["config"]] = row
    columns, lines = list(dict.fromkeys(row["config"] for row in rows)), []
    for (states, HV, N), measured in shapes.items():
        cells = []
        for config in columns:
            row = measured.get(config, {})
            if "seconds" in row:
                share = f" ({row['moved'] / row['seconds'] / copy:.0%})" if copy and "moved" in row else ""
                cells.append(f"{1e6 * row['seconds']:.1f}{share}")
            else:
                cells.append("wrong" if row.get("error", 0) > 1 else "")
        first = measured[configs[0]]
        share = f"{first['bytes'] / first['seconds'] / copy:.0%}" if copy and "seconds" in first else ""
        lines.append([states, str(HV), str(N), *cells, share])
    header = ("states", "HV", "N", *columns, f"{configs[0]} of a copy")
    return table(lines, header=header, align="lrr" + "r" * (len(columns) + 1))


def main(argv: list[str] | None = None) -> list[Arguments]:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--heads", type=common.numbers, default=[8, 12, 16, 32, 64, 96])
    parser.add_argument("--sequences", type=common.numbers, default=[1, 64, 256])
    parser.add_argument("--states", type=common.words, default=["float32", "bfloat16"])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafts", type=int, default=0, help="tokens behind the first")
    parser.add_argument("--tree", action="store_true", help="drafts in a tree; the parts cannot")
    parser.add_argument("--configs", type=common.words, default=["plan"])
    parser.add_argument("--recurrences", type=common.words, default=["vk"], help="as Recurrence says")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    begun, copy, name = time.perf_counter(), 0.0, "a CPU"
    with torch.no_grad():
        if args.device != "cpu":
            args.device = f"cuda:{torch.cuda.current_device()}"
            name, copy = torch.cuda.get_device_name(), copy_speed(args.device)
            fetch_all(recipes_of(args, [parse_config(each) for each in args.configs]))
        rows = []
        for states, H, N in itertools.product(args.states, args.heads, args.sequences):
            rows += measure(N, H, states, args, args.configs)
    print(f"{name}, T={args.drafts + 1} K=V={args.head_dim} {args.dtype}, microseconds; a large copy: "
          f"{copy / 1e12:.2f} TB/s; {time.perf_counter() - begun:.0f} s in all")
    print("\n".join(printed(rows, copy, args.configs)))
    about = {"device": name, "torch": torch.__version__, "copy": copy, "K": args.head_dim, "dtype": args.dtype}
    common.write(args.json, about | {"rows": rows})
    return rows


if __name__ == "__main__":
    wrong = [row for row in main() if row.get("error", 0) > 1]
    sys.exit(f"wrong: {wrong}" if wrong else 0)
