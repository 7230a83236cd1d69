"""Redirects launches of compiled kernels to the simulator, on CPU tensors; see `capture`."""

from .capture import Capture, capture
from .session import CaptureError

__all__ = ["Capture", "CaptureError", "capture"]
