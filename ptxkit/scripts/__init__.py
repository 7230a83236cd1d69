"""Runs somebody's script in a capture and reports on its kernels: the command `simulate`."""

from .running import ScriptError, Simulated, run

__all__ = ["ScriptError", "Simulated", "run"]
