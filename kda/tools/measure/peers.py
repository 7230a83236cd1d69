"""What others were timed at, on the machine that peers.json names: saved once, with dates and versions; and what they
publish of decoding, and of Blackwell GPUs, on machines of their own."""

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


class Published(NamedTuple):
    """A step of decoding: microseconds by the number of sequences."""

    peer: str
    states: str
    what: str
    source: str
    us: dict[str, float]


class OnBlackwell(NamedTuple):
    """A forward or a training step of a named shape, in milliseconds."""

    peer: str
    shape: str
    chip: str
    ms: float
    source: str


@functools.cache
def saved() -> dict[str, Any]:
    peers: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return peers


def peers_of(device: str, shape: str, direction: str) -> list[Peer]:
    """Return those of a named shape; none on another device than theirs."""
    if device != saved()["device"]:
        return []
    rows = [row for row in saved()["rows"] if (row["shape"], row["direction"]) == (shape, direction)]
    return [Peer(row["peer"], row["fast"], row["slow"]) for row in rows]


def published_of_decoding() -> list[Published]:
    return [Published(**row) for row in saved()["decoding"]]


def published_on_blackwell(shape: str, direction: str) -> list[OnBlackwell]:
    rows = saved()[{"forward": "prefill", "step": "steps"}[direction]]
    return [OnBlackwell(**row) for row in rows if row["shape"] == shape]
