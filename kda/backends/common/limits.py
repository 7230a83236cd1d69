"""What a configuration of a kernel says of its limits."""

from __future__ import annotations

from collections.abc import Iterator

from ptxkit.compile.errors import BuildError

MAX_THREADS = 1024                           # threads of a CTA


class Limited:
    """A configuration that is asked which of its limits it breaks before its kernel is built."""

    without_limits = "triton"                # the backend that runs what this one's kernels cannot

    def why_invalid(self) -> str | None:
        """Return a sentence that says which limit this configuration breaks; None if none."""
        return next(self.broken_limits(), None)

    def broken_limits(self) -> Iterator[str]:
        """Yield a sentence for each limit that is broken.  A subclass yields those of its kernel before those of a GPU:
        what does not hold for a size of a head may not be computable for it either."""
        raise NotImplementedError

    def require_valid(self) -> None:
        """Raise a BuildError if the configuration breaks a limit: before its kernel is built, and before it is left out
        because its grid is empty."""
        if reason := self.why_invalid():
            name = type(self).__name__
            raise BuildError(
                f"{name}: {reason}. No kernel is built for {self}. Use backend={self.without_limits!r}."
            )
