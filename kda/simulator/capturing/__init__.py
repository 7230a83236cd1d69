"""Takes the launches of compiled kernels and runs them in the simulator, on CPU tensors; see `capture`."""

from .session import CaptureError, Session, capture

__all__ = ["CaptureError", "Session", "capture"]
