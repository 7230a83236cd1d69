"""What others were timed at, on the machine that peers.json names: saved once, with dates and versions."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("peers.json")


class Peer(NamedTuple):
    """Milliseconds, of gates that forget and of gates that remember."""

    name: str
    fast: float
    slow: float


@functools.cache
def saved() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def peers_of(device: str, shape: str, direction: str) -> list[Peer]:
    """Those of a named shape; none on another device than theirs."""
    if device != saved()["device"]:
        return []
    rows = [row for row in saved()["rows"] if (row["shape"], row["direction"]) == (shape, direction)]
    return [Peer(row["peer"], row["fast"], row["slow"]) for row in rows]
