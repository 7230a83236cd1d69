"""What the pictures of kernels show beside their configurations: which pipelines lie between whom, and the steps of
warps that work together.  `Kernel` refuses a picture whose mbarriers are not those of its configuration, and an arrow
from a role that does not arrive, or to one that does not wait.
"""

from __future__ import annotations

import ast
import pathlib
from dataclasses import dataclass, field
from typing import Any

import kda
from kda.backends.common.cute.barriers import Meeting, Pipeline
from kda.backends.common.cute.fields import Struct, several
from kda.backends.sm90 import configs as sm90
from kda.backends.sm90 import plan as sm90_plan
from kda.backends.sm100 import configs as sm100
from kda.backends.sm100 import plan as sm100_plan
from kda.model.problem import Problem

SMEM_LIMIT = 227 << 10                       # bytes that a CTA of both archs may have
TMEM_COLUMNS = sm100.TMEM
BACKENDS = pathlib.Path(kda.__file__).parent / "backends"


@dataclass(frozen=True)
class Node:
    column: int
    row: int
    says: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edge:
    """An arrow; `pipelines` names those of the configuration that it stands for.  Names of pipelines and barriers in
    braces, in a label, stand for their counts; without a label it says all of its pipelines."""

    start: str
    end: str
    label: str = ""
    pipelines: str = ""


@dataclass(frozen=True)
class Columns:
    name: str
    begin: int
    columns: int


@dataclass(frozen=True)
class Call:
    """The call in the simulator that launches a kernel."""

    arch: str
    backend: str
    T: int
    H: int
    step: bool = False                       # forward and backward
    keep: bool = True                        # a step keeps everything for its backward
    dtype: str = "bfloat16"


@dataclass(frozen=True, eq=False)
class Kernel:
    name: str
    title: str
    config: Any
    call: Call | None                        # None: it has no picture of its time
    window: str                              # what that picture shows
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: tuple[Edge, ...] = ()
    frames: dict[str, tuple[str, ...]] = field(default_factory=dict)
    steps: tuple[Any, ...] = ()              # each is ((first warp, last, what they do), ...), or a barrier's name
    steps_title: str = ""
    warps: int = 8
    registers: dict[str, int] = field(default_factory=dict)
    inner: dict[str, Struct] = field(default_factory=dict)
    tmem: tuple[Columns, ...] = ()
    ring: str = ""                           # the mbarrier whose phases bound the window; "": the life of a CTA
    turns: int = 1
    ctas: int = 1                            # per SM

    def __post_init__(self) -> None:
        shown = {name for edge in self.edges for name in edge.pipelines.split()}
        if self.nodes and self.pipelines.keys() != shown:
            raise ValueError(f"{self.name}: mbarriers {sorted(self.pipelines)}, the picture shows {sorted(shown)}")
        for edge in self.edges:
            for pipeline in map(self.pipelines.get, edge.pipelines.split()):
                self.check(edge.start, {arrivals.role for arrivals in pipeline.arrivals}, f"arrives at {pipeline.name}")
                self.check(edge.end, set(pipeline.waits.split(", ")), f"waits for {pipeline.name}")
        unknown = {name.partition(":")[0] for name in self.nodes} - set(self.config.roles)
        roles = set(self.config.roles) - {name.partition(":")[0] for name in self.nodes}
        if self.nodes and roles:
            raise ValueError(f"{self.name}: no node for {sorted(roles)}; there are {sorted(unknown)}")

    @property
    def pipelines(self) -> dict[str, Pipeline]:
        return {pipeline.name: pipeline for pipeline in self.config.pipelines}

    def check(self, node: str, roles: set[str], what: str) -> None:
        """Refuse an arrow between a pipeline and a role that does not do this; PREPARE 0 does what PREPARE does."""
        role = node.partition(":")[0]
        if role in self.config.roles and not roles & {role, role.rstrip(" 01")}:
            raise ValueError(f"{self.name}: {role} has an arrow, but {' or '.join(sorted(roles))} {what}")

    def label(self, edge: Edge) -> str:
        """Return the words beside an arrow."""
        label = edge.label or ", ".join(f"{name}: {{{name}}}" for name in edge.pipelines.split())
        threads = {meeting.barrier.name: meeting.barrier.threads for meeting in self.config.meetings}
        return label.format_map(threads | {name: pipeline.total for name, pipeline in self.pipelines.items()})


@dataclass(frozen=True)
class Part:
    """A kind of CTA, of a kernel that has several. A picture reads it as it reads the configuration of others."""

    struct: Struct
    roles: dict[str, range]
    pipelines: tuple[Pipeline, ...]
    meetings: tuple[Meeting, ...] = ()

    @property
    def shared(self) -> int:
        return self.struct.end


@dataclass(frozen=True)
class Timed:
    """A kernel with a picture of its time alone, in its first launch of a call."""

    name: str
    title: str
    call: Call
    window: str
    ring: str = ""
    turns: int = 1
    roles: tuple[tuple[str, range], ...] = (("warps", range(32)),)


def constant(file: str, name: str) -> Any:
    """A module's constant, read from its source: kernels import cutlass, pictures need none."""
    for statement in ast.parse((BACKENDS / file).read_text()).body:
        if isinstance(statement, ast.Assign):
            names = [t for target in statement.targets for t in getattr(target, "elts", [target])]
            if name in [getattr(n, "id", "") for n in names]:
                values = ast.literal_eval(statement.value)
                return values[[n.id for n in names].index(name)] if len(names) > 1 else values
    raise ValueError(f"{file} has no constant {name}")


def problem(T: int, H: int, **more: Any) -> Problem:
    return Problem(
        T=T, H=H, HV=H, gate="bounded", lower_bound=-5.0, A_log=True, dt_bias=True, beta="sigmoid", qk_l2norm=True,
        g_dtype="bfloat16", final_state=True, **more,
    )


# ---- Hopper

H32, H64 = problem(512, 32), problem(1024, 64)
STEP = problem(1024, 31, disable_recompute=True)         # with 512 items walk and grads run in one grid
SMS = 132                                    # an H200's SMs
FORWARD32, FORWARD64 = Call("sm_90a", "sm90", 512, 32), Call("sm_90a", "sm90", 1024, 64)
SM90_STEP = Call("sm_90a", "sm90", 1024, 31, step=True)

chain, recorded = sm90_plan.plan(H32, SMS).chain, sm90_plan.training_plan(STEP, SMS)
sm90_fused = sm90_plan.plan(H64, SMS).fused
sm90_grads: Any = recorded.grads
CHAIN, PREPARE = sm90_fused.registers
MATH, LOAD = sm90_grads.registers

OF_A_WARP_EACH = "each warp: rows of q, k, g, norms, gate, sums over its rows"
MAKE_CHUNK = (
    [(0, 7, OF_A_WARP_EACH)], "the sums of each warp are there",
    [(0, 3, "sums before each warp")], "sums are there",
    [(0, 7, "operands of products: exponentials, rounded to bfloat16")],
)


def fused_nodes(stages: str, tensor_core: bool) -> dict[str, Node]:
    found = {}
    for cta, (outer, inner) in enumerate(((0, 1), (3, 2))):
        suffix = f": CTA {cta}"
        found |= {
            f"PREPARE 0{suffix}": Node(outer, 0, ("chunks 4i" + " + 1" * cta,)),
            f"PREPARE 1{suffix}": Node(outer, 1, (f"chunks 4i + {2 + cta}",)),
            f"stages 0, 1{suffix}": Node(inner, 0, (stages,)), f"stages 2, 3{suffix}": Node(inner, 1, (stages,)),
            f"CHAIN{suffix}": Node(inner, 2, (f"columns {64 * cta}-{64 * cta + 63}", "of the state")),
        }
        if tensor_core:
            found[f"tensor core{suffix}"] = Node(outer, 2, ("products",))
    return found


def fused_edges(tensor_core: bool) -> tuple[Edge, ...]:
    found = []
    for cta in (0, 1):
        suffix = f": CTA {cta}"
        for group in (0, 1):
            maker, stages = f"PREPARE {group}{suffix}", f"stages {2 * group}, {2 * group + 1}{suffix}"
            other = stages.replace(suffix, f": CTA {1 - cta}")
            stage = 2 * group + cta
            found += [
                Edge(maker, stages, f"tile, stage {stage}"),
                Edge(stages, maker, f"empty[{stage}]: {{empty}}", "empty"),
                Edge(stages, other, f"stage {stage}: copy"),
            ]
        stages = f"stages 2, 3{suffix}"
        found += [Edge(stages, f"CHAIN{suffix}", pipelines="full"), Edge(f"CHAIN{suffix}", stages, pipelines="empty")]
        if tensor_core:
            core = f"tensor core{suffix}"
            found += [
                Edge(core, f"CHAIN{suffix}", pipelines="out"),
                Edge(core, f"CHAIN{suffix}", pipelines="added o_done"),
                Edge(core, f"PREPARE 1{suffix}", "pairs_done, KT_done", "pairs_done KT_done"),
            ]
    return tuple(found)


def frames(nodes: dict[str, Node]) -> dict[str, tuple[str, ...]]:
    return {f"CTA {cta}": tuple(name for name in nodes if name.endswith(f"CTA {cta}")) for cta in (0, 1)}


def walk_nodes(role: str, reads: str, does: tuple[str, ...], maker: str = "prepare") -> dict[str, Node]:
    return {
        "global memory": Node(0, 0, (f"tiles from {maker},", reads)),
        "LOAD": Node(1, 0, ("a tile by one bulk copy,", f"{reads} in pieces of 16 bytes")),
        role: Node(2, 0, does),
    }


def walk_edges(role: str, reads: str) -> tuple[Edge, ...]:
    return (
        Edge("global memory", "LOAD", f"tiles, {reads}"), Edge("LOAD", role, pipelines="full"),
        Edge(role, "LOAD", pipelines="empty"),
    )


GRADS_EDGES = (
    Edge("global memory", "LOAD", "inputs"), Edge("LOAD", "global memory", "gradients"),
    Edge("LOAD", "MATH", pipelines="values_full"), Edge("MATH", "LOAD", pipelines="values_empty"),
    Edge("LOAD", "MATH", "rows_full[2]: {rows_full}; placed[2]: {placed}", "rows_full placed"),
    Edge("MATH", "LOAD", "rows_done[2]: {rows_done}", "rows_done"),
)
GRADS_NODES = {
    "global memory": Node(0, 0, ("q, k, g, beta", "do, dv, r, h, dh", "-> dq, dk, dg, dbeta")),
    "LOAD": Node(1, 0, ("brings the next item,", "norms and beta;", "takes results away")),
    "MATH": Node(2, 0, ("64 channels per four warps:", "products, masks, sums,", "gradients over q, k, g")),
}
FUSED90, FUSED100 = fused_nodes("own tile, and copy", False), fused_nodes("own tile, and copy", True)

sm90_stream: Any = sm90_plan.plan(problem(8192, 16), SMS).stream
MAKER = Part(
    Struct(align=1024, **{f"group {n}": several(sm90_stream.group, 1) for n in range(sm90.GROUPS)}),
    {f"INVERSE {n}": range(n, n + 1) for n in range(sm90.GROUPS)}
    | {name: warps for name, warps in sm90_stream.roles.items() if name != "CHAIN"},
    sm90_stream.group_pipelines, sm90_stream.meetings,
)
WALKER = Part(
    sm90_stream.walker,
    {"CHAIN": sm90_stream.roles["CHAIN"]} | {
        role: range(warp, warp + 1) for role, warp in
        (("LOAD", sm90.STREAM_LOAD), ("VALUES", sm90.STREAM_VALUES), ("STORE", sm90.STREAM_STORE))
    },
    sm90_stream.walker_pipelines,
)
STREAM_MAKES = (
    {f"PREPARE {n}": Node(0, n, ("two chunks, one after the", "other, and what joins them")) for n in (0, 1)}
    | {f"INVERSE {n}": Node(1, n, ("inverses of both chunks,", "the step's copy, its flag")) for n in (0, 1)}
    | {f"memory: {n}": Node(2, n, ("58 KiB of tiles of a step,", "and its flag, in L2")) for n in (0, 1)}
)
STREAM_MAKES_EDGES = (
    Edge("PREPARE 0", "PREPARE 1", pipelines="begun"),
    *[edge for n in (0, 1) for edge in (
        Edge(f"PREPARE {n}", f"INVERSE {n}", "barriers: {WHOLE_GROUP_INVERSE}, {JOINED}"),
        Edge(f"INVERSE {n}", f"PREPARE {n}", pipelines="solved"),
        Edge(f"INVERSE {n}", f"PREPARE {n}", pipelines="taken"),
        Edge(f"INVERSE {n}", f"memory: {n}", "tiles, then flag"),
    )],
)
STREAM_WALKS = {
    "memory": Node(0, 0, ("tiles and flags, in L2",)),
    "LOAD": Node(1, 0, ("waits for a step's flag,", "then for a stage")),
    "CHAIN": Node(2, 0, ("64 columns of S,", "all its products")),
    "VALUES": Node(2, 1, ("rows of v, in pieces", "of 16 bytes")),
    "STORE": Node(3, 0, ("rows of o", "to global memory")),
}
STREAM_WALKS_EDGES = (
    Edge("memory", "LOAD", "flag, tiles"), Edge("LOAD", "CHAIN", pipelines="full"),
    Edge("CHAIN", "LOAD", pipelines="read"), Edge("VALUES", "CHAIN", "full", "full"),
    Edge("CHAIN", "VALUES", "read", "read"), Edge("CHAIN", "STORE", pipelines="written"),
    Edge("STORE", "CHAIN", pipelines="taken"),
)

SM90 = [
    Kernel(
        "sm90_prepare", "prepare", recorded.prepare, SM90_STEP, "one CTA's life", ctas=3,
        steps=(
            *MAKE_CHUNK, "operands are there",
            [(0, 3, "one product: [A_kk; A_qk]"), (4, 7, "zeros right of kept blocks")], "A_kk is there",
            [(0, 0, "inverse")],
        ), steps_title="Warps of a CTA",
    ),
    Kernel(
        "sm90_chain", "chain", chain, FORWARD32, "one turn of the ring of stages", inner={"tiles": sm90.tile(128)},
        nodes=walk_nodes("CHAIN", "rows of v", ("S^T in registers; all products", "o to global memory")),
        edges=walk_edges("CHAIN", "v"), ring="full[0]", frames={"CTA": ("LOAD", "CHAIN")},
    ),
    Kernel(
        "sm90_fused", "fused", sm90_fused, FORWARD64, "four chunks, CTA 0", nodes=FUSED90, edges=fused_edges(False),
        frames=frames(FUSED90), registers={"CHAIN": CHAIN, "PREPARE": PREPARE}, ring="full[0]",
        inner={"groups": sm90_fused.group, "tile": sm90.tile(128), "neighbour": sm90.tile(128)},
        steps=(*MAKE_CHUNK, "operands are there", [(0, 3, "one product: [A_kk; A_qk]")], [(0, 1, "next rows")],
               "A_kk is there", [(0, 0, "inverse, copy")]),
        steps_title="Warps of a PREPARE",
    ),
    Kernel(
        "sm90_stream_makes", "stream", MAKER, None, "", nodes=STREAM_MAKES, edges=STREAM_MAKES_EDGES,
        inner={"group 0": sm90_stream.group, "group 1": sm90_stream.group, "tiles": sm90.tile(128)},
        frames={"a CTA that makes tiles": tuple(name for name in STREAM_MAKES if "memory" not in name)},
        registers={"PREPARE": 96, "INVERSE": 96},
    ),
    Kernel(
        "sm90_stream_walks", "stream", WALKER, None, "", nodes=STREAM_WALKS, edges=STREAM_WALKS_EDGES,
        inner={"tiles": sm90.tile(128)},
        frames={"a CTA that walks": tuple(name for name in STREAM_WALKS if "memory" not in name)},
        registers=dict.fromkeys(WALKER.roles, sm90_stream.registers[1]) | {"CHAIN": sm90_stream.registers[0]},
    ),
    Kernel(
        "sm90_walk", "walk", recorded.walk, SM90_STEP, "one turn of the ring of stages",
        inner={"tiles": sm90.tile(128)}, ring="full[0]", frames={"CTA": ("LOAD", "WALK")},
        nodes=walk_nodes("WALK", "rows of do", ("dh^T in registers; all products", "dv and dh to global memory")),
        edges=walk_edges("WALK", "do"),
    ),
    Kernel(
        "sm90_grads", "grads", sm90_grads, SM90_STEP, "one chunk of 64 tokens", nodes=GRADS_NODES, edges=GRADS_EDGES,
        registers={"MATH": MATH, "LOAD": LOAD}, inner={"rows": sm90_grads.rows}, ring="values_full",
        frames={"CTA": ("LOAD", "MATH")},
    ),
]


# ---- Blackwell

B74 = problem(1024, 74)
BLACKWELL_SMS = 148
MAKE_CHUNK100 = (
    [(0, 7, OF_A_WARP_EACH)], "the sums of each two rows are there",
    [(0, 1, "sums before each two rows, anchors")], "sums are there",
    [(0, 7, "operands of products: exponentials, rounded to bfloat16")],
)
SM100_FORWARD, SM100_STEP = Call("sm_100a", "sm100", 1024, 74), Call("sm_100a", "sm100", 1024, 16, step=True)
sm100_recorded: Any = sm100_plan.training_plan(problem(1024, 16, disable_recompute=True), BLACKWELL_SMS)
sm100_grads: Any = sm100_recorded.grads
sm100_fused = sm100_plan.plan(B74, BLACKWELL_SMS, None).fused
Of, OfRecord, OfGrads = sm100_fused.tmem, sm100_recorded.walk.tmem, sm100_grads.tmem
IN_STAGES = {"stages": sm100_recorded.walk.stage, "tile": sm100_recorded.walk.tile}
CORE = Node(2, 1, ("products, issued by warp 0",))
OF_THE_TENSOR_CORE = (
    Edge("tensor core", "WALK", pipelines="out"), Edge("tensor core", "WALK", pipelines="added"),
)

SM100 = [
    Kernel(
        "sm100_fused", "fused", sm100_fused, SM100_FORWARD, "four chunks, CTA 0",
        nodes=FUSED100, edges=fused_edges(True), frames=frames(FUSED100), ring="full[0]",
        inner={
            "groups": sm100_fused.memory.group, "items": sm100.ITEM,
            **dict.fromkeys(("tile", "neighbour"), sm100_fused.memory.tile),
        },
        steps=(
            *MAKE_CHUNK100, "operands are there",
            [(0, 3, "A_kk, A_qk out of tensor memory"), (4, 7, "wait for KT_done")], "A_kk is there",
            [(0, 0, "inverse")], "TB is there",
            [(0, 0, "issue KT"), (2, 3, "A2"), (4, 7, "KT over kg; warp 4: tile to both CHAINs")],
        ), steps_title="Warps of a PREPARE",
        tmem=(
            Columns("[-X; o], even", Of.out, 64), Columns("odd", Of.out + 64, 64), Columns("S", Of.S, 64),
            Columns("pairs 0", Of.pairs, 32), Columns("pairs 1", Of.pairs + 32, 32),
            Columns("KT of PREPARE 0", Of.KT, 128), Columns("KT of PREPARE 1", Of.KT + 128, Of.end - Of.KT - 128),
        ),
    ),
    Kernel(
        "sm100_operands", "operands", sm100_recorded.prepare, SM100_STEP, "one CTA's life", ctas=3,
        inner={"tile": sm100_recorded.prepare.tile},
        steps=(
            *MAKE_CHUNK100, "operands are there",
            [(0, 3, "product of pairs (warp 0 issues); A_kk, A_qk"), (7, 7, "send KQ")], "A_kk is there",
            [(0, 0, "T'")], "T' is there",
            [(1, 1, "free TMEM"), (2, 3, "A2"), (4, 7, "KT = T'^T KG, 32 channels per warp")], "the tile is there",
            [(7, 7, "send rest")],
        ), steps_title="Warps of a CTA", tmem=(Columns("[A_kk; A_qk]", 0, sm100_recorded.prepare.columns),),
    ),
    Kernel(
        "sm100_record", "record", sm100_recorded.making.record, SM100_STEP, "one turn of the ring of stages",
        inner=IN_STAGES, ring="full[0]", frames={"CTA": ("LOAD", "CHAIN", "EPILOGUE", "tensor core")},
        nodes=walk_nodes("CHAIN", "rows of v", ("rounds and decays S, rounds X", "h to global memory"), "operands")
        | {"EPILOGUE": Node(1, 1, ("r and o, rounded,", "to global memory")), "tensor core": CORE},
        edges=(
            *walk_edges("CHAIN", "v"),
            Edge("tensor core", "CHAIN", pipelines="out"), Edge("tensor core", "CHAIN", pipelines="added"),
            Edge("tensor core", "EPILOGUE", "done[2]: {done}", "done"),
            Edge("EPILOGUE", "tensor core", "read[2]: {read}", "read"),
        ),
        tmem=(Columns("S (K, V)", OfRecord.S, 128), Columns("[r | o], even", OfRecord.out, 64),
              Columns("[r | o], odd", OfRecord.out + 64, 64)),
    ),
    Kernel(
        "sm100_walk", "walk", sm100_recorded.walk, SM100_STEP, "one turn of the ring of stages",
        inner=IN_STAGES, ring="full[0]", frames={"CTA": ("LOAD", "WALK", "tensor core")},
        nodes=walk_nodes("WALK", "rows of do", ("rounds and decays dh, rounds dv", "dv and dh to global memory"),
                         "operands")
        | {"tensor core": CORE},
        edges=(*walk_edges("WALK", "do"), *OF_THE_TENSOR_CORE),
        tmem=(Columns("dh (K, V)", OfRecord.S, 128), Columns("dv", OfRecord.out, 32)),
    ),
    Kernel(
        "sm100_grads", "grads", sm100_grads, SM100_STEP, "one chunk of 64 tokens",
        nodes=GRADS_NODES | {"tensor core": CORE}, ring="values_full",
        edges=(*GRADS_EDGES, Edge("tensor core", "MATH", "products[2]: {products}", "products")),
        registers=dict(zip(("MATH", "LOAD"), sm100_grads.registers)), inner={"rows": sm100_grads.rows},
        frames={"CTA": ("LOAD", "MATH", "tensor core")},
        tmem=(
            Columns("G; slopes", OfGrads.G, 64), Columns("up1", OfGrads.up1, 64), Columns("up2", OfGrads.up2, 64),
            Columns("down", OfGrads.down, 64), Columns("2^x, 2^-x", OfGrads.decays, 128), Columns("Qu", OfGrads.Qu, 32),
            Columns("Ku", OfGrads.Ku, 32), Columns("Kd", OfGrads.Kd, OfGrads.end - OfGrads.Kd),
        ),
    ),
]

KERNELS = SM90 + SM100


# ---- those with a picture of their time alone

FLOAT32 = Call("sm_89", "sm89", 256, 16, step=True, keep=False, dtype="float32")
TRITON = Call("sm_90a", "triton", 256, 16, step=True, keep=False)
HALVES = (("lower half", range(4)), ("upper half", range(4, 8)))

TIMED = [
    Timed("sm89_prepare", "prepare", FLOAT32, "one CTA's life"),
    Timed("sm89_chain", "chain", FLOAT32, "one chunk of 64 tokens", "barrier 0", 2, HALVES),
    Timed("sm89_chain_bwd", "chain_bwd", FLOAT32, "one chunk of 64 tokens", "barrier 0", 2, HALVES),
    Timed("triton_prepare", "prepare", TRITON, "one program's life"),
    Timed("triton_state", "state", TRITON, "one program's life, four chunks"),
    Timed("triton_state_bwd", "state_bwd", TRITON, "one program's life, four chunks"),
    Timed("triton_wy_bwd", "wy_bwd", TRITON, "one program's life"),
    Timed("triton_intra_bwd", "intra_bwd", TRITON, "one program's life"),
]
