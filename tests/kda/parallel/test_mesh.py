"""DTensors on a mesh of 2 x 2 processes: the same results and gradients as one, or an error and no communication."""

import processes
import pytest

WAYS = {
    "batch": ("batch",), "heads": ("heads",), "replicated": ("replicated",), "batch, heads": ("batch", "heads"),
    "heads, batch": ("heads", "batch"), "sequence, heads": ("sequence", "heads"),
    "batch, heads, gate per head": ("batch", "heads"),
}
REFUSED = {
    "a head without its value heads": "mesh.even", "a row of a batch": "mesh.even", "the sequence": "mesh.sequence",
    "the sequence, of another group": "mesh.group", "the sequence, with states": "mesh.states", "channels": "mesh.way",
    "q by batch, v by heads": "mesh.placement", "a plain tensor": "mesh.plain",
    "a parameter that is a DTensor alone": "mesh.plain", "two meshes": "mesh.same", "explain": "mesh.op",
    "an out that is a plain tensor": "mesh.plain", "an out that is no tensor": "mesh.plain",
    "an out that lies elsewhere": "mesh.placement", "an out of another shape": "out.shape",
    "an out of another dtype": "out.dtype", "an out that is a DTensor alone": "mesh.plain",
    "a do that is a DTensor alone": "mesh.op",
}


def on_ranks(world, name, *args):
    """Return what a function of mesh_cases finds on each rank; its DTensors take a second to import."""
    import mesh_cases

    results = processes.run(world, getattr(mesh_cases, name), *args)
    broken = [f"rank {rank}: {x}" for rank, x in enumerate(results) if isinstance(x, str)]
    assert not broken, "\n".join(broken)
    return results


@pytest.fixture(scope="module")
def found():
    return on_ranks(4, "refusals_and_others")


@pytest.fixture(scope="module")
def found_in_ways():
    return on_ranks(4, "in_ways", WAYS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_finds_what_one_process_finds_and_all_its_gradients_lie_where_their_tensors_lie(found_in_ways, way):
    for rank in found_in_ways:
        differences, moved = rank[way]
        assert max(differences.values()) < 1e-13 and moved == []


def test_what_is_not_covered_is_refused_on_all_ranks_before_anything_is_sent(found):
    assert all(rank["refused"] == REFUSED for rank in found)


def test_the_gate_and_the_recurrence_take_the_same_tensors(found):
    assert all(max(rank["others"].values()) < 1e-13 for rank in found)


def test_fully_sharded_parameters_need_nothing_of_ours(found):
    assert all(rank["sharded"] < 1e-13 for rank in found)


@pytest.mark.exhaustive
def test_a_call_of_dtensors_compiles_to_one_graph():
    assert on_ranks(2, "compiled") == [[0.0, 0.0, 0.0]] * 2
