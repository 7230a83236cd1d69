"""What all commands have in common."""

import pytest
from click.testing import CliRunner

from kda.cli import COMMANDS, cli
from kda.commands.doctor import archs_without_kernels
from kda.commands.findings import backends_with_kernels
from kda.compile.target import TARGETS
from kda.dispatch import capabilities

ASKING_FOR_A_BACKEND = {
    "doctor": ("doctor", "--require"),
    "selftest": ("selftest", "--backend"),
    "verify": ("verify", "--backend"),
    "bench": ("bench", "--backend"),
}


@pytest.fixture
def no_kernels(monkeypatch):
    reference = [c for c in capabilities() if c.backend == "reference"]
    monkeypatch.setattr("kda.dispatch.capabilities", lambda: tuple(reference))


@pytest.mark.parametrize("command", ASKING_FOR_A_BACKEND)
def test_an_arch_without_kernels_is_said_to_have_none_with_exit_3(command, no_kernels):
    result = CliRunner().invoke(cli, [*ASKING_FOR_A_BACKEND[command], "sm120"])
    assert result.exit_code == 3
    assert "sm120 (RTX 50, RTX PRO 6000): no backend has kernels for it yet" in result.stderr


@pytest.mark.parametrize("command", ASKING_FOR_A_BACKEND)
def test_an_arch_that_is_named_as_a_backend_gets_the_backends_that_have_kernels_for_it(command):
    result = CliRunner().invoke(cli, [*ASKING_FOR_A_BACKEND[command], "sm103"])
    assert result.exit_code == 2
    assert "sm103 is an arch, and no backend is called so; kernels for it: sm100, triton." in result.stderr


@pytest.mark.parametrize("command", ASKING_FOR_A_BACKEND)
def test_a_backend_that_does_not_exist_is_a_wrong_command_with_the_nearest_name(command):
    result = CliRunner().invoke(cli, [*ASKING_FOR_A_BACKEND[command], "refrence"])
    assert result.exit_code == 2 and "Did you mean 'reference'" in result.stderr


@pytest.mark.parametrize("arch", TARGETS)
def test_an_arch_without_kernels_can_be_requested(arch, no_kernels):
    result = CliRunner().invoke(cli, ["selftest", "--arch", arch])
    assert result.exit_code == 3 and arch in result.stdout


def test_doctor_names_the_archs_that_no_backend_covers_and_those_alone():
    """Triton builds its kernels for every arch from sm_80 on, and code for sm_89 runs on all later GPUs."""
    assert archs_without_kernels(capabilities()) == []
    assert "triton" in backends_with_kernels((8, 6), capabilities())
    assert set(backends_with_kernels((12, 0), capabilities())) == {"sm89", "triton"}
    assert set(backends_with_kernels((12, 1), capabilities())) == {"sm89", "triton"}
    assert backends_with_kernels((7, 5), capabilities()) == []
    assert "sm90" not in backends_with_kernels((10, 0), capabilities())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_json_and_colour(command):
    help = CliRunner().invoke(cli, [command, "--help"]).stdout
    assert all(option in help for option in ("--json", "--color", "--debug"))
