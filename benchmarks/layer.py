"""The layer's step, and its fused parts, beside torch's and FLA's: `python -m benchmarks.layer`, on a GPU.

Right first: outputs and gradients of every side are held against the same layer in float32 (float64 for float32), and
the errors are printed; who is further off than CLOSE is not timed.  Then calls alternate, side by side, on the same
tensors, timed as `kda bench` times.  Milliseconds: the median, the 20th and 80th percentile.

    python -m benchmarks.layer --heads 32,64 --tokens 8192                # Kimi-Linear's and GLM's widths
    python -m benchmarks.layer --lower-bound -5 --what step,convolution
    python -m benchmarks.layer --device cpu --heads 2 --head-dim 16 --hidden 32 --tokens 70 --calls 3 --dtype float32
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from kda.nn import Cache, KimiDeltaAttention, convolution, gated_rms_norm, norm, short_convolution
from kda.tools.measure.clocks import clock_of, interleaved
from ptxkit.commands.layout import table
from ptxkit.temporary import replaced

from . import common

HIDDEN = {32: 2304, 64: 4096, 96: 7168}      # heads -> hidden size; of Kimi-Linear, of GLM-5.3-Flash, and a wider one
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}       # relative, in the norm
WHAT = ("step", "forward", "decode", "convolution", "norm")
Sides = dict[str, Callable[[], list[torch.Tensor]]]


def times_of(sides: Sides, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Milliseconds of each side, called in turns; `host_inside` where a GPU waited for the host."""
    taken = interleaved([*sides.values()], clock_of(args.device), args.calls, args.seconds)
    return {
        name: {"ms": 1e3 * t.median, "p20": 1e3 * t.quantile(0.2), "p80": 1e3 * t.quantile(0.8)}
        | ({"host_inside": True} if t.host_inside else {})
        for name, (t, _) in zip(sides, taken)
    }


def measured(what: str, sides: Sides, exact: list[torch.Tensor], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each side: its error, and its time if the error is small; why not, where it does not run."""
    rows, right = [], {}
    for name, side in sides.items():
        row: dict[str, Any] = {"what": what, "side": name}
        try:
            row["error"] = max(common.off(x, y) for x, y in zip(side(), exact, strict=True))
        except Exception as failure:                                         # a peer that this machine cannot run
            if name.startswith("kda"):
                raise
            row["not run"] = f"{type(failure).__name__}: {failure}"[:200]
        else:
            if row["error"] <= CLOSE[args.dtype]:
                right[name] = side
        rows.append(row)
    times = times_of(right, args)
    return [row | times.get(row["side"], {}) for row in rows]


def backward(y: torch.Tensor, dy: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def layers_of(heads: int, hidden: int, args: argparse.Namespace) -> dict[str, Any]:
    """Ours, and FLA's with the same weights, or why there is none."""
    torch.manual_seed(0)
    ours = KimiDeltaAttention(hidden, heads, args.head_dim, lower_bound=args.lower_bound, gate_bias=True, layer_idx=0)
    ours = ours.to(args.device, args.dtype)
    layers: dict[str, Any] = {"kda": ours}
    try:
        from fla.layers import KimiDeltaAttention as Theirs

        theirs = Theirs(hidden, head_dim=args.head_dim, num_heads=heads, lower_bound=args.lower_bound,
                        safe_gate=args.lower_bound is not None, norm_eps=ours.o_norm.eps, layer_idx=0)
        theirs.load_state_dict(ours.to_checkpoint("fla"))
        layers["fla"] = theirs.to(args.device, args.dtype)
    except ImportError as error:
        print(f"FLA's layer is left out: {error}", file=sys.stderr)
    return layers


def wider(layer: KimiDeltaAttention) -> KimiDeltaAttention:
    """The same layer in the next dtype, on the reference."""
    dtype = torch.float64 if layer.q_proj.weight.dtype == torch.float32 else torch.float32
    return KimiDeltaAttention.from_checkpoint(
        {name: x.to(dtype) for name, x in layer.state_dict().items()}, lower_bound=layer.lower_bound,
        norm_eps=layer.o_norm.eps, layer_idx=0, backend="reference",
    ).to(dtype)


@contextlib.contextmanager
def no_kernels() -> Iterator[None]:
    """Convolution and norm by torch, which shares nothing with what is measured."""
    nowhere = {"takes_kernels": lambda x: False}
    with replaced(convolution, **nowhere), replaced(norm, **nowhere):
        yield


def output_of(layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    return y if isinstance(y, torch.Tensor) else y[0]


def of_a_layer(heads: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    hidden = args.hidden or HIDDEN.get(heads, 64 * heads)
    layers = layers_of(heads, hidden, args)
    x = torch.randn(args.batch, args.tokens, hidden, device=args.device).to(args.dtype).requires_grad_()
    dy = torch.randn_like(x)
    exact, rows = wider(layers["kda"]), []
    wide = x.detach().to(exact.q_proj.weight.dtype).requires_grad_()

    def step(layer: Any) -> list[torch.Tensor]:
        """y and the gradients of x and of four weights that all others stand behind; of FLA's under its names."""
        weights = [layer.q_proj.weight, layer.v_conv1d.weight, layer.dt_bias, layer.o_norm.weight]
        source = wide if layer is exact else x
        return backward(output_of(layer, source), dy.to(source.dtype), [source, *weights])

    def forward(layer: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [output_of(layer, wide if layer is exact else x)]

    for name, function in (("step", step), ("forward", forward)):
        if name in args.what:
            sides = {side: lambda f=function, layer=layer: f(layer) for side, layer in layers.items()}
            with no_kernels():
                expected = function(exact)
            rows += measured(name, sides, expected, args)
    if "decode" in args.what:
        rows += of_decoding(layers["kda"], hidden, args)
    return [{"heads": heads, "hidden": hidden} | row for row in rows]


def of_decoding(layer: KimiDeltaAttention, hidden: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One token of each of some sequences, behind 64."""
    rows = []
    for N in args.sequences:
        x = torch.randn(N, 65, hidden, device=args.device).to(args.dtype)
        cache, exact = Cache(), wider(layer)
        with torch.no_grad():
            layer(x[:, :64], cache=cache)
        with torch.no_grad(), no_kernels():
            whole = exact(x.to(exact.q_proj.weight.dtype))[:, 64:]

        def token(x=x, cache=cache) -> list[torch.Tensor]:
            with torch.no_grad():
                return [layer(x[:, 64:], cache=cache.copy())]

        rows += measured(f"decode of {N}", {"kda": token}, [whole], args)
    return rows


def of_the_convolution(heads: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    C = heads * args.head_dim
    x = torch.randn(args.batch, args.tokens, C, device=args.device).to(args.dtype).requires_grad_()
    weight = torch.randn(C, 1, 4, device=args.device).to(args.dtype).requires_grad_()
    dy = torch.randn_like(x)

    def in_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.silu(F.conv1d(x.mT, weight, padding=3, groups=C)[..., : x.shape[1]]).mT

    def by_fla(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from fla.modules.causal_conv1d import causal_conv1d

        return causal_conv1d(x, weight.squeeze(1), activation="silu")[0]

    sides = {"kda": short_convolution, "torch": in_torch, "fla": by_fla}
    return both_ways("convolution", heads, sides, [x, weight], dy, args, in_torch)


def of_the_norm(heads: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    shape = (args.batch, args.tokens, heads, args.head_dim)
    x, gate = (torch.randn(shape, device=args.device).to(args.dtype).requires_grad_() for _ in range(2))
    weight = torch.rand(args.head_dim, device=args.device).to(args.dtype).requires_grad_()
    dy = torch.randn_like(x)

    def in_torch(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-5) * torch.sigmoid(gate)

    def by_fla(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated

        return rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=1e-5)

    sides = {"kda": gated_rms_norm, "torch": in_torch, "fla": by_fla}
    return both_ways("norm", heads, sides, [x, gate, weight], dy, args, in_torch)


def both_ways(
    what: str, heads: int, sides: dict[str, Callable], inputs: list[torch.Tensor], dy: torch.Tensor,
    args: argparse.Namespace, definition: Callable,
) -> list[dict[str, Any]]:
    """The forward alone, and with the backward."""
    dtype = torch.float64 if args.dtype == torch.float32 else torch.float32
    wide = [x.detach().to(dtype).requires_grad_() for x in inputs]

    def forward(function: Callable) -> list[torch.Tensor]:
        with torch.no_grad():
            return [function(*inputs)]

    forwards = {name: lambda f=f: forward(f) for name, f in sides.items()}
    steps = {name: lambda f=f: backward(f(*inputs), dy, inputs) for name, f in sides.items()}
    exact = backward(definition(*wide), dy.to(dtype), wide)
    rows = measured(f"{what} forward", forwards, exact[:1], args) + measured(f"{what} step", steps, exact, args)
    return [{"heads": heads} | row for row in rows]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--heads", type=common.numbers, default=[32, 64])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=0, help="0: that of a model with so many heads")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequences", type=common.numbers, default=[1, 64], help="that are decoded together")
    parser.add_argument("--lower-bound", type=float, default=None)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calls", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=5.0, help="at most, of each row")
    parser.add_argument("--what", type=common.words, default=list(WHAT), help=",".join(WHAT))
    args = parser.parse_args(argv)
    rows = []
    for heads in args.heads:
        if {"step", "forward", "decode"} & {*args.what}:
            rows += of_a_layer(heads, args)
        rows += of_the_convolution(heads, args) if "convolution" in args.what else []
        rows += of_the_norm(heads, args) if "norm" in args.what else []
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "a CPU"
    print(f"{name}, B={args.batch} T={args.tokens} head_dim={args.head_dim} {args.dtype}")
    columns = ("heads", "what", "side", "error", "ms", "p20", "p80", "host_inside", "not run")
    cells = [[f"{row[c]:.3g}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns]
             for row in rows]
    print(*table(cells, columns), sep="\n")
    about = {"device": name, "torch": torch.__version__, "batch": args.batch, "tokens": args.tokens,
             "head_dim": args.head_dim, "dtype": str(args.dtype), "lower_bound": args.lower_bound}
    common.write(args.json, about | {"rows": rows})
    return rows


if __name__ == "__main__":
    wrong = [row for row in main() if row["side"] == "kda" and "ms" not in row]
    sys.exit(f"wrong: {wrong}" if wrong else 0)
