"""What tests and tools prescribe of how calls are run.

    with forcing(form="stream", segments=2):
        kda.chunk_kda(...)

Every Problem that is made inside the block has it as `force`, so plans and routines read it there, and whatever is
remembered by a Problem is remembered by it, too.  A backend passes over what it has no use for, and a plan chooses
where a call cannot have what is prescribed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

Form = Literal["two kernels", "one kernel", "stream"]


class Force(NamedTuple):
    """What is prescribed; None where the plan chooses."""

    form: Form | None = None                 # the form of a Hopper forward; in training a stream is as none
    ctas: int | None = None                  # CTAs of a cluster of the one kernel
    clusters: int | None = None              # its clusters that run at once
    staged: bool | None = None               # whether rows go through shared memory, in one kernel or a stream
    makers: int | None = None                # CTAs of a stream that make tiles
    halves: bool | None = None               # whether a forward over several GPUs makes tiles before its state comes
    reverse: bool | None = None              # whether one kernel does all of a backward behind its tiles
    walkers: int | None = None               # its CTAs that walk
    segments: int | None = None              # segments of every sequence: of a stream, or of Blackwell's forward
    segment_chunks: int | None = None        # chunks of a segment of kernels apart, and of Triton's; 0: no segments
    columns: int | None = None               # columns of a state that a CTA of sm89 has
    sms: int | None = None                   # the number of SMs that plans count on
    configs: tuple[tuple[str, Any], ...] = ()    # Triton's kernels by name, and configurations

    def config(self, kernel: str) -> Any:
        """Return the configuration of a kernel of Triton; None if its plan chooses."""
        return dict(self.configs).get(kernel)


NOTHING = Force()
_FORCE: ContextVar[Force] = ContextVar("kda_force", default=NOTHING)
forced: Callable[[], Force] = _FORCE.get     # no function stands around it, because every call asks


def forcing(**words: Any) -> contextlib.AbstractContextManager[None]:
    """Prescribe fields of Force inside the block, in this thread or task, beside what is prescribed around it."""
    return with_force(forced()._replace(**words))


@contextlib.contextmanager
def with_force(force: Force) -> Iterator[None]:
    """Prescribe this inside the block and nothing else: a backward, which may run in another thread, has it so."""
    token = _FORCE.set(force)
    try:
        yield
    finally:
        _FORCE.reset(token)
