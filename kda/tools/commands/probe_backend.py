"""A small live call of one backend: `python -m kda.tools.commands.probe_backend NAME` prints {"ok", "seconds", "says"}.

The first of the selftest's quick trials that the backend takes here, within its budget.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from kda.tools.verify.doors import Door
from kda.tools.verify.parity import used_words, worst
from kda.tools.verify.trials import against, attempt, trials


def probe(backend: str) -> dict:
    door, refused = Door(backend), ""
    for trial in sorted(trials(quick=True), key=lambda trial: trial.spec.lengths is None):       # packed ones first
        reasons = against(door, trial)
        if not reasons:
            return run(door, trial)
        refused = refused or reasons[0]
    return {"ok": False, "seconds": 0.0, "says": f"accepts none of the small calls: {refused}"}


def run(door: Door, trial) -> dict:
    began = time.monotonic()
    rows = attempt(door, trial)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    row = max(rows, key=lambda row: row.measure.used)
    says = f"{trial.words}: {row.tensor} uses {used_words(row.measure)} of its budget"
    return {
        "ok": not any(row.wrong for row in rows),
        "seconds": time.monotonic() - began,
        "says": f"{says}, {worst(row)}" if row.wrong else says,
    }


def main(backend: str) -> None:
    torch.set_num_threads(1)                 # small tensors; on a busy machine threads mostly wait for each other
    print("\n" + json.dumps(probe(backend)))


if __name__ == "__main__":
    main(sys.argv[1])
