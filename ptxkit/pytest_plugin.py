"""A plug-in for pytest: tests of GPU kernels in the simulator.

    def test_my_kernel(simulated):
        x, out = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
        my_kernel[(4,)](x, out)
        assert torch.equal(out, 2 * x)

Everything that the test launches runs in `ptxkit.capture`; findings fail the test.  The fixture is the session.
Options of the capture come from `--simulate-arch` (or `simulate_arch` in pytest's configuration) and from a marker:

    @pytest.mark.simulated(arch="sm_90a", strict=True, schedule=1)

Loading it costs nothing: torch is imported by the first test that needs the fixture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ptxkit.capturing import Capture

ARCH = "sm_100a"
MARKER = "simulated(arch=..., **options): options of ptxkit.capture for the fixture `simulated`"


def pytest_addoption(parser: pytest.Parser) -> None:
    says = f"the arch or card that the fixture `simulated` stands in for, such as sm_90a ({ARCH} if nothing is said)"
    parser.getgroup("ptxkit").addoption("--simulate-arch", metavar="ARCH", help=says)
    parser.addini("simulate_arch", says)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if arch := _arch(config):
        from ptxkit.compile.target import parse

        try:
            parse(arch)
        except ValueError as error:
            raise pytest.UsageError(f"--simulate-arch: {error}") from None


def _arch(config: pytest.Config) -> str | None:
    return config.getoption("--simulate-arch") or config.getini("simulate_arch")


@pytest.fixture
def simulated(request: pytest.FixtureRequest) -> Iterator[Capture]:
    """A capture of ptxkit; the test fails if its launches have findings."""
    from ptxkit import capture
    from ptxkit.compile.target import parse

    options: dict[str, Any] = {}
    for marker in reversed([*request.node.iter_markers("simulated")]):       # the nearest one decides
        if marker.args:
            pytest.fail("pytest.mark.simulated takes options by name, such as simulated(arch='sm_90a')", pytrace=False)
        options |= marker.kwargs
    arch = options.pop("arch", None) or _arch(request.config) or ARCH
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(capture(arch=parse(str(arch)).spelling, **options))
        except (TypeError, ValueError) as error:                             # the marker's arguments are wrong
            raise pytest.fail.Exception(f"pytest.mark.simulated: {error}", pytrace=False) from None
        yield session


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Make findings a failure of the test itself, not an error of its fixture."""
    try:
        result = yield
    except Exception:
        if text := _findings(pyfuncitem):                                   # often the cause
            pyfuncitem.add_report_section("call", "simulated", text)
        raise
    if text := _findings(pyfuncitem):
        pytest.fail(text, pytrace=False)
    return result


def _findings(item: pytest.Function) -> str:
    session = item.funcargs.get("simulated")
    return "\n".join(map(str, getattr(session, "findings", ())))
