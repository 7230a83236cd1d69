"""`kda selftest` and `kda verify` on a GPU, with the reference."""

import json

import pytest
from click.testing import CliRunner

from kda.cli import cli
from kda.model.stages import STAGES

pytestmark = pytest.mark.gpu


def run(*args):
    return CliRunner().invoke(cli, args)


def test_the_reference_passes_its_selftest():
    result = run("selftest", "--backend", "reference", "--quick", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["exit"] == 0


@pytest.mark.parametrize("regime", ["fast", "slow"])
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_every_stage_of_the_reference_is_within_budget(regime, seed):
    result = run("verify", "--backend", "reference", "--lengths", "65,0,63", "--heads", "2", "--regime", regime,
                 "--seed", seed, "--json")
    assert result.exit_code == 0, result.output
    assert {row["stage"] for row in json.loads(result.stdout)["rows"]} >= set(STAGES)


def test_a_planted_fault_is_noticed():
    assert run("verify", "--backend", "reference", "--fault", "state-stale", "--json").exit_code == 1


def test_without_a_name_selftest_proves_what_runs_here():
    result = run("selftest", "--quick")
    assert result.exit_code == 0, result.output
    assert "executed on cuda:0" in result.stdout
