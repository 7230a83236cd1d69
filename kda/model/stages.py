"""The five stages, forward and backward: formula, what each reads, what it writes.  The spine of every backend.

Shapes are of one chunk and one value head: C rows, K and V head dims.  2^x is elementwise, * is elementwise, @ is a
matrix product.  `kda.backends.reference.chunked` implements each stage under the function name given here; a backend
that can run a stage alone declares its name, and `kda verify` walks this table to find the first wrong one.  A backend
that fuses consecutive stages declares their run, "fwd/gate+intra+wy", which `find` makes a stage of.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from .bundles import Products, Saved

LOG2_E = 1.4426950408889634


class Stage(NamedTuple):
    name: str
    function: str                            # a function of kda.backends.reference.chunked; "" for a run of stages
    formula: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: tuple[Stage, ...] = ()              # the stages that a run consists of

    @property
    def members(self) -> tuple[Stage, ...]:
        return self.run or (self,)

    @property
    def backward(self) -> bool:
        return self.name.startswith("bwd")


SHAPES = {
    "q": "(C, K)", "k": "(C, K)", "v": "(C, V)", "g": "(C, K)", "beta": "(C)", "A_log": "()", "dt_bias": "(K)",
    "qn": "(C, K)", "kn": "(C, K)", "b": "(C)", "g2": "(C, K)", "gc_last": "(K)", "A_qk": "(C, C)", "A_kk": "(C, C)",
    "A_inv": "(C, C)", "w": "(C, K)", "u": "(C, V)", "qg": "(C, K)", "kb": "(C, K)", "kg": "(C, K)",
    "kE": "(C, K)", "qE": "(C, K)", "KGB": "(C, K)", "AQB": "(C, C)", "T_inv": "(C, C)", "r": "(C, V)",
    "h": "(K, V)", "h0": "(K, V)", "ht": "(K, V)", "v_new": "(C, V)", "o": "(C, V)",
}
SHAPES |= {"d" + name: shape for name, shape in SHAPES.items()}
SHAPES |= {"dA_log_parts": "()", "ddt_bias_parts": "(K)"}                     # one for each chunk
SHAPES |= {"dv_local": "(C, V)", "dg2_local": "(C, K)", "db_local": "(C)", "dqn_local": "(C, K)", "dkn_local": "(C, K)"}
# These are multiplied inside a stage and never written, and a backend may round them: b v in fwd/wy; P in bwd/wy; the
# decay D_ij of a pair, and under it rows of k in both intra stages (kD) and rows of q and b k in bwd/intra (qD); dA_qk
# and dA_kk once more in bwd/intra, where they meet kD (dA_k) and where they meet qD (dA_q).
# In the walk's stages: what meets T_inv (z); both matrices of bwd/grads (G), and qn, kn, b kn where they meet them.
OPERANDS = ("bv", "D", "kD", "qD", "dA_k", "dA_q", "P", "z", "G", "Qu", "Ku", "Kd")

FORWARD = (
    Stage("fwd/gate", "gate",
          "qn, kn: q, k after their l2norm; b: beta after its sigmoid; g2 = log2(e) * decay <= 0; gc = cumsum(g2), of "
          "which the last row is gc_last",
          ("q", "k", "g", "beta", "A_log", "dt_bias"), ("qn", "kn", "b", "g2", "gc_last")),
    Stage("fwd/intra", "intra",
          "A_qk[i>=j] = scale sum_K qn_i kn_j 2^(gc_i - gc_j); A_kk[i>j] = b_i sum_K kn_i kn_j 2^(gc_i - gc_j); "
          "qg = qn 2^gc; kb = b kn 2^gc; kg = kn 2^(gc_last - gc)",
          ("qn", "kn", "b", "g2"), ("A_qk", "A_kk", "qg", "kb", "kg")),
    Stage("fwd/wy", "wy",
          "A_inv = (I + A_kk)^-1; w = A_inv @ kb; u = A_inv @ (b v)",
          ("A_kk", "kb", "v", "b"), ("A_inv", "w", "u")),
    Stage("fwd/state", "state",
          "h = state entering the chunk; v_new = u - w @ h; next h = 2^gc_last h + kg^T @ v_new",
          ("w", "u", "kg", "gc_last", "h0"), ("h", "v_new", "ht")),
    Stage("fwd/output", "output",
          "o = scale qg @ h + A_qk @ v_new",
          ("qg", "h", "A_qk", "v_new"), ("o",)),
)

BACKWARD = (
    Stage("bwd/output", "output_bwd",
          "dv_local = A_qk^T @ do",
          ("do", "A_qk"), ("dv_local",)),
    Stage("bwd/state", "state_bwd",
          "dh = gradient of the state leaving the chunk; dv_new = dv_local + kg @ dh; "
          "next dh = 2^gc_last dh + scale qg^T @ do - w^T @ dv_new",
          ("do", "dv_local", "qg", "kg", "w", "gc_last", "dht"), ("dh", "dv_new", "dh0")),
    Stage("bwd/wy", "wy_bwd",
          "P = A_inv^T @ dv_new; Q = -P @ h^T; dv = b P; db_local = sum_V P v + sum_K Q kn 2^gc; "
          "dqn_local = scale 2^gc (do @ h^T); dkn_local = R + b 2^gc Q with R = 2^(gc_last - gc) (v_new @ dh^T); "
          "dA_qk = scale tril(do @ v_new^T), the gradient of A_qk / scale; dA_kk = -strict_tril(P @ v_new^T); "
          "dg2_local[t] = sum_(i>=t) (qn dqn_local + b kn 2^gc Q)_i + sum_(i<t) (kn R)_i + 2^gc_last sum_V h dh",
          ("do", "h", "dh", "v_new", "dv_new", "A_inv", "qn", "kn", "v", "b", "g2"),
          ("dv", "db_local", "dqn_local", "dkn_local", "dg2_local", "dA_qk", "dA_kk")),
    Stage("bwd/intra", "intra_bwd",
          "with D_ij = 2^(gc_i - gc_j): x_i = sum_(j<=i) dA_qk_ij kn_j D_ij; z_i = sum_(j<i) dA_kk_ij kn_j D_ij; "
          "y_j = sum_(i>=j) (dA_qk_ij qn_i + dA_kk_ij b_i kn_i) D_ij; dqn = local + x; dkn = local + b z + y; "
          "db = local + sum_K z kn; dg2[t] = local + sum_(i>=t) (qn x + b kn z - kn y)_i",
          ("dA_qk", "dA_kk", "qn", "kn", "b", "g2", "dqn_local", "dkn_local", "dg2_local", "db_local"),
          ("dqn", "dkn", "dg2", "db")),
    Stage("bwd/gate", "gate_bwd",
          "dg2, the gradient of g2 / log2(e), through the gate; dqn, dkn, summed over the value heads of a q/k head, "
          "through the l2norms; db through its sigmoid; dA_log and ddt_bias are sums over all tokens, rounded last",
          ("dqn", "dkn", "dg2", "db", "q", "k", "g", "beta", "A_log", "dt_bias"),
          ("dq", "dk", "dg", "dbeta", "dA_log", "ddt_bias")),
)

# The backward in two pieces, and what they need of the forward (docs/decisions/backward_form.md): b on the key side, a
# residual r = v - S^T k of each token, S before its write, so that v_new = b r.
WALK = (
    Stage("fwd/operands", "",
          "kE = kn 2^gc; qE = scale qn 2^gc; KGB = b kn 2^(gc_last - gc); AQB[i>=j] = scale sum_K qn_i b_j kn_j "
          "2^(gc_i - gc_j); T_inv = (I + A)^-1, A[i>j] = sum_K kn_i b_j kn_j 2^(gc_i - gc_j)",
          ("qn", "kn", "b", "g2"), ("kE", "qE", "KGB", "AQB", "T_inv")),
    Stage("fwd/residual", "",
          "r = T_inv @ (v - kE @ h); then o = qE @ h + AQB @ r and next h = 2^gc_last h + KGB^T @ r",
          ("v", "kE", "T_inv", "h"), ("r",)),
    Stage("bwd/walk", "",
          "dh = gradient of the state leaving the chunk; z = KGB @ dh + AQB^T @ do; dv = T_inv^T @ z; "
          "next dh = 2^gc_last dh + qE^T @ do - kE^T @ dv",
          ("do", "kE", "qE", "KGB", "AQB", "T_inv", "gc_last", "dht"), ("dv", "dh", "dh0")),
    Stage("bwd/grads", "",
          "G1 = scale tril(do @ r^T); G2 = -strict_tril(dv @ r^T); "
          "dqn = scale 2^gc (do @ h^T) + sum_j G1_ij b_j kn_j D_ij; "
          "plus = -2^gc (dv @ h^T) + sum_j G2_ij b_j kn_j D_ij; "
          "minus = 2^(gc_last - gc) (r @ dh^T) + sum_i (G1_ij qn_i + G2_ij kn_i) D_ij; dkn = plus + b minus; "
          "db = sum_K kn minus; dg2[t] = sum_(i>=t) (qn dqn + kn plus - b kn minus)_i + sum_i b kn 2^(gc_last - gc) "
          "(r @ dh^T)_i + 2^gc_last sum_V h dh; then through the gate, the norms and the sigmoid, value heads summed; "
          "parts of dA_log and ddt_bias are sums over a chunk",
          ("q", "k", "g", "beta", "A_log", "dt_bias", "do", "r", "dv", "h", "dh"),
          ("dq", "dk", "dg", "dbeta", "dA_log_parts", "ddt_bias_parts")),
)

STAGES = {stage.name: stage for stage in FORWARD + BACKWARD}
OF_WALK = {stage.name: stage for stage in WALK}                               # each runs alone, never in the chain
ONLY, FROM_INPUTS = " only", " from inputs"
RESULTS = ("o", "ht", "h", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")


@functools.cache
def find(name: str) -> Stage:
    """The stage of that name, or the run of consecutive ones: "fwd/gate+intra+wy".

    A run reads what none of its stages writes.  It writes what is of use after it: what a later stage of its direction
    reads, what `Saved` keeps for the backward, and results of the call; a forward in one piece keeps `Products` alone,
    and with "only" behind its name, nothing: "fwd/gate+intra+wy+state+output only".  A backward in one piece that makes
    again what it needs of the forward has "from inputs" behind its name: "bwd/output+state+wy+intra+gate from inputs".
    """
    if name in STAGES:
        return STAGES[name]
    if name in OF_WALK:
        return OF_WALK[name]
    direction, _, words = name.removesuffix(ONLY).removesuffix(FROM_INPUTS).partition("/")
    table = {"fwd": FORWARD, "bwd": BACKWARD}.get(direction, ())
    names, order = [f"{direction}/{word}" for word in words.split("+")], [stage.name for stage in table]
    first = order.index(names[0]) if names[0] in order else 0
    members, later = table[first : first + len(names)], table[first + len(names) :]
    from_inputs = name.endswith(FROM_INPUTS)
    if [stage.name for stage in members] != names or (from_inputs and members != BACKWARD):
        raise ValueError(f"no stage is called {name!r}; there are {', '.join(STAGES)}, and runs of consecutive ones "
                         "of a direction, such as fwd/gate+intra+wy")
    members = FORWARD[:-1] + members if from_inputs else members              # what o is made of nothing else reads
    written = [n for stage in members for n in stage.writes]
    results = [n for stage in BACKWARD for n in stage.writes] if from_inputs else written
    saved = () if name.endswith(ONLY) else (Products if members == FORWARD else Saved)._fields
    wanted = {*RESULTS, *saved, *(n for stage in later for n in stage.reads)}
    return Stage(
        name, "", "; ".join(stage.formula for stage in members),
        tuple(dict.fromkeys(n for stage in members for n in stage.reads if n not in written)),
        tuple(n for n in results if n in wanted), members,
    )


def in_order(names: Iterable[str]) -> list[Stage]:
    """Stages and runs by where they begin, then by where they end; those of the walk last."""
    order = [*STAGES, *OF_WALK]
    return sorted(map(find, names), key=lambda stage: [order.index(member.name) for member in stage.members])


def holder(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is the stage or has it as a part."""
    parts = set(find(name).members)
    return next((other for other in names if parts.issubset(find(other).members)), None)
