"""Forms of the Hopper forward, how a test asks for one, and the calls that tests make of each.

A row of a table begins with a form: PAIR, or `Form(2, 3)` where three clusters of two CTAs share all walks.  Names of
rows begin with what the form is called: `-k any_gate` selects one form in all tests.
"""

from typing import Any, NamedTuple

import torch
from cute_calls import RAGGED, called, changed, drawn, saturated

from kda.backends.sm90 import launch, plan
from kda.model.bundles import Save
from ptxkit import capture


class Form(NamedTuple):
    """What the plan is asked for, however short a call is.  A form without any value is two kernels."""

    ctas: int = 0                            # CTAs of a cluster of the one kernel
    sharing: int | None = None               # its clusters, which share all walks; None: a walk each
    staged: bool | None = None               # whether its rows go through shared memory; None: as the plan says
    segments: int = 0                        # segments of each sequence, where some CTAs make tiles and others walk
    makers: int | None = None                # those that make tiles; None: as many as keep up
    chunks: int | None = None                # chunks of a segment of two kernels; None: as the plan says
    reverse: bool | None = None              # whether one kernel is walk and grads of a backward

    @property
    def forced(self) -> dict[str, Any]:
        """Return fields of Force."""
        return dict(
            form="stream" if self.segments else "one kernel" if self.ctas else "two kernels", ctas=self.ctas or None,
            clusters=self.sharing, staged=self.staged, segments=self.segments or None, makers=self.makers,
            segment_chunks=self.chunks, reverse=self.reverse,
        )


TWO_KERNELS, ALONE, PAIR, FOUR = (Form(n) for n in (0, 1, 2, 4))
STREAM, SEGMENTS, REVERSE = Form(segments=1), Form(chunks=2), Form(chunks=0, reverse=True)


class Call(NamedTuple):
    """A form, and what makes the call's inputs."""

    form: Form
    words: dict[str, Any]

    @property
    def packed(self):
        return "lengths" in self.words

    @property
    def any_gate(self):
        return self.words.get("gate", "bounded") != "bounded" or not self.words.get("l2norm", True)

    @property
    def v_first(self):
        return self.words.get("state_v_first", False)

    def case(self):
        words = {name: x for name, x in self.words.items() if name != "state_v_first"}
        dtypes = {name: words.pop(f"dtype of {name}", None) for name in ("g", "initial_state")}
        states, limits = (words.pop(name, False) for name in ("states", "saturated"))
        case = drawn(**words)
        case = changed(case, **{name: (lambda x, dtype=dtype: x.to(dtype)) for name, dtype in dtypes.items() if dtype})
        if states:
            case.keywords["return_intermediate_states"] = True
        return saturated(case) if limits else case


def table(**forms):
    """Return calls by name.  A row of a form's table makes the inputs, and stands behind a form if that is unusual."""
    found = {}
    for name, (usual, rows) in forms.items():
        for row, words in rows.items():
            found[f"{name}: {row}"] = Call(*words) if isinstance(words, tuple) else Call(usual, words)
    return found


def results(call, save=Save.NOTHING, **options):
    """Return what the call returns and keeps, by name, and the session with the simulator's findings."""
    if save is Save.NOTHING:
        return called(call.case(), state_v_first=call.v_first, **options)
    case = call.case()
    with capture(arch="sm90", **dict(strict=True) | options) as session:
        out = launch.forward(case.problem(), case.inputs, save)
    found = {"o": out.o, "ht": out.final_state}
    found |= {"memory": out.saved.memory} if save is Save.OWN else out.saved._asdict()
    return {name: x for name, x in found.items() if x is not None}, session


def assert_the_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_nothing_found(session):
    assert not session.findings, "\n".join(map(str, session.findings[:5]))


def assert_as_planned(call, case):
    """Check that the plan follows the form."""
    planned, form = plan.plan(case.problem(), 132), call.form
    narrow = case.keywords["g"].dtype == torch.bfloat16 and not case.spec.gate_per_head
    assert planned.name == form.forced["form"]
    if form.segments:
        assert planned.stream.staged == narrow and planned.segments == form.segments
        assert planned.stream.cut == (form.segments > 1)
    elif form.ctas:
        found = planned.fused
        staged = narrow and (form.ctas > 2 or call.any_gate) if form.staged is None else form.staged
        assert (found.ctas, found.staged, found.prepare.in_blocks) == (form.ctas, staged, call.any_gate)
        assert found.wrapped == (form.ctas == 1 or bool(form.sharing))
    else:
        assert bool(planned.carry) == bool(form.chunks)


# calls whose results are the definition, with the bits of two kernels

CUT = dict(lengths=(300, 1, 0, 5, 40))       # a walk is longer than a share
FEW = dict(lengths=(0, 70) + (0,) * 6)       # fewer chunks than clusters, beside sequences of no tokens
SMALL = dict(K=64, V=64)
FLOAT32 = {"dtype of g": torch.float32}
NARROW_STATES = {"state_v_first": True, "dtype of initial_state": torch.bfloat16}
GIVEN = dict(gate="given", beta="given", l2norm=False)

CALLS = table(
    pair=(PAIR, {
        "one chunk and a part of one": dict(T=33),
        "a chunk of each group": dict(T=100),
        "stages used several times, GVA": dict(T=390, HV=2),
        "one token": dict(T=1),
        "a batch": dict(B=2, T=40),
        "packed": RAGGED,
        "packed, GVA": dict(HV=2, **RAGGED),
        "packed, many tokens of none": dict(padding=140, **RAGGED),
        "no initial state": dict(T=70, initial_state=False),
        "states of (V, K) and bfloat16": dict(T=70, **NARROW_STATES),
        "rows are staged": (PAIR._replace(staged=True), dict(T=390)),
        "one gate per head": dict(T=390, HV=2, gate_per_head=True),
    }),
    shares=(Form(2, 2), {
        "a walk is cut between two clusters": dict(T=70, HV=3),
        "each cut goes through a walk": (Form(2, 3), dict(B=2, T=130, HV=2)),
        "a share is a whole number of walks": dict(B=4, T=33),
        "a share is a chunk": (Form(2, 3), dict(B=4, T=20)),
        "packed, GVA": dict(lengths=(65, 0, 1, 130), HV=2),
        "a walk is longer than a share": (Form(2, 4), CUT),
        "packed, many tokens of none": (Form(2, 3), dict(lengths=(40, 33, 0, 70), padding=140)),
        "no initial state": dict(T=70, HV=3, initial_state=False),
        "more sequences than lanes": (Form(2, 3), dict(lengths=(1, 0, 2) * 13)),
        "fewer chunks than clusters": (Form(2, 5), FEW),
        "states of (V, K) and bfloat16": dict(lengths=(70, 0, 40), **NARROW_STATES),
    }),
    four=(FOUR, {
        "every tile is made twice": dict(T=650),
        "a walk is cut between two clusters": (Form(4, 2), dict(T=70, HV=3)),
        "fewer chunks than groups": dict(T=100),
        "one token": dict(T=1),
        "packed, GVA": dict(HV=2, **RAGGED),
        "a walk is longer than a share": (Form(4, 4), CUT),
        "fewer chunks than clusters, GVA": (Form(4, 8), dict(HV=2, **FEW)),
        "packed, many tokens of none": (Form(4, 3), dict(lengths=(40, 33, 0, 70), padding=140)),
        "no initial state": (Form(4, 2), dict(T=130, HV=3, initial_state=False)),
        "g of float32": dict(T=230, **FLOAT32),
        "one gate per head": dict(T=230, gate_per_head=True),
    }),
    any_gate=(PAIR, {
        "stages used several times, GVA": dict(T=390, HV=2, gate="softplus"),
        "a tile is made twice by each group": (FOUR, dict(T=810, gate="softplus")),
        "given decays": dict(T=100, gate="given"),
        "given decays, in fours, a walk is cut between two clusters": (Form(4, 2), dict(T=70, HV=3, gate="given")),
        "a bounded gate without l2norms, packed": (Form(4, 2), dict(l2norm=False, HV=2, **RAGGED)),
        "one token": (FOUR, dict(T=1, gate="softplus")),
        "packed, GVA, shares": (Form(2, 2), dict(HV=2, gate="softplus", **RAGGED)),
        "fewer chunks than clusters": (Form(2, 5), dict(gate="softplus", **FEW)),
        "packed, many tokens of none": (Form(4, 3), dict(lengths=(40, 33, 0, 70), padding=140, gate="softplus")),
        "no initial state": (Form(2, 2), dict(T=130, HV=3, initial_state=False, gate="softplus")),
        "g of float32": (FOUR, dict(T=230, gate="softplus", **FLOAT32)),
        "given decays of float32": dict(T=100, gate="given", **FLOAT32),
        "one gate per head, packed, shares": (Form(2, 2), dict(gate="softplus", gate_per_head=True, **RAGGED)),
        "one given decay per head, in fours": (FOUR, dict(T=230, gate="given", gate_per_head=True)),
        "rows come straight to registers": (PAIR._replace(staged=False), dict(T=390, gate="softplus")),
        "rows come straight to registers, in fours": (FOUR._replace(staged=False), dict(T=390, gate="softplus")),
    }),
    alone=(ALONE, {
        "stages used several times": dict(V=64, T=390),
        "packed, GVA": dict(V=64, HV=2, **RAGGED),
        "packed, many tokens of none": dict(V=64, padding=140, **RAGGED),
        "a walk is longer than a share": (Form(1, 4), dict(V=64, **CUT)),
        "fewer chunks than clusters": (Form(1, 5), dict(V=64, **FEW)),
        "each cut goes through a walk": (Form(1, 7), dict(V=64, B=2, T=130, HV=2)),
        "any gate": dict(V=64, T=200, gate="softplus"),
        "one gate per head": dict(V=64, T=200, gate_per_head=True),
        "one token": dict(V=64, T=1),
        "K = V = 64": (Form(1, 2), dict(HV=2, **SMALL, **RAGGED)),
    }),
    one_walks=(PAIR, {
        "stages used several times": dict(V=64, T=390),
        "packed, GVA": dict(V=64, HV=2, **RAGGED),
        "a walk is longer than a share": (Form(2, 4), dict(V=64, **CUT)),
        "any gate": dict(V=64, B=2, T=100, **GIVEN),
        "no initial state": (Form(2, 3), dict(V=64, T=70, HV=5, initial_state=False)),
        "K = V = 64": dict(B=2, T=150, **SMALL),
    }),
    K_64=(PAIR, {
        "both walk": dict(K=64, T=390, HV=2),
        "both walk, a walk is longer than a share": (Form(2, 4), dict(K=64, **CUT)),
        "clusters of four": (FOUR, dict(K=64, T=420)),
        "clusters of four, packed, shares": (Form(4, 3), dict(K=64, HV=2, **CUT)),
    }),
)

# calls whose results are the definition, with bits of their own

CUT_STREAM = Form(segments=2)
IN_THREE = Form(segments=3)
DEFINED = table(
    stream=(STREAM, {
        "an odd number of chunks": dict(T=70),
        "a group makes several steps": dict(T=450),
        "one token": dict(T=1),
        "one more than a step": dict(T=65, H=2),
        "packed, GVA": dict(HV=2, **RAGGED),
        "packed, tokens of no sequence": dict(lengths=(40, 33, 0, 70), padding=140),
        "packed, fewer steps than makers": (Form(segments=1, makers=5), FEW),
        "rows of a batch": dict(B=2, T=100, HV=2),
        "no initial state": dict(T=130, initial_state=False),
        "64 columns": dict(T=150, V=64),
        "g of float32": dict(T=130, **FLOAT32),
        "softplus": dict(T=150, gate="softplus"),
        "softplus, packed": dict(gate="softplus", HV=2, **RAGGED),
        "given decays": dict(T=150, gate="given"),
        "given decays of float32, 64 columns": dict(T=150, V=64, gate="given", **FLOAT32),
        "no norms": dict(T=100, l2norm=False),
        "one gate per head, GVA": dict(T=150, HV=2, gate_per_head=True),
        "states of (V, K)": dict(T=100, state_v_first=True),
        **{f"saturated, {gate}": dict(T=150, gate=gate, saturated=True) for gate in ("bounded", "softplus", "given")},
    }),
    stream_of_segments=(CUT_STREAM, {
        "GVA, segments of four steps": dict(T=450, HV=2),
        "the last segment has one token": (IN_THREE, dict(T=385)),
        "a segment has no tokens": (IN_THREE, dict(T=100)),
        "packed, GVA": (IN_THREE, dict(HV=2, **RAGGED)),
        "packed, tokens of no sequence": dict(lengths=(140, 33, 0, 70), padding=250),
        "packed, fewer steps than makers": (Form(segments=2, makers=5), FEW),
        "rows of a batch": dict(B=2, T=150),
        "no initial state": dict(T=200, initial_state=False),
        "64 columns": (IN_THREE, dict(T=300, V=64)),
        "softplus that forgets": dict(T=200, gate="softplus", regime="fast"),
        "one gate per head that forgets, packed": dict(gate="softplus", regime="fast", gate_per_head=True, **RAGGED),
        "states of (V, K)": dict(T=150, state_v_first=True),
        "several blocks of rows of a segment": dict(T=1200),
        **{f"saturated, {gate}": (IN_THREE, dict(T=150, gate=gate, saturated=True))
           for gate in ("bounded", "softplus", "given")},
    }),
    segments=(SEGMENTS, {
        "five, the last of one token": dict(T=257),
        "a batch, GVA, K = 64": dict(B=2, T=150, HV=2, K=64),
        "packed": dict(lengths=(300, 0, 200), padding=40, HV=2),
        "no initial state": dict(T=200, initial_state=False),
        "softplus gate that forgets": dict(T=200, gate="softplus", regime="fast", **SMALL),
        "states of (V, K)": dict(T=200, K=64, state_v_first=True),
        "states of (V, K) and bfloat16": dict(T=200, K=64, **NARROW_STATES),
    }),
)

# calls that return the states that enter chunks: both ways round, with the bits of two kernels

SOME = dict(lengths=(130, 0, 65, 1), padding=5)
STATES = {
    "a batch, GVA": (PAIR, dict(B=2, T=150, HV=2)),
    "chunks of 32": (PAIR, dict(T=100, C=32)),
    "packed, GVA, walks shared out": (Form(2, 2), dict(HV=3, **SOME)),
    "any gate": (PAIR, dict(T=100, gate="softplus")),
    "clusters of four, packed": (FOUR, SOME),
    "clusters of four, shares, any gate": (Form(4, 2), dict(HV=3, gate="softplus", **SOME)),
    "V = 64, alone": (ALONE, dict(V=64, T=150, HV=2)),
    "V = 64, one of two walks": (PAIR, dict(V=64, T=150, HV=2)),
    "K = 64, both walk": (PAIR, dict(K=64, T=150, HV=2)),
    "K = 64, clusters of four": (FOUR, dict(K=64, T=150, HV=2)),
}
STATES = {
    f"states: {name}, {order} first": Call(form, dict(states=True, state_v_first=order == "V", **words))
    for name, (form, words) in STATES.items() for order in "KV"
}

# what one kernel keeps for its backward has the bits of what two kernels keep

KEPT = table(
    pair=(PAIR, {
        "stages used several times": dict(T=390),
        "the same, GVA": dict(T=390, HV=2),
        "one gate per head": dict(T=130, gate_per_head=True),
        "one token": dict(T=1),
        "a batch, an odd number of chunks": dict(B=2, T=70),
        "packed, GVA": dict(HV=2, **RAGGED),
        "packed, many tokens of none": dict(padding=140, **RAGGED),
        "a walk is cut behind an odd chunk": (Form(2, 4), CUT),
        "fewer chunks than clusters": (Form(2, 5), FEW),
        "each cut goes through a walk": (Form(2, 3), dict(B=2, T=130, HV=2)),
    }),
    four=(FOUR, {
        "packed, GVA": dict(HV=2, **RAGGED),
        "every tile made twice": dict(T=650),
        "a walk is cut behind an odd chunk": (Form(4, 4), CUT),
        "fewer chunks than clusters": (Form(4, 5), FEW),
        "a softplus gate": dict(T=390, gate="softplus"),
        "one softplus gate per head, GVA": dict(T=130, HV=2, gate="softplus", gate_per_head=True),
        "given decays, shares": (Form(4, 2), dict(T=130, HV=3, **GIVEN)),
        "no initial state": (Form(4, 2), dict(T=130, HV=3, initial_state=False)),
    }),
)

# the bits of results in other orders of warps: (schedule, whether copies come early)

EARLY = [(1, True), (2, True), (3, True)]
MIXED = [(1, False), (2, True), (3, False), (4, True)]
ODD = dict(lengths=(290, 0, 1, 90), padding=9)
PADDED = dict(padding=9, **RAGGED)
ROWS = dict(T=200, HV=2)
ORDERS = {
    "pair, rows": (PAIR, dict(T=390), EARLY),
    "pair, packed": (PAIR, PADDED, EARLY),
    "shares, rows": (Form(2, 2), dict(T=130, HV=3), MIXED),
    "shares, packed": (Form(2, 2), dict(lengths=(100, 0, 1, 90), padding=9), MIXED),
    "four, rows": (FOUR, dict(T=450), MIXED),
    "four, packed": (Form(4, 2), ODD, MIXED),
    "any_gate, rows": (PAIR, dict(T=450, gate="softplus"), MIXED),
    "any_gate, packed": (Form(2, 2), dict(gate="softplus", **ODD), MIXED),
    "any_gate, in fours, rows": (FOUR, dict(T=450, gate="softplus"), MIXED),
    "any_gate, in fours, packed": (Form(4, 2), dict(gate="softplus", **ODD), MIXED),
    "alone, rows": (ALONE, dict(V=64, **ROWS), EARLY[:2]),
    "alone, packed": (Form(1, 2), dict(V=64, **PADDED), EARLY[:2]),
    "alone, packed, GVA": (ALONE, dict(V=64, HV=2, **PADDED), EARLY[:2]),
    "one_walks, rows": (PAIR, dict(V=64, **ROWS), EARLY[:2]),
    "one_walks, packed": (Form(2, 2), dict(V=64, **PADDED), EARLY[:2]),
    "K_64, rows": (PAIR, dict(K=64, **ROWS), EARLY[:2]),
    "K_64, packed": (Form(2, 2), dict(K=64, **PADDED), EARLY[:2]),
    "K = V = 64, rows": (ALONE, dict(**SMALL, **ROWS), EARLY[:2]),
    "K = V = 64, packed": (Form(1, 2), dict(**SMALL, **PADDED), EARLY[:2]),
    "K = V = 64, packed, GVA": (Form(1, 2), dict(HV=2, **SMALL, **PADDED), EARLY[:2]),
    "states": (Form(2, 2), dict(HV=3, states=True, **SOME), EARLY),
    "stream, rows": (Form(segments=1, makers=2), dict(T=390), MIXED),
    "stream, packed": (Form(segments=1, makers=2), ODD, MIXED),
    "stream_of_segments, rows": (Form(segments=2, makers=2), dict(T=390), MIXED),
    "stream_of_segments, packed": (Form(segments=2, makers=2), ODD, MIXED),
    "segments": (SEGMENTS, dict(lengths=(300, 0, 200), **SMALL), EARLY[:2]),
    "two kernels": (TWO_KERNELS, dict(lengths=(200, 0, 65), **SMALL), EARLY[:2]),
    "kept": (Form(2, 3), ODD, MIXED[:3]),
    "kept by four": (Form(4, 3), ODD, MIXED[:3]),
}
ORDERS = {
    f"{name}, {schedule}": (
        Call(form, words), Save.OWN if name.startswith("kept") else Save.NOTHING, dict(schedule=schedule, early=early)
    )
    for name, (form, words, orders) in ORDERS.items() for schedule, early in orders
}

# sequences of no tokens, whose states are handed through

NONE = dict(lengths=(0, 0), padding=40)
NO_TOKENS = table(
    pair=(PAIR, {
        "a batch": dict(B=2, T=0), "a batch, GVA": dict(B=2, T=0, HV=2),
        "packed": NONE, "packed, GVA": dict(HV=2, **NONE),
    }),
    shares=(Form(2, 2), {
        "packed": dict(lengths=(0, 0, 0), padding=40), "packed, GVA": dict(lengths=(0, 0, 0), HV=2, padding=40),
    }),
    four=(Form(4, 2), {"packed, GVA": dict(lengths=(0, 0, 0), HV=2, padding=40)}),
    alone=(ALONE, {"packed, GVA": dict(V=64, HV=2, **NONE)}),
    one_walks=(PAIR, {"packed, GVA": dict(V=64, HV=2, **NONE)}),
    stream=(STREAM, {"packed, GVA, one of 40 tokens": dict(lengths=(0, 40, 0), HV=2, padding=40)}),
    stream_of_segments=(CUT_STREAM, {"packed, GVA, one of 40 tokens": dict(lengths=(0, 40, 0), HV=2, padding=40)}),
)

# the form that was fastest: CTAs of a cluster and whether clusters share walks; segments and makers of a stream; TWO
# kernels.  K = V = 128 was timed on an H200, other dims on an H100 (benchmarks/results/h100-sm90-dims.json).

TWO = "two kernels"
CHOSEN = {
    "T=8192 H=64": (2, False), "T=8192 H=128": (2, True), "T=1024 H=64": (2, False), "T=64 H=8": (2, False),
    "T=8192 H=96": (2, True), "T=32768 H=8": ("stream", 2, 84), "T=8192 H=64 N=8 packed": (2, True),
    "T=8192 H=64 N=64 packed": (2, True), "T=8192 H=32 N=32 packed": (2, True), "T=2048 H=96 N=32 packed": (2, True),
    "T=8192 H=28": (4, False), "T=8192 H=32": (4, True), "T=8192 H=40": (4, True), "T=4096 H=24": (4, False),
    "T=1024 H=32": (4, True), "T=8192 H=4 N=8 packed": (4, True), "T=8192 H=44": (2, False), "T=8192 H=48": (2, False),
    "T=1024 H=8": TWO, "T=2048 H=16": ("stream", 1, 100), "T=8192 H=1 N=32 packed": (2, False),
    "softplus T=8192 H=64": (2, False), "softplus T=8192 H=96": (2, True), "softplus T=1024 H=64": (2, False),
    "softplus T=8192 H=64 N=8 packed": (2, True), "softplus T=8192 H=64 N=64 packed": (2, True),
    "softplus T=8192 H=32": (4, True), "softplus T=8192 H=24": (4, False), "softplus T=8192 H=40": (4, True),
    "softplus T=8192 H=48": TWO, "softplus T=8192 H=16": ("stream", 1, 100), "softplus T=4096 H=22": ("stream", 1, 88),
    "softplus T=1024 H=32": TWO, "V=64 T=8192 H=64": (2, False), "V=64 T=8192 H=128": (1, True),
    "V=64 T=8192 H=40": (2, False), "V=64 T=8192 H=96": (2, True), "V=64 T=8192 H=64 N=8 packed": (1, True),
    "V=64 T=8192 H=64 N=64 packed": (1, True), "V=64 T=8192 H=32": ("stream", 1, 100), "V=64 T=1024 H=64": (2, False),
    "softplus V=64 T=8192 H=64": (2, False), "softplus V=64 T=8192 H=128": (1, True),
    "K=64 V=64 T=8192 H=64": (2, False), "K=64 V=64 T=8192 H=24": TWO, "K=64 V=64 T=8192 H=64 N=8 packed": (1, True),
    "softplus K=64 V=64 T=8192 H=64": TWO, "K=64 T=8192 H=64": (2, False), "K=64 T=8192 H=32": (4, True),
    "K=64 T=8192 H=16": TWO, "T=8192 H=16": ("stream", 1, 100), "T=4096 H=12": ("stream", 1, 80),
    "T=8192 H=20": ("stream", 1, 92), "T=8192 H=24": ("stream", 1, 84), "T=8192 H=16 V=64": ("stream", 1, 107),
    "T=2048 H=8": ("stream", 1, 54), "T=8192 H=8": ("stream", 2, 84), "T=8192 H=4": ("stream", 3, 80),
    "T=32768 H=2": ("stream", 6, 80), "T=32768 H=8 V=64": ("stream", 2, 100), "T=512 H=16": TWO,
    "T=32768 H=12": ("stream", 1, 80), "T=8192 H=4 N=4 packed": (4, False),
}
CHOSEN_TO_KEEP = {                           # CTAs of a cluster, clusters that share walks; measured but for 44 heads
    "T=8192 H=64": (2, 0), "T=8192 H=96": (2, 66), "T=8192 H=32": (4, 30), "T=8192 H=24": (4, 0),
    "T=8192 H=64 N=8 packed": (2, 66), "T=1024 H=64": (2, 0), "softplus T=8192 H=32": (4, 30), "T=1024 H=32": (0, 0),
    "T=8192 H=64 N=64 packed": (0, 0), "T=8192 H=16": (0, 0), "softplus T=8192 H=64": (0, 0), "T=8192 H=44": (0, 0),
}
