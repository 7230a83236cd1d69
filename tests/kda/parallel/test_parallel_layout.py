"""Where parts and sequences lie, and what maps of pieces are: one process is enough."""

import dataclasses
import pathlib
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import make

import kda
from benchmarks import ranks
from kda.checks.calls import Call, problem_of
from kda.model.problem import Inputs, Options
from kda.parallel import halo, layout, operators
from kda.routing.dispatch import capability

PARALLEL = pathlib.Path(__file__).parents[3] / "docs" / "parallel.md"
maps = operators.maps
rows = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(0, 4),
)


@settings(max_examples=200, deadline=None)
@given(rows)
def test_every_token_and_sequence_has_one_place_and_parts_know_who_holds_the_rest(drawn):
    lengths, cuts, tail = drawn
    offsets = layout.edges_of(lengths)
    total = offsets[-1] + tail
    marks = sorted(min(m, total) for m in layout.edges_of(cuts)[1:])
    edges = [0, *marks, total]
    owner = [n for n, length in enumerate(lengths) for _ in range(length)] + [None] * tail
    seen = []
    for number in range(len(edges) - 1):
        a, b = edges[number], edges[number + 1]
        local = layout.local_of(offsets, edges, (number,))
        (part,) = local.parts
        seqs = layout.sequences_of(offsets, edges, number)
        mine = [n for n, (s, e) in enumerate(zip(local.offsets, local.offsets[1:])) for _ in range(e - s)]
        assert [seqs[n] for n in mine] == [n for n in owner[a:b] if n is not None]
        seen += [n for n in seqs if not lengths[n]]
        before = [i for i in range(number) if seqs and seqs[0] in owner[edges[i]:edges[i + 1]]]
        after = [i for i in range(number + 1, len(edges) - 1) if seqs and seqs[-1] in owner[edges[i]:edges[i + 1]]]
        assert (list(part.before), list(part.after)) == (before, after)
        assert part.past == sum(owner[:a].count(n) for n in seqs[:1])
        if seqs:
            assert part.first_end == part.begin + owner[a:b].count(seqs[0])
        if after:
            assert part.end - part.last_begin == owner[a:b].count(seqs[-1])
    assert seen == [n for n, length in enumerate(lengths) if not length]
    crossing = any(owner[e] == owner[e - 1] is not None for e in marks if 0 < e < total)
    assert layout.crosses(offsets, edges) == crossing


def test_zigzag_gives_every_rank_an_early_and_a_late_part():
    parts = [layout.part_numbers("zigzag", rank, 3) for rank in range(3)]
    assert parts == [(0, 5), (1, 4), (2, 3)]
    order = [number for pair in parts for number in pair]
    assert [order[layout.holder("zigzag", number, 3)] for number in range(6)] == list(range(6))


def test_the_page_of_exchanges_has_what_the_simulation_finds():
    costs, other = ranks.Costs(), ranks.Costs(heads=32, latency=1e-3)
    page = ranks.page(costs)
    found = {n: {name: way(n, costs) for name, way in ranks.WAYS.items()} for n in ranks.RANKS}
    for n, ways in found.items():
        cells = [f"{way.seconds * 1e3:,.2f}, {way.received / 1e6:,.1f}" for way in ways.values()]
        assert f"\n| {n:,} | {' | '.join(cells)} |\n" in page
    assert ranks.table(other) in ranks.page(other) and ranks.table(other) not in page
    assert "a state has 4.19 MB, a map 8.39 MB" in page
    fastest = {n: min(ways, key=lambda name: ways[name].seconds) for n, ways in found.items()}
    assert fastest == {2: "chain"} | dict.fromkeys([8, 32, 128, 1024], "tree")
    assert all(ways["chain"].received == min(way.received for way in ways.values()) for ways in found.values())
    said = re.search(r"to (\S+) GB per call at 1,024 ranks", PARALLEL.read_text())[1]
    assert said == f"{found[1024]['gather'].received / 1e9:.1f}"


# maps


@pytest.fixture(params=[True, False], ids=["stages of the reference", "forwards alone"])
def route(request):
    reference = capability("reference")
    declared = reference.maps
    object.__setattr__(reference, "maps", declared if request.param else ())
    yield
    object.__setattr__(reference, "maps", declared)


def piece(T=90, **words):
    call = make(B=1, T=T, H=2, HV=4, K=8, V=6, gate="softplus", beta="sigmoid", chunk_size=32, **words)
    x = Inputs(*(call.tensors.get(name) for name in Inputs._fields))
    names = [name for name in Options._fields if name in call.options]
    options = Options(**{"scale": 0.3, "output_final_state": True} | {name: call.options[name] for name in names})
    return call, x, problem_of(Call("chunk_kda", x, options))


def cut(x, begin, end, h0=None):
    return maps.piece(x, begin, end, h0)


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-13)


def test_the_map_of_a_sequence_is_that_of_its_pieces_in_turn(route):
    _, x, p = piece()
    whole, *pieces = (maps.segment_map(p, cut(x, *ab), "auto", True) for ab in ((0, 90), (0, 50), (50, 50), (50, 90)))
    S = x.initial_state
    assert close(maps.fold(pieces, S), maps.fold([whole], S))
    M = pieces[2].M @ pieces[1].M @ pieces[0].M
    assert close(whole.M, M)


def test_added_from_a_state_is_the_final_state_of_the_call_and_the_map_says_so_too(route):
    call, x, p = piece()
    wanted = kda.chunk_kda(**call.arguments, scale=0.3, output_final_state=True)[1]
    assert close(maps.segment_map(p, x, "auto", False).added, wanted)
    from_zero = maps.segment_map(p, x._replace(initial_state=None), "auto", True)
    assert close(maps.fold([from_zero], x.initial_state), wanted)


def test_the_mirror_is_the_gradient_of_the_state_that_enters(route):
    call, x, p = piece()
    for dht in (None, call.dht):
        wanted = kda.chunk_kda_bwd(**call.arguments, scale=0.3, do=call.do, dht=dht).dh0
        assert close(maps.segment_map_bwd(p, x, call.do, dht, "auto"), wanted)
    ahead, nothing = maps.segment_map(p, x._replace(initial_state=None), "auto", True), torch.zeros_like(call.do)
    assert close(maps.segment_map_bwd(p, x, nothing, call.dht, "auto"), ahead.M.mT @ call.dht)


def test_no_tokens_are_the_identity(route):
    _, x, p = piece(T=0)
    p = dataclasses.replace(p, T=0)
    ahead = maps.segment_map(p, x, "auto", True)
    back = maps.segment_map_bwd(p, x._replace(initial_state=None), x.v, None, "auto")
    assert torch.equal(ahead.M[0, 0], torch.eye(8)) and torch.equal(ahead.added, x.initial_state)
    assert back.shape == x.initial_state.shape and not back.any()


def test_explain_says_how_maps_are_made(route):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    context = kda.parallel.build_cp_context(torch.tensor([0, 20, 90]))
    call, *_ = piece(initial_state=False)
    last = kda.explain(**call.arguments, cp_context=context).notes[-1]
    leaves = {n: x.detach().requires_grad_(n == "q") for n, x in call.arguments.items() if isinstance(x, torch.Tensor)}
    *_, kept, exchanged, _ = kda.explain(**call.arguments | leaves, cp_context=context).notes
    assert kept.startswith("between forward and backward ") and exchanged.startswith("and 0.0 MiB for the exchange: ")
    more = {n: torch.cat([x, x], 1) if n in ("q", "k", "v", "g", "beta") else x for n, x in call.arguments.items()}
    with pytest.raises(kda.InputError, match="explain: q must be a tensor with the T=90 tokens of rank 0; found T=180"):
        kda.explain(**more, cp_context=context)
    for dtype, size in (("float64", "16.0"), ("float32", "8.0")):              # maps of float64 are float64
        q, k, v, g = (torch.empty(1, 90, 64, 128, dtype=getattr(torch, dtype), device="meta") for _ in range(4))
        wide = kda.explain(q.requires_grad_(), k, v, g, q[..., 0], cp_context=context).notes
        assert any(note.startswith(f"and {size} MiB for the exchange: ") for note in wide), wide
    dist.destroy_process_group()
    by_reference = capability("reference").maps
    ahead, back = ("stages of the reference",) * 2 if by_reference else (
        "a forward of reference and one of reference from the identity", "a forward of reference from the identity")
    assert last == f"the maps of pieces of sequences are computed by {ahead}, in the backward by {back}"


def test_a_context_lies_where_it_is_told_beside_another_default_device():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_default_device("meta")
    try:
        context = kda.parallel.build_cp_context(torch.tensor([0, 5], device="cpu"))
        places = (context.cu_seqlens, context.cu_seqlens_cpu, context.handle)
    finally:
        torch.set_default_device(None)
        dist.destroy_process_group()
    assert {x.device.type for x in places} == {"cpu"}


def test_each_stream_has_places_of_a_halo_that_its_kernels_come_after(monkeypatch):
    nothing = dict(num_seqs=0, num_parts=0, parts=[])
    context = SimpleNamespace(places={}, lengths=(4, 4), world_size=1, layout="contiguous", **nothing)
    stream, captures = [1], [False]
    monkeypatch.setattr(halo, "_stream", lambda device: stream[0])
    monkeypatch.setattr(halo, "capturing", lambda device: captures[0])

    def found(number, capturing=False):
        stream[0], captures[0] = number, capturing
        return halo._places(context, 3, torch.device("cpu"))

    first, second = found(1), found(2)
    assert first is not second and found(1) is first and found(2) is second
    assert found(3, capturing=True) is first                                 # its capture waited for every copy
