"""Sequences over several processes: the same results as one, forward and backward."""

import json
import subprocess

import processes
import pytest
import torch
from parallel_cases import CASES, checkpointed, compiled, everything, layers_with_padding_alone, left_to_autograd, many

from benchmarks import common, several_gpus

# Two ranks have one cut, four a tree of two levels.
world = pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 3)), 4])


class Found(dict):
    """What the ranks found, for each size of the world that a test asks for."""

    def __missing__(self, world):
        results = processes.run(world, everything, (world,))
        broken = [f"rank {rank}: {x}" for rank, x in enumerate(results) if isinstance(x, str)]
        assert not broken, "\n".join(broken)
        return self.setdefault(world, [x[world] for x in results])


@pytest.fixture(scope="module")
def found():
    return Found()


def worst(differences):
    return max(max(x.values()) for x in differences)


@world
@pytest.mark.parametrize("case", CASES)
def test_ranks_together_find_what_one_process_finds_and_all_its_gradients(found, world, case):
    assert worst(rank["cases"][case] for rank in found[world]) < 1e-13


@world
def test_that_comparison_notices_a_fold_that_forgets_what_came_before(found, world):
    of_rank = [max(rank["planted"].values()) for rank in found[world]]
    assert all(x > 1e-3 for x in of_rank)                                      # one direction or the other


@world
def test_hops_give_the_bits_of_one_process_where_cuts_lie_on_the_grid_of_chunks(found, world):
    for rank in found[world]:
        assert not any(rank["bits"]["hops"].values())


@world
def test_maps_give_the_bits_of_one_process_behind_one_cut_and_nearly_behind_more(found, world):
    limit = 0 if world == 2 else 4e-6
    for exchange in ("gather", "chain", "tree"):
        assert worst(rank["bits"][exchange] for rank in found[world]) <= limit


@world
@pytest.mark.parametrize("what, limit", [("states at cuts", 1e-12), ("convolutions", 1e-13), ("layer", 1e-12)])
def test_what_ranks_find_by_states_a_halo_or_a_layer_is_that_of_one_process(found, world, what, limit):
    """States at cuts have gradients, too; a convolution has its halo, and a layer a context."""
    assert worst(rank[what] for rank in found[world]) < limit


@world
def test_a_context_of_fla_does_what_ours_does(found, world):
    for rank in found[world]:
        assert worst(rank["contexts of FLA"].values()) < 1e-13


@world
def test_a_direction_gathers_once_and_not_at_all_if_no_sequence_crosses_a_cut(found, world):
    for rank in found[world]:
        assert rank["counted"]["crossing"] == 2 and rank["counted"]["within ranks"] == 0


@world
def test_ranks_that_repeat_themselves_agree_no_more(found, world):
    assert all(rank["counted"]["rounds of agreement in a third step"] == 0 for rank in found[world])


@world
def test_no_number_of_a_tensor_is_read_but_handles_of_contexts(found, world):
    handle = "context.py", "__int__", torch.int64, 0                           # which lies on the CPU
    assert all(rank["reads"] == [handle] * 2 for rank in found[world])


def test_a_layer_on_ranks_with_padding_alone_takes_part_in_every_backward():
    for found in processes.run(3, layers_with_padding_alone):
        assert isinstance(found, dict), found
        assert max(found.values()) < 1e-13


@pytest.mark.exhaustive
def test_seven_ranks_do_what_four_do():
    for found in processes.run(7, many):
        assert worst(found.values()) < 1e-13


@pytest.mark.exhaustive
def test_a_compiled_call_is_one_graph_and_not_one_for_each_context():
    for found, graphs in processes.run(2, compiled):
        assert worst(found.values()) < 1e-13
        assert graphs <= 5


def test_a_context_lives_as_long_as_a_backward_needs_it():
    for found, left in processes.run(2, left_to_autograd):
        assert max(found.values()) == 0 and len(found) == 4
        assert left == 0


@pytest.mark.exhaustive
def test_a_call_may_be_made_again_in_the_backward_and_autocast():
    for found in processes.run(2, checkpointed):
        assert max(found["checkpointed"].values()) < 1e-13
        assert max(found["autocast"].values()) < 0.1


@pytest.mark.exhaustive
def test_the_benchmark_of_several_gpus_compares_every_exchange_and_times_it(tmp_path):
    options = ["--device", "cpu", "--ranks", "3", "--shape", "192x2", "--dim", "16", "--calls", "1", "--json"]
    command = common.again(several_gpus.__spec__, *options, tmp_path / "found.json")
    subprocess.run(command, cwd=common.ROOT, check=True, timeout=600)
    alone, part, *ways = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert alone["side"] == "one GPU" and part["map"] > 0 and part["map_bwd"] > 0 and part["send"] > 0
    assert part["halves apart"] < 1e-6 and part["second"] > 0
    assert [row["side"] for row in ways] == ["gather", "chain", "tree", "hops", "forwards at once"]
    assert all(row["apart"] < 1e-5 and row["forward"] > 0 and row["step"] > 0 for row in ways)
