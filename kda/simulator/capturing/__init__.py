"""Takes the launches of compiled kernels and runs them in the simulator, on CPU tensors; see `capture`."""

from .capture import Capture, capture
from .session import CaptureError

__all__ = ["Capture", "CaptureError", "capture"]
