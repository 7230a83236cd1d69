"""How far something was proven.  The words are ordered and never confused; `simulated` is not `executed`."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Evidence(enum.IntEnum):
    TRACED = 1                               # the DSL accepted the kernel
    ASSEMBLED = 2                            # an assembler made machine code of it: registers, spills, shared memory
    PROTOCOL_CHECKED = 3                     # barriers and pipelines can neither deadlock nor race
    SIMULATED = 4                            # its PTX ran on a CPU and the numbers agree
    EXECUTED = 5                             # it ran on the hardware it is for and the numbers agree

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")

    @classmethod
    def of(cls, word: str) -> Evidence:
        by_word = {e.word: e for e in cls}
        if word not in by_word:
            raise ValueError(f"no level of evidence is called {word!r}; there are {', '.join(e.word for e in cls)}")
        return by_word[word]


class Proof(NamedTuple):
    """What one prover found about one stage."""

    passed: bool
    says: str                                # the cell of the table: "64 regs, 0 spill", "o 0.31 of budget"
    details: tuple[str, ...] = ()            # lines under the row when it failed
