"""The pages of the site that are written from data, which its build does, too.

    python ptxkit/docs/from_data.py   # planted_faults.md, kernels_of_others.md, constants.md, assumptions.md

The data are in git, and tests compare them with the code; the pages are not.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from ptxkit.benchmarks.microbenchmarks import assumptions
from ptxkit.benchmarks.microbenchmarks import page as of_constants
from ptxkit.benchmarks.others import page as of_others
from ptxkit.docs import shared

HERE = pathlib.Path(__file__).resolve().parent
FAULTS, OTHERS = HERE / "data" / "planted_faults.json", HERE / "data" / "kernels_of_others.json"

OF_FAULTS = """# Planted faults

Each of these was planted in a correct kernel (`tests/helpers/planted.py`). A test asserts that every one is noticed
under three schedules, and that the correct kernels are correct and without findings under twenty, with asynchronous
work late and early. The verdict is that of the default schedule.

| family | kernel | fault | verdict |
|---|---|---|---|
"""


def faults():
    return OF_FAULTS + "".join(f"| {' | '.join(row)} |\n" for row in json.loads(FAULTS.read_text()))


def others():
    return of_others.page(json.loads(OTHERS.read_text()))


def constants():
    return of_constants.page(json.loads(of_constants.RESULTS.read_text()))


PAGES = {
    HERE / "planted_faults.md": faults, HERE / "kernels_of_others.md": others, HERE / "constants.md": constants,
    HERE / "assumptions.md": assumptions.page,
}


def write(*_):
    """Write the pages that are not as they should be; Sphinx calls this with its application."""
    shared.write(PAGES)


if __name__ == "__main__":
    write()
