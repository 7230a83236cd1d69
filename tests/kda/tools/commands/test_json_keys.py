"""The table of --json keys is that of the commands: each answer has its keys, and each of its keys is in the code.

The answers of all other tests of commands are compared as well (tests/helpers/json_answers.py).
"""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import keys_page
from kda.cli import cli
from kda.tools.commands import timeline

ROOT = Path(__file__).parents[4]
SECTIONS = keys_page.read()


def without_gpu(*case):
    return pytest.param(*case, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run it"))


def answer(*words):
    return json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)


@pytest.mark.parametrize(("words", "title"), [
    (("doctor", "--list"), "kda doctor --list"), (("verify", "--fault", "list"), "kda verify --fault list"),
    (("bench", "--list"), "kda bench --list"), (("cache", "path"), "kda cache path"),
    without_gpu(("bench", "--shape", "tiny", "--backend", "sm90"), "kda bench that times nothing"),
    without_gpu(("verify", "--backend", "sm90"), "kda verify"),
    without_gpu(("selftest", "--arch", "sm90", "--level", "execute"), "kda selftest"),
], ids=str)
def test_an_answer_that_is_made_at_once_has_the_keys_of_its_section(words, title):
    faults, found, seen = keys_page.faults(answer(*words), SECTIONS)
    assert faults == [] and found == title and seen


def test_a_timeline_has_the_keys_of_its_section(monkeypatch, tmp_path):
    class Session:
        milliseconds = 0.5

    monkeypatch.setattr(timeline, "forward", lambda *_: Session())
    monkeypatch.setattr(timeline, "timelines_of", lambda session: [])
    found = answer("timeline", "--arch", "sm90", "--out", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
    assert keys_page.faults(found, SECTIONS) == ([], "kda timeline", {
        "chip", "gate", "milliseconds", "files.trace", "files.html"})


def test_every_key_of_the_table_is_a_word_of_the_code():
    folders = ROOT / "kda" / "tools", ROOT / "ptxkit"
    source = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    words = {*re.findall(r"\w+", source)}
    names = {name for section in SECTIONS for path in section.keys for name in re.findall(r"\w+", path)}
    assert sorted(names - words) == []


@pytest.mark.parametrize(("change", "says"), [
    ({"new": 1}, ["new has no row; found 1"]), ({"exit": "0"}, ["exit must be int; found '0'"]),
    ({"rows": [{"x": 1}]}, ["rows[].x has no row; found 1", "rows[].a must be there; it is not"]),
    ({"rows": None}, ["rows has no row; found None"]), ({"by": {"n": "text"}}, ["by{} must be int; found 'text'"]),
    ({"rows": [{"a": 1}], "by": {}, "list": None}, []), ({"may": 3}, []), ({"may": 3.5}, []),
    ({"list": [1]}, ["list[] must be text; found 1"]), ({"object": {"k": 1}}, []), ({"object": None}, []),
    ({"object": {}}, ["object.k must be there; it is not"]), ({"by": ...}, ["by must be there; it is not"]),
    ({"rows": ...}, ["rows must be there; it is not"]),
])
def test_a_key_without_a_row_and_a_row_without_its_key_are_noticed(change, says):
    sections = keys_page.read("""
## every command  schema
schema  int  1
command  text  its name
exit?  int  code
## made up  command = made up
rows[].a  int  a
by{}  int  by name
list[]  text  a list
may?  number  sometimes
object  object or null  an object
object.k  int  k
""")
    whole = {"schema": 1, "command": "made up", "rows": [], "by": {}, "list": ["a"], "object": None} | change
    found, title, _ = keys_page.faults({key: x for key, x in whole.items() if x is not ...}, sections)
    assert found == says and title == "made up"


def test_an_answer_without_a_section_and_a_path_with_two_rows_are_refused():
    with pytest.raises(ValueError, match=r"found none for one of 'new' with the keys command. Write one\."):
        keys_page.faults({"command": "new"}, SECTIONS)
    with pytest.raises(ValueError, match=r"found a twice under x. Remove one\."):
        keys_page.read("## x  command\na  int  one\na  int  two\n")


def test_the_page_has_a_row_for_each_key():
    page = keys_page.page()
    assert page.count("\n| `") == sum(len(section.keys) for section in SECTIONS) > 250
    assert "| `host.driver` | text or null | version of the driver |" in page
    assert "| `rows[].median` ? | number | seconds; wrong results are not timed |" in page
