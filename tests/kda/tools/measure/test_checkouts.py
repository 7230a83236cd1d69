"""benchmarks/checkouts.py compares checkouts by their own packages."""

import shutil

import pytest
import torch

from benchmarks import checkouts
from benchmarks.common import ROOT
from kda.model.host import host_of, standing_in

CALL = "forward tiny"


@pytest.fixture
def changed(tmp_path):
    """A checkout whose reference multiplies o by 2."""
    for package in ("kda", "ptxkit"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "docs"))
    launch = tmp_path / "kda" / "backends" / "reference" / "launch.py"
    text = launch.read_text()
    assert text.count("def forward(") == 1
    launch.write_text(text + """

_right = forward


def forward(*args, **keywords):
    found = _right(*args, **keywords)
    return found._replace(o=2 * found.o)
""")
    return tmp_path


@pytest.mark.exhaustive
def test_another_checkout_is_timed_with_its_own_code(changed):
    found = checkouts.compare({"before": ROOT, "after": changed}, [CALL, "kept nothing-like-that"], "reference")
    assert list(found) == ["before", "after", "before again"]
    before, after, again = (rows[CALL] for rows in found.values())
    assert before["bits"] == again["bits"] and before["same again"] and before["ms"] > 0
    assert before["bits"]["o"] != after["bits"]["o"] and before["bits"]["ht"] == after["bits"]["ht"]
    first, second = checkouts.told(found, [CALL, "kept nothing-like-that"])
    assert first.count("other bits") == 1 and "KeyError: 'nothing-like-that'" in second


def test_a_line_says_whose_bits_are_others_and_what_failed():
    row = {"ms": 1.0, "same again": True, "bits": {"o": "a"}}
    rows = {"old": {CALL: row}, "new": {CALL: row | {"bits": {"o": "b"}, "same again": False}}, "none": {}}
    line, = checkouts.told(rows, [CALL])
    assert line == f"{CALL}: old 1.0000; new 1.0000, other bits, other bits each time; none not run"


def test_a_folder_without_the_packages_is_no_checkout(tmp_path):
    with pytest.raises(checkouts.argparse.ArgumentTypeError, match="write NAME=PATH"):
        checkouts.checkout(f"old={tmp_path}")
    assert checkouts.checkout(f"now={ROOT}") == ("now", ROOT)


def test_a_digest_knows_each_bit_and_its_place():
    x = torch.randn(3, 5)
    y = x.clone()
    y[1, 2] = torch.nextafter(y[1, 2], torch.tensor(9.0))
    assert checkouts.digest(x) == checkouts.digest(x.clone())
    assert len({checkouts.digest(each) for each in (x, y, x.flip(1), torch.zeros(3, 5), torch.zeros(3, 6))}) == 5


def test_kernels_are_built_of_what_a_call_runs():
    with standing_in(host_of("sm90")):
        found = {
            direction: checkouts.recipes_of(*checkouts.spec_of(f"{direction} h64-8k"))
            for direction in ("kept", "step", "forward")
        }
    names = {direction: {recipe.name for recipe in recipes} for direction, recipes in found.items()}
    kept, step = ({recipe for recipe in found[direction] if recipe.name == "reverse"} for direction in ("kept", "step"))
    assert names["forward"] == {"fused"} and names["kept"] >= {"fused", "reverse", "shares"}
    assert names["step"] >= {"fused", "reverse", "shares"} and not kept & step
