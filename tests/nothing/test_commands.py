"""What all commands have in common."""

import pytest
from click.testing import CliRunner

from kda.cli import COMMANDS, cli
from kda.compile.target import TARGETS
from kda.dispatch import capabilities

ASKING_FOR_A_BACKEND = {
    "doctor": ("doctor", "--require"),
    "selftest": ("selftest", "--backend"),
    "verify": ("verify", "--backend"),
    "bench": ("bench", "--backend"),
}


@pytest.mark.parametrize("command", ASKING_FOR_A_BACKEND)
def test_an_arch_without_kernels_is_said_to_have_none_with_exit_3(command):
    arch = next(t for t in TARGETS if not any(t in c.archs for c in capabilities()))
    result = CliRunner().invoke(cli, [*ASKING_FOR_A_BACKEND[command], arch])
    assert result.exit_code == 3
    assert f"{arch} ({TARGETS[arch].examples}): no backend has kernels for it yet" in result.stderr


@pytest.mark.parametrize("command", ASKING_FOR_A_BACKEND)
def test_a_backend_that_does_not_exist_is_a_wrong_command_with_the_nearest_name(command):
    result = CliRunner().invoke(cli, [*ASKING_FOR_A_BACKEND[command], "refrence"])
    assert result.exit_code == 2 and "Did you mean 'reference'" in result.stderr


@pytest.mark.parametrize("arch", [t for t in TARGETS if not any(t in c.archs for c in capabilities())])
def test_an_arch_without_kernels_can_be_asked_for(arch):
    result = CliRunner().invoke(cli, ["selftest", "--arch", arch])
    assert result.exit_code == 3 and arch in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_json_and_colour(command):
    help = CliRunner().invoke(cli, [command, "--help"]).stdout
    assert all(option in help for option in ("--json", "--color", "--debug"))
