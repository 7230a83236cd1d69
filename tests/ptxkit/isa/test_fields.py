"""The numbers of an instruction: named once, for Python, which fills them in, and for C, which reads them."""

import ast
import re
from pathlib import Path

import pytest

from ptxkit import engine, isa
from ptxkit.isa import fields

pytestmark = pytest.mark.simulated

FOLDERS = {"C": Path(engine.__file__).parent, "Python": Path(isa.__file__).parent}
HEADER = dict(re.findall(r"(\w+) = (\d+)", fields.header()))


def c_text():
    """Return all C that is written by hand, and that which is generated from rows."""
    texts = [path.read_text() for path in sorted(FOLDERS["C"].glob("*.[ch]"))]
    return "\n".join([*texts, (FOLDERS["Python"] / "generate.py").read_text()])


def separate(row):
    """Return a number of its own for each field of a row."""
    return {field: numbers(part) if part else n + 100 for n, (field, part) in enumerate(row.parts.items())}


def numbers(row):
    return row(**separate(row))


@pytest.mark.parametrize("row", fields.ROWS.values(), ids=fields.ROWS)
def test_a_number_stands_where_the_header_of_c_says(row):
    given, offset = numbers(row), 0
    for n, (field, part) in enumerate(row.parts.items()):
        assert int(HEADER[f"{row.name}_{field.upper()}"]) == offset
        expected = numbers(part) if part else [n + 100]
        assert given[offset : offset + len(expected)] == expected
        offset += len(expected)
    assert given == row(**dict(reversed(separate(row).items()))), "the order of arguments does not matter"
    assert len(given) == row.size == int(HEADER[f"{row.name}_FIELDS"]) == offset


def test_a_missing_field_and_an_unknown_one_are_refused():
    with pytest.raises(TypeError, match="SETMAXNREG has the fields inc, registers; given: inc"):
        fields.SETMAXNREG(inc=True)
    with pytest.raises(TypeError, match="SETMAXNREG has the fields inc, registers; given: inc, registers, wait"):
        fields.SETMAXNREG(inc=True, registers=24, wait=False)
    with pytest.raises(TypeError, match="BULK_PREFETCH: PLACE has 3 numbers; given: "):
        fields.BULK_PREFETCH(source=fields.ADDRESS(offset=0, wide=True))


def test_c_reads_every_field_and_by_its_name_alone():
    text = c_text()
    assert re.findall(r"\bmods?\[\d.*", text) == []
    rows = fields.ROWS.values()
    plain = [f"{row.name}_{field.upper()}" for row in rows for field, part in row.parts.items() if not part]
    assert [name for name in plain if not re.search(rf"\b{name}\b", text)] == []


def by_position(path):
    """Return the lines on which an Op gets a list of numbers that does not begin with a row's fields."""
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "Op":
            continue
        given = [*call.args[2:3], *(k.value for k in call.keywords if k.arg == "mods")]
        for mods in given:
            if isinstance(mods, ast.List) and mods.elts and not isinstance(mods.elts[0], ast.Starred):
                yield f"{path.name}:{mods.lineno}"


def test_lowering_functions_give_numbers_by_name():
    paths = sorted(FOLDERS["Python"].glob("*.py"))
    assert [line for path in paths for line in by_position(path)] == []


def test_numbers_by_position_are_noticed(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text('Op("grid", [], [1])\nOp("grid", mods=[x, 2])\nOp("grid", [], GRID(wait=True))\n')
    assert [*by_position(planted)] == ["planted.py:1", "planted.py:2"]
