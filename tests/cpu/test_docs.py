"""What the pages say is true: their code runs, their links lead somewhere, their tables are complete."""

import doctest
import pathlib
import re
import sys

import pytest

import kda
from kda.backends.reference import chunked
from kda.stages import BACKWARD, FORWARD, SHAPES, STAGES

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [page for where in ("*.md", "docs/**/*.md", "benchmarks/**/*.md") for page in sorted(ROOT.glob(where))]


def anchors(page):
    """What a heading is called in a link."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page, text):
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    assert list(broken_links(page, page.read_text())) == []


def test_a_broken_link_is_noticed():
    page = ROOT / "docs" / "stages" / "sm89.md"
    assert page in PAGES
    text = "[a](sm89.md) [b](#nowhere) [c](../nobody.md) [d](sm90_forward.md#why-chunks-of-32) [e](sm89.md#no)"
    assert list(broken_links(page, text)) == ["#nowhere", "../nobody.md", "sm89.md#no"]


def examples(page):
    """Each block of Python on a page, and the text that stands right under it: what it prints."""
    blocks = r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?"
    return re.findall(blocks, page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_on_a_page_runs_and_prints_what_is_said(page, capsys):
    names = {}                                                       # a page is read from its top
    for code, printed in examples(page):
        exec(compile(code, page.name, "exec"), names)
        found = capsys.readouterr().out
        assert not printed or found == printed


@pytest.mark.parametrize("name", [name for name in kda.__all__ if name != "__version__"])
def test_the_example_of_a_docstring_runs(name):
    thing = getattr(kda, name)
    found = doctest.DocTestFinder(recurse=False).find(thing, name, globs=dict(vars(sys.modules[thing.__module__])))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert len(found) == 1 and (found[0].examples or not name[0].islower()), "a public function has an example"
    assert runner.run(found[0]).failed == 0


def test_the_pictures_of_the_maths_are_those_that_their_script_draws():
    folder = ROOT / "docs" / "pictures"
    names = {"__name__": "maths", "__file__": str(folder / "maths.py")}
    exec((folder / "maths.py").read_text(), names)
    pictures = names["PICTURES"]
    assert all((folder / name).read_text() == draw() for name, draw in pictures.items())


def test_the_readme_names_every_function():
    text = (ROOT / "README.md").read_text()
    functions = [name for name in kda.__all__ if name[0].islower()]
    assert len(functions) == 9
    for name in functions:
        assert f"kda.{name}" in text and hasattr(kda, name)


def test_every_stage_is_a_function_and_every_tensor_has_a_shape():
    for stage in STAGES.values():
        assert callable(getattr(chunked, stage.function))
        assert set(stage.reads + stage.writes) <= set(SHAPES), stage.name


def test_every_stage_reads_what_came_before():
    known = {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0"}
    for stage in FORWARD:
        assert set(stage.reads) <= known, stage.name
        known |= set(stage.writes)
    known |= {"do", "dht"}
    for stage in BACKWARD:
        assert set(stage.reads) <= known, stage.name
        known |= set(stage.writes)
    assert {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"} <= known


def test_every_public_name_has_a_docstring():
    assert all(getattr(kda, name).__doc__ for name in kda.__all__ if name != "__version__")
