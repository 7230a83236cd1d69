"""One capture: a session to which the compilers' launches are redirected."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

from ptxkit.compile.errors import MissingCompilerError
from ptxkit.compile.launching import redirect

from .. import launches
from ..chips import CHIPS, number_of
from ..standing import standing_in
from ..timing.chips import chip_of
from . import cutedsl, gpu, triton
from .session import Session

_ONE = threading.RLock()                     # the DSL's arch and Triton's driver are per process


_OPTIONS = frozenset(inspect.signature(launches.launch).parameters) - {
    "ptx", "kernel", "grid", "block", "cluster", "dynamic_shared", "args", "arch", "memory", "registers", "behind",
    "accesses", "heap",
}


def _check_options(options: dict[str, Any], arch: int) -> None:
    """Refuse wrong options before anything is launched."""
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"capture has no option {name!r}; it has arch, sms, {', '.join(sorted(_OPTIONS))}")
    launches.check_options(options)
    clock = options.get("clock")
    if isinstance(clock, str) or clock is True:
        try:
            chip_of(clock, arch)
        except ValueError as error:
            raise launches.LaunchError(str(error)) from None


class Capture(Session):
    """A session that also accepts calls of host functions, so that it can replace the driver."""

    def call(self, compiled: Any, args: tuple, kwargs: dict) -> Any:
        """Call a host function that `ptxkit.compile.cutedsl` compiled."""
        return cutedsl.call(self, compiled, args, kwargs)


@contextlib.contextmanager
def capture(arch: str = "sm_100a", *, sms: int | None = None, **options: Any) -> Iterator[Capture]:
    """Run launches of compiled kernels here, on CPU tensors, as a GPU of `arch` would.

        with ptxkit.capture(arch="sm_90a") as session:
            my_compiled_function(q, k, v, o)
        assert not session.findings

    It runs kernels and host functions from `ptxkit.compile`; functions of the CuTe DSL called inside the block (also
    those compiled before, if they kept their PTX); Triton's `fn[grid](...)`; and PTX that cuda-python loads, too.
    Host code finds the arch's GPU there: `device="cuda"`, torch.cuda, CUDA graphs and cuda-python work in this thread
    until the block ends, and `ptxkit.standing` has its chip.  `sms` is the number of multiprocessors that host code
    sees, so that a persistent kernel can be simulated on few; `options` are those of ptxkit.launch.
    """
    chip = CHIPS[number_of(arch)]
    _check_options(options, number_of(arch))
    if sms is not None:
        chip = chip._replace(sms=sms)
    session = Capture(chip, options)
    with _ONE, redirect(session), standing_in(chip), contextlib.ExitStack() as stack:
        for compiler in (cutedsl, triton):
            with contextlib.suppress(MissingCompilerError):
                compiler.door.load()
                stack.enter_context(compiler.taken(session))
        stack.enter_context(gpu.present(session))
        yield session
