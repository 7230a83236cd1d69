"""The Blackwell kernels of a step that records gradients, launched alone in the simulator, and their formulas."""

import functools
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.backends.common.cute.configs import ChunkTable, SegmentTable, chunk_options
from kda.backends.common.cute.tile import C, decay_index, swizzle_128B
from kda.backends.common.routine import Draft
from kda.backends.common.tensors import INPUTS, ROWS, inputs_in_memory
from kda.backends.sm100 import launch, plan
from kda.backends.sm100.configs import (
    CTAS,
    KeepingConfig,
    OperandsConfig,
    RecordConfig,
    WalkConfig,
    record_tile,
)
from kda.model.stages import LOG2_E
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.literal import l2norm, log_decay, step_size
from ptxkit import capture
from ptxkit.compile.target import parse

RAGGED, SMALL = dict(lengths=(65, 0, 1, 30), padding=9), dict(K=64, V=64)


def case_of(**options):
    return make_inputs(**dict(H=1, K=128, V=128, gate="bounded") | options)


def kernel(config, arch="sm100"):
    return launch.kernel(config, parse(arch))


def launched(config, grid, numbers, tensors, arch="sm100", bare=False, kinds=None, **options):
    """Launch and return the Run; `bare`: in a capture of the caller.  Findings fail the test, or go into `kinds`."""
    draft = Draft(lambda config: kernel(config, arch), tuple(tensors))
    draft.launch(config, grid, **draft.only(*tensors), **numbers)
    if bare:
        return draft.list()([*tensors.values()])
    with capture(arch=arch, **dict(strict=True) | options) as session:
        draft.list()([*tensors.values()])
    if kinds is not None:
        kinds |= {finding.kind for finding in session.findings}
    else:
        assert not session.findings, "\n".join(map(str, session.findings[:5]))
    return session.runs[0]


# what the kernels should give, in float64


class Chunk(NamedTuple):
    """A chunk of one value head, in float64; rows of no token are left out."""

    kE: torch.Tensor
    qg: torch.Tensor
    KT: torch.Tensor
    T: torch.Tensor
    A2: torch.Tensor
    decay: torch.Tensor                      # (K)
    v: torch.Tensor
    do: torch.Tensor


def sequences(case):
    """Return the first token, among those of all rows, and the number of tokens of each sequence."""
    if case.spec.lengths is None:
        B, T = case.spec.shape
        return [(n * T, T) for n in range(B)]
    return list(zip(case.spec.offsets, case.spec.lengths))


def token_rows(case):
    """Return qn, kn, log2 decays, v and do (tokens, HV, D) and step sizes (tokens, HV) in float64."""
    p, x = case.problem(), case.inputs
    q, k, v, g, do = (y.flatten(0, 1).double() for y in (x.q, x.k, x.v, x.g, case.do))
    if p.qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (y.repeat_interleave(p.HV // p.H, 1) for y in (q, k))
    A_log = None if x.A_log is None else x.A_log.double().view(p.HV, 1)
    bias = None if x.dt_bias is None else x.dt_bias.double().view(p.HV, p.K)
    return q * p.scale, k, LOG2_E * log_decay(p, g, A_log, bias), v, do, step_size(p, x.beta.flatten(0, 1).double())


@functools.lru_cache(maxsize=4)
def _chunks(key, case):
    rows = token_rows(case)
    return [[[chunk(*[y[start : min(start + C, begin + tokens), head] for y in rows])
              for start in range(begin, begin + tokens, C)] for head in range(case.spec.heads)]
            for begin, tokens in sequences(case)]


def chunks_of(case):
    """Return the chunks of each sequence and value head."""
    return _chunks.__wrapped__(None, case)


def chunk(q, k, g2, v, do, b):
    gc = g2.cumsum(0)
    between = (gc[:, None] - gc[None]).clamp(max=0).exp2()
    A_kk = torch.einsum("ik,jk,ijk->ij", k, k, between).tril(-1) * b
    A_qk = torch.einsum("ik,jk,ijk->ij", q, k, between).tril() * b
    T = torch.linalg.inv(torch.eye(len(b), dtype=b.dtype) + A_kk)
    KG = b[:, None] * k * (gc[-1] - gc).exp2()
    return Chunk(k * gc.exp2(), q * gc.exp2(), T.mT @ KG, T, A_qk @ T, gc[-1].exp2(), v, do)


# operands


def unswizzled(data, rows, columns):
    """Return (.., rows, columns) bfloat16 from (.., bytes) of an image, which has one half of the columns first."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    return data.contiguous().view(torch.bfloat16)[..., swizzle_128B(row, column, rows) // 2].double()


def decoded(tiles, chunks, HV, K):
    """Return the fields of each tile."""
    tile, found = record_tile(K), {}
    tiles = tiles.view(chunks, HV, tile.bytes)
    for name, shape in dict(KQ=(2 * C, K), KT=(C, K), TA=(C, 2 * C)).items():
        field = getattr(tile, name)
        found[name] = unswizzled(tiles[..., field.offset : field.offset + field.bytes], *shape)
    decay = tile.decay
    floats = tiles[..., decay.offset : decay.offset + decay.bytes].contiguous().view(torch.float32)
    found["decay"] = floats[..., decay_index(torch.arange(K))].double()
    return found


def operands_config(case):
    return OperandsConfig(**chunk_options(case.problem()), packed=case.spec.lengths is not None)


def keeping_config(case):
    return plan.keeping_config(case.problem(), plan.PAIRS, True)


def chunk_table(case):
    """Return the table of packed sequences' chunks, with entries for tokens of no sequence."""
    entries = [(start, min(C, begin + tokens - start), number) for begin, tokens in sequences(case)
               for number, start in enumerate(range(begin, begin + tokens, C))]
    end, T = case.spec.offsets[-1], case.spec.shape[1]
    entries += [(start, start - min(start + C, T), 0) for start in range(end, T, C)] + [(T, 0, 0)]
    assert len(entries[0]) == ChunkTable.WIDTH
    return torch.tensor(entries, dtype=torch.int64)


def operands_of(case, **options):
    """Return tiles as they are in memory, o, of which some rows are cleared, and the Run."""
    p, packed = case.problem(), case.spec.lengths is not None
    table = chunk_table(case) if packed else None
    per_row = -(-p.T // C)
    chunks = len(table) if packed else per_row * p.B
    tiles = torch.full((chunks * p.HV * record_tile(p.K).bytes,), 0xFF, dtype=torch.uint8)
    o = torch.full((p.B, p.T, p.HV, p.V), torch.nan, dtype=torch.bfloat16)
    x = {name: y for name, y in zip(INPUTS, inputs_in_memory(case.inputs)) if name in ROWS}
    run = launched(
        operands_config(case), (p.HV, *((chunks, 1) if packed else (per_row, p.B))),
        dict(T=p.T, chunks=chunks, H=p.H, HV=p.HV, scale=p.scale, lower_bound=p.lower_bound or 0.0),
        dict(x, tiles=tiles, o=o, chunk_table=table), **options,
    )
    return tiles, o, run


def distance(found, expected):
    """Return the norm of the difference over the norm of what is expected, or the former alone if the latter is 0."""
    assert found.shape == expected.shape and found.isfinite().all()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def tile_of(one):
    """Return the fields of a chunk's tile, rows of no token included."""
    rows, pad = len(one.v), C - len(one.v)

    def padded(x):
        return torch.nn.functional.pad(x, (0, 0, 0, pad))

    TA = torch.zeros(C, 2 * C, dtype=torch.float64)
    TA[:rows, :rows], TA[:rows, C : C + rows] = (one.T - torch.eye(rows, dtype=torch.float64)).mT, one.A2.mT
    return dict(KQ=torch.cat((padded(-one.kE), padded(one.qg))), KT=padded(one.KT), TA=TA, decay=one.decay)


def operands_are_right(case, **options):
    tiles, o, _ = operands_of(case, **options)
    of_heads = zip(*[[one for each in of_sequence for one in each] for of_sequence in zip(*chunks_of(case))])
    expected = [[tile_of(one) for one in heads] for heads in of_heads]
    K, HV = case.spec.K, case.spec.heads
    found = decoded(tiles, len(tiles) // (HV * record_tile(K).bytes), HV, K)
    for field, x in found.items():
        right = torch.stack([torch.stack([tile[field] for tile in heads]) for heads in expected])
        assert distance(x[: len(right)], right) < (1e-5 if field == "decay" else 4e-3), field
    assert case.spec.lengths or o.isnan().all()
    padding = case.spec.padding
    assert o[:, o.shape[1] - padding :].eq(0).all() and o[:, : o.shape[1] - padding].isnan().all()


# states


def state_of(x, v_first=False):
    return (x.mT if v_first else x).double()


def walked(case, h0=None):
    """Return (states that enter chunks, and the last; r; o) of each sequence and head."""
    K, V, found = case.spec.K, case.spec.V, []
    for n, of_heads in enumerate(chunks_of(case)):
        found.append([])
        for head, chunks in enumerate(of_heads):
            S, r, o = [torch.zeros(K, V, dtype=torch.float64) if h0 is None else h0[n, head]], [], []
            for one in chunks:
                X = one.v - one.kE @ S[-1]
                r.append(one.T @ X)
                o.append(one.qg @ S[-1] + one.A2 @ X)
                S.append(one.decay[:, None] * S[-1] + one.KT.mT @ X)
            found[-1].append((S, r, o))
    return found


def walked_back(case, dht=None):
    """Return (gradients of states that leave chunks, first that of the one that enters; dv) by sequence and head."""
    K, V, found = case.spec.K, case.spec.V, []
    for n, of_heads in enumerate(chunks_of(case)):
        found.append([])
        for head, chunks in enumerate(of_heads):
            dS, dv = [torch.zeros(K, V, dtype=torch.float64) if dht is None else dht[n, head]], []
            for one in reversed(chunks):
                dv.append(one.KT @ dS[-1] + one.A2.mT @ one.do)
                dS.append(one.decay[:, None] * dS[-1] + one.qg.mT @ one.do - one.kE.mT @ dv[-1])
            found[-1].append((dS[::-1], dv[::-1]))
    return found


def rows(found, index, case):
    """Return (B, T, HV, V) from what `walked` found, with nan in rows of no sequence."""
    p = case.problem()
    y = torch.full((p.B * p.T, p.HV, p.V), torch.nan, dtype=torch.float64)
    for (begin, tokens), of_heads in zip(sequences(case), found):
        for head, one in enumerate(of_heads):
            if tokens:
                y[begin : begin + tokens, head] = torch.cat(one[index])
    return y.view(p.B, p.T, p.HV, p.V)


def kept(images):
    """Return (states, HV, K, V) from images."""
    _, HV, K, V = images.shape
    return unswizzled(images.view(torch.uint8).view(-1, HV, 2 * K * V), K, V)


def states(found, of_chunks):
    """Return (states, HV, K, V): those that `of_chunks` picks from the states of each sequence's chunks."""
    picked = [torch.stack(each) for of_heads in found for each in zip(*[of_chunks(one[0]) for one in of_heads])]
    return torch.stack(picked)


def entering(S):
    return S[:-1:2]


def leaving(dS):
    chunks = len(dS) - 1
    return [dS[min(index + 2, chunks)] for index in range(0, chunks, 2)]


def segment_table(case, segment):
    """Return the table of packed sequences' segments of so many chunks, with an entry of no sequence."""
    entries, chunk, state = [], 0, 0
    for n, (begin, tokens) in enumerate(sequences(case)):
        chunks = -(-tokens // C)
        for number in range(max(1, -(-chunks // segment))):
            skipped = number * segment
            place = (begin + skipped * C, tokens - skipped * C, chunk + skipped, state + skipped // 2)
            entries.append((n, number, *place))
        chunk, state = chunk + chunks, state + -(-chunks // 2)
    assert len(entries[0]) == SegmentTable.WIDTH
    return torch.tensor([*entries, (-1, 0, 0, 0, 0, 0)], dtype=torch.int64)


class Places(NamedTuple):
    """Where segments lie: numbers of a launch, the table, and how many segments and kept states there are."""

    numbers: dict
    table: torch.Tensor | None
    segments: int
    states: int


def places_of(case, segment=None):
    p = case.problem()
    chunks = -(-p.T // C)
    segment = segment or max(chunks, 1)
    of_row = max(1, -(-chunks // segment))
    numbers = dict(T=p.T, chunks=chunks, segments=of_row, segment=segment, HV=p.HV)
    if not p.packed:
        return Places(numbers, None, of_row * p.B, p.B * -(-p.T // (2 * C)))
    table = segment_table(case, segment)
    return Places(numbers, table, len(table), sum(-(-tokens // (2 * C)) for _, tokens in sequences(case)))


def given(x, v_first, dtype=torch.float32):
    return None if x is None else (x.mT if v_first else x).to(dtype).contiguous()


def fresh(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype)


def walk_of(case, tiles, walk="sequences", segment=None, dht=None, v_first=False, dh0="float32", **options):
    """Return dv, dh and dh0, the last two (.., K, V) in float64, and the Run."""
    p, places = case.problem(), places_of(case, segment)
    of_states = dh0 if walk != "carry" else "float32"
    config = WalkConfig(p.packed, walk, dht is not None, of_states, v_first and walk != "carry", K=p.K, V=p.V)
    dv = fresh(p.B, p.T, p.HV, p.V, dtype=torch.bfloat16)
    dh = fresh(places.states, p.HV, p.K, p.V, dtype=torch.bfloat16)
    ends = fresh(places.segments if walk == "carry" else p.N, p.HV, p.K, p.V, dtype=getattr(torch, of_states))
    begins = given(dht, v_first and walk == "sequences")
    run = launched(
        config, (config.strips, p.HV, places.segments), places.numbers,
        dict(tiles=tiles, do=case.do, dht=begins, dv=dv, dh=dh, dh0=ends, segment_table=places.table), **options,
    )
    return dv, None if walk == "carry" else kept(dh), state_of(ends, config.v_first), run


def assert_rows(found, expected, budget):
    """Check rows against a budget; those of no sequence must be untouched."""
    none = expected.isnan()
    assert found[none].isnan().all() and distance(found[~none].double(), expected[~none]) < budget


def record_of(case, tiles, walk="sequences", segment=None, h0=None, v_first=False, dtype="float32", o=True, ht=True,
              **options):
    """Return o, r, h, ht and M, states (.., K, V) in float64, and the Run."""
    p, places, carry = case.problem(), places_of(case, segment), walk == "carry"
    turned = v_first and not carry
    h0_dtype = None if h0 is None else dtype
    config = RecordConfig(
        p.packed, walk, h0_dtype, ht and not carry, turned, o and not carry, K=p.K, V=p.V
    )
    out, r = (fresh(p.B, p.T, p.HV, p.V, dtype=torch.bfloat16) for _ in range(2))
    h = fresh(places.states, p.HV, p.K, p.V, dtype=torch.bfloat16)
    ends, M = fresh(places.segments if carry else p.N, p.HV, p.K, p.V), fresh(places.segments, p.HV, p.K, p.K)
    begins = given(h0, v_first and walk == "sequences", getattr(torch, dtype))
    run = launched(
        config, (config.strips, p.HV, places.segments), places.numbers,
        dict(tiles=tiles, v=case.inputs.v, h0=begins, o=out, r=r, ht=ends, M=M, h=h, segment_table=places.table),
        **options,
    )
    return out, r, None if carry else kept(h), state_of(ends, turned), M.mT.double(), run


def both(found, index):
    """Return (N, HV, K, V): one state of each sequence and head."""
    return torch.stack([torch.stack([one[0][index] for one in of_heads]) for of_heads in found])


def composed(M, added, h0, firsts):
    """Return states that enter segments, or gradients that leave them, in the order of `firsts`.

    `firsts` says which segment is the first of a sequence, and thus begins with a state of h0.
    """
    edge, state = torch.full_like(added, torch.nan), None
    for p, n in firsts:
        state = h0[n] if n is not None else state
        edge[p] = state
        state = M[p] @ state + added[p]
    return edge

BUDGET = 8e-3  # room for two roundings of operands, one of the state and one of the result


def tiles_of(case):
    return operands_of(case)[0]


def up_is_right(case, o=True, v_first=False, dtype="float32", **options):
    h0 = case.inputs.initial_state.to(getattr(torch, dtype)).double()
    found = record_of(case, tiles_of(case), h0=h0, o=o, v_first=v_first, dtype=dtype, **options)[:4]
    expected = walked(case, h0)
    if o:
        assert_rows(found[0], rows(expected, 2, case), BUDGET)
    else:
        assert found[0].isnan().all()
    assert_rows(found[1], rows(expected, 1, case), BUDGET)
    if len(found[2]):
        assert distance(found[2], states(expected, entering)) < BUDGET
    assert distance(found[3], both(expected, -1)) < BUDGET
    return found


def back_is_right(case, v_first=False, dh0="float32", **options):
    dht = case.dht.double()
    found = walk_of(case, tiles_of(case), dht=dht, v_first=v_first, dh0=dh0, **options)[:3]
    expected = walked_back(case, dht)
    assert_rows(found[0], rows(expected, 1, case), BUDGET)
    if len(found[1]):
        assert distance(found[1], states(expected, leaving)) < BUDGET
    assert distance(found[2], both(expected, 0)) < BUDGET
    return found


def kept_of(case, h0=None, v_first=False, dtype="float32", o=True, sharing=0, **options):
    """Return what the one kernel keeps and returns: tiles, o, r, h and ht, and the Run; `sharing` clusters, or one for
    each walk."""
    p, places, packed = case.problem(), places_of(case), case.spec.lengths is not None
    chunks = len(chunk_table(case)) if packed else places.numbers["chunks"] * p.B
    tiles = torch.full((chunks * p.HV * record_tile(p.K).bytes,), 0xFF, dtype=torch.uint8)
    config = KeepingConfig(
        **chunk_options(p), offsets=None, h0=None if h0 is None else dtype, ht=True, v_first=v_first, packed=packed, o=o
    )
    out, r = (fresh(p.B, p.T, p.HV, p.V, dtype=torch.bfloat16) for _ in range(2))
    h, ends = fresh(places.states, p.HV, p.K, p.V, dtype=torch.bfloat16), fresh(p.N, p.HV, p.K, p.V)
    x = {name: y for name, y in zip(INPUTS, inputs_in_memory(case.inputs)) if name in (*ROWS, "v")}
    begins, numbers = given(h0, v_first, getattr(torch, dtype)), {n: places.numbers[n] for n in ("T", "chunks", "HV")}
    clusters = sharing or p.N * p.HV
    edges, crossed = fresh(clusters, CTAS, p.K, p.V // CTAS), torch.zeros(clusters, CTAS, dtype=torch.int32)
    run = launched(
        config, (CTAS, sharing, 1) if sharing else (CTAS, p.HV, p.N),
        dict(numbers, N=p.N, H=p.H, scale=p.scale, lower_bound=p.lower_bound or 0.0),
        dict(x, h0=begins, o=out, ht=ends, tiles=tiles, r=r, h=h, segment_table=places.table, edges=edges,
             crossed=crossed), **options,
    )
    return tiles, out, r, kept(h), state_of(ends, v_first), run


def one_kernel_is_right(case, o=True, v_first=False, dtype="float32", **options):
    """The one kernel has the bits of operands and record, which other tests hold against formulas."""
    h0 = case.inputs.initial_state.to(getattr(torch, dtype)).double()
    expected, cleared, _ = operands_of(case)
    states = dict(h0=h0, v_first=v_first, dtype=dtype, o=o)
    tiles, *found = kept_of(case, **states, **options)[:-1]
    results = record_of(case, expected, **states)[:4]
    assert torch.equal(tiles, expected)
    assert torch.equal(found[0].nan_to_num(), (results[0] if o else cleared).nan_to_num())
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found[1:], results[1:]))
    assert found[0][cleared == 0].eq(0).all()


def first_and_last(case, segment):
    """Return, for each segment, the sequence that begins there, or None; the same backwards; and first segments."""
    numbers, p = [], 0
    for n, (_, tokens) in enumerate(sequences(case)):
        count = max(1, -(-tokens // (C * segment)))
        numbers.append((n, range(p, p + count)))
        p += count
    up = [(p, n if p == segments[0] else None) for n, segments in numbers for p in segments]
    back = [(p, n if p == segments[-1] else None) for n, segments in numbers for p in reversed(segments)]
    return up, back, [segments[0] for _, segments in numbers]


def up_of_segments_is_right(case, **options):
    tiles, h0 = operands_of(case)[0], case.inputs.initial_state.double()
    up, _, _ = first_and_last(case, 2)
    o, r, _, added, M, _ = record_of(case, tiles, "carry", 2, **options)
    assert o.isnan().all() and r.isnan().all() and not M[: len(up)].isnan().any()
    o, r, h, ht, _, _ = record_of(case, tiles, "segments", 2, h0=composed(M, added, h0, up), **options)
    expected = walked(case, h0)
    assert_rows(o, rows(expected, 2, case), BUDGET)
    assert_rows(r, rows(expected, 1, case), BUDGET)
    assert distance(h, states(expected, entering)) < BUDGET and distance(ht, both(expected, -1)) < BUDGET
    return M


def back_of_segments_is_right(case, M, **options):
    tiles, dht = operands_of(case)[0], case.dht.double()
    _, back, firsts = first_and_last(case, 2)
    dv, _, added, _ = walk_of(case, tiles, "carry", 2, **options)
    assert dv.isnan().all() and added[firsts].isnan().all()
    edge = composed(M.mT, added, dht, back)
    dv, dh, dh0, _ = walk_of(case, tiles, "segments", 2, dht=edge, **options)
    expected = walked_back(case, dht)
    assert_rows(dv, rows(expected, 1, case), BUDGET)
    assert distance(dh, states(expected, leaving)) < BUDGET and distance(dh0, both(expected, 0)) < BUDGET
