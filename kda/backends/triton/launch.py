"""Tensors in, tensors out: the doors that every backend has, on Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from kda.bundles import Grads, Outputs, Saved
from kda.checks import offsets_after_waiting
from kda.compile.triton import TritonKernel, fetch_all
from kda.host import detect
from kda.problem import Inputs, Problem

from .plan import Plan, plan
from .recurrent_launch import recurrent as recurrent

Tensor = torch.Tensor

_KERNELS: dict[int, dict[str, TritonKernel]] = {}


def rounded_to(p: Problem) -> dict[str, str]:
    """What is stored, or enters a product, in the dtype of q."""
    if p.dtype == "float32":
        return {}
    names = ("A_qk A_inv w u qg kb kg h v_new dv_local dh dv_new dv qn kn P dA_qk dA_kk bv kD").split()
    return dict.fromkeys(names, p.dtype)


def _ready(x: Tensor | None) -> Tensor | None:
    """Contiguous, at a multiple of 16 bytes."""
    if x is None:
        return None
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class _Call:
    """One call's tensors and numbers by the names that kernels give them."""

    def __init__(self, p: Problem, x: Inputs):
        self.p, self.plan = p, plan(p, detect(p.device))
        self.kernels = _fetched(self.plan)
        self.device, self.dtype = x.q.device, x.q.dtype
        pl = self.plan
        self.env: dict[str, Any] = {
            **{name: _ready(t) for name, t in zip(("q", "k", "v", "g", "beta"), x)},
            "A_log": None if x.A_log is None else x.A_log.float().contiguous(),
            "dt_bias": None if x.dt_bias is None else x.dt_bias.float().contiguous(),
            "h0": _ready(x.initial_state),
            "T": p.T, "N": p.N, "H": p.H, "HV": p.HV, "C": p.C, "one": 1, "scale": p.scale, "lower_bound": p.lower_bound or 0.0,
            "chunks": pl.chunks, "pieces": pl.pieces, "segment": pl.segment_chunks,
            "segment_rows": pl.segment_chunks * p.C,
        }  # fmt: skip
        self.programs = {"chunks": pl.chunk_bound + p.packed, "segments": pl.segment_bound}
        if p.packed:
            self._tables(x.cu_seqlens)

    def _tables(self, cu_seqlens: Tensor) -> None:
        """Where chunks and segments lie, on the GPU."""
        N, chunks, segments = self.p.N, self.programs["chunks"], self.programs["segments"]
        cu_seqlens = cu_seqlens.to(self.device, non_blocking=True).contiguous()
        self.env["bounds"] = self.empty(N + 1, dtype=torch.int64)
        table = self.empty(2 * (N + 1) + chunks + segments, dtype=torch.int32)
        names = ("first_chunk", "first_segment", "chunk_owner", "segment_owner")
        self.env |= dict(zip(names, table.split((N + 1, N + 1, chunks, segments))))
        kernel = "tables " + str(cu_seqlens.dtype).removeprefix("torch.")
        self.run(kernel, max(1, -(-self.plan.chunks // 64)), cu_seqlens=cu_seqlens)
        self.env["cu_seqlens"] = self.env["bounds"]

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def run(self, name: str, grid: int, **own: Any) -> None:
        """Launch a kernel; what it takes is looked up by name."""
        if grid:
            kernel, env = self.kernels[name], self.env
            kernel.launch(grid, *[own[n] if n in own else env[n] for n in kernel.names])

    def over_chunks(self, name: str, **own: Any) -> None:
        env = self.env
        if self.p.packed:
            own |= {"first": env["first_chunk"], "owner": env["chunk_owner"]}
        self.run(name, self.programs["chunks"] * self.p.HV, **own)

    def over_segments(self, name: str, tiles: int, **own: Any) -> None:
        env = self.env
        if self.p.packed:
            own |= {"first": env["first_segment"], "owner": env["segment_owner"]}
        self.run(name, self.programs["segments"] * self.p.HV * tiles, **own)

    def rows(self, *widths: int) -> list[Tensor]:
        """Tensors with a row for each token and value head."""
        p = self.p
        return [self.empty(p.B * p.T, p.HV, width) for width in widths]

    # stages

    def prepare(self, backward: bool, **outputs: Tensor) -> None:
        p, chunks = self.p, self.plan.chunk_bound
        A_qk, w, u, qg, kg = self.rows(p.C, p.K, p.V, p.K, p.K)
        self.env |= {"A_qk": A_qk, "w": w, "u": u, "qg": qg, "kg": kg}
        self.env["gc_last"] = self.empty(chunks, p.HV, p.K, dtype=torch.float32)
        wide = torch.float64 if p.dtype == "float32" else torch.float32
        self.env["gc"] = self.empty(chunks, p.HV, p.C, p.K, dtype=wide)
        A_kk = self.empty(chunks, p.HV, p.C, p.C, dtype=torch.float32)
        if backward:
            self.env["A_inv"] = self.rows(p.C)[0]
            if p.qk_l2norm:
                norms = self.empty(2, p.B * p.T, p.HV, dtype=torch.float32)
                self.env |= {"q_norm": norms[0], "k_norm": norms[1]}
        self.over_chunks("prepare", A_kk=A_kk, **outputs)

    def states(self, **outputs: Tensor | None) -> None:
        """fwd/state, and fwd/output where o is asked for."""
        p, pl = self.p, self.plan
        if pl.segment:
            S, added, M = self._edges(p.V), self._edges(p.V), self._edges(p.K)
            self.over_segments("added", pl.tiles, ht=added)
            self.over_segments("transition", pl.k_tiles, M=M)
            self.env["M"] = M
            self.compose("compose", S, added=added)
            outputs["h0"] = S
        self.over_segments("state", pl.tiles, **outputs)

    def states_bwd(self, do: Tensor, dht: Tensor | None, dh0: Tensor | None) -> None:
        p, pl = self.p, self.plan
        dh, (dv_new,) = self.empty(pl.chunk_bound, p.HV, p.K, p.V), self.rows(p.V)
        self.env |= {"do": do, "dh": dh, "dv_new": dv_new}
        start = "" if dht is not None else " from zero"
        if not pl.segment:
            self.over_segments("state_bwd" + start, pl.tiles, dht=dht, dh0=dh0)
            return
        dS, added = self._edges(p.V), self._edges(p.V)
        self.over_segments("added_bwd", pl.tiles, dh0=added)
        self.compose("compose_bwd" + start, dS, added=added, h0=dht)
        self.over_segments("state_bwd", pl.tiles, dht=dS, dh0=dh0)

    def _edges(self, width: int) -> Tensor:
        return self.empty(self.plan.segment_bound, self.p.HV, self.p.K, width, dtype=torch.float32)

    def compose(self, name: str, edge: Tensor, **own: Any) -> None:
        p = self.p
        if p.packed:
            own["first"] = self.env["first_segment"]
        self.run(name, p.N * p.HV * -(-p.V // 32), edge=edge, **own)


def _fetched(pl: Plan) -> dict[str, TritonKernel]:
    """A plan's kernels, built side by side at the first call."""
    found = _KERNELS.get(id(pl))
    if found is None:
        found = _KERNELS[id(pl)] = dict(zip(pl.kernels, fetch_all(pl.kernels.values())))
        found["plan"] = pl                                                     # type: ignore[assignment]
    return found


def forward(p: Problem, x: Inputs, save: bool = False) -> Outputs:
    c = _Call(p, x)
    o = c.empty(p.B, p.T, p.HV, p.V)
    shape = (p.V, p.K) if p.state_v_first else (p.K, p.V)
    ht = c.empty(p.N, p.HV, *shape, dtype=torch.float32) if p.final_state else None
    h = c.empty(c.plan.chunk_bound, p.HV, *shape) if p.intermediate_states else None
    c.prepare(backward=False, o=o)
    c.states(o=o, ht=ht, h=h)
    if h is not None:
        ends = offsets_after_waiting(x)
        if ends is not None:
            h = h[: sum(-(-(b - a) // p.C) for a, b in zip(ends, ends[1:]))]
        h = h.view(p.B, -1, p.HV, *shape)
    return Outputs(o, ht, h, None)


def backward(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | None = None) -> Grads:
    c = _Call(p, x)
    env, rows = c.env, (p.B * p.T, p.HV)
    c.prepare(backward=True)
    env |= {"h": c.empty(c.plan.chunk_bound, p.HV, p.K, p.V), "v_new": c.rows(p.V)[0]}
    c.states()
    dh0 = None if x.initial_state is None else torch.empty_like(x.initial_state, memory_format=torch.contiguous_format)
    c.states_bwd(_ready(do), _ready(dht), dh0)
    chunks = c.programs["chunks"]
    out = {"d" + name: torch.empty(t.shape, dtype=t.dtype, device=c.device) for name, t in zip(("q", "k", "v", "g", "beta"), x)}
    dqn, dkn, dg2_row = (c.empty(*rows, p.K, dtype=torch.float32) for _ in range(3))
    L1, L2 = (c.empty(c.plan.chunk_bound, p.HV, p.C, p.C) for _ in range(2))
    c.over_chunks("chunk_bwd", P=env["u"], L1=L1, L2=L2, dv=out["dv"], dbeta=out["dbeta"], dqn=dqn, dkn=dkn, dg2_row=dg2_row)
    of_A_log, of_dt_bias, dA_log, ddt_bias = None, None, None, None
    if p.A_log:
        of_A_log, dA_log = c.empty(chunks, p.HV, p.K, dtype=torch.float32), c.empty(p.HV, dtype=torch.float32)
    if p.dt_bias:
        of_dt_bias, ddt_bias = c.empty(chunks, p.HV, p.K, dtype=torch.float32), c.empty(p.HV, p.K, dtype=torch.float32)
    sums = {"of_A_log": of_A_log, "of_dt_bias": of_dt_bias}
    c.over_chunks("gate_bwd", dqn=dqn, dkn=dkn, dg2_row=dg2_row, dq=out["dq"], dk=out["dk"], dg=out["dg"], **sums)
    if p.A_log or p.dt_bias:
        c.run("sum_chunks", p.HV, chunks=chunks, dA_log=dA_log, ddt_bias=ddt_bias, **sums)
    dA_log = None if x.A_log is None else dA_log.view(x.A_log.shape).to(x.A_log.dtype)
    ddt_bias = None if x.dt_bias is None else ddt_bias.view(x.dt_bias.shape).to(x.dt_bias.dtype)
    return Grads(*out.values(), dA_log, ddt_bias, dh0)
