"""What the pages say is true: their code runs, their links lead somewhere, their tables are complete."""

import dataclasses
import doctest
import functools
import importlib
import itertools
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "docs"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "ptxkit" / "docs"))

import from_data
import shared
import written

import kda
import ptxkit
from kda.backends.reference import chunked
from kda.backends.sm90 import costs, forms, plan
from kda.model.problem import Problem
from kda.model.stages import BACKWARD, FORWARD, SHAPES, STAGES
from kda.tools.commands import findings
from ptxkit.compile import nvrtc

ROOT = pathlib.Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
FOLDERS = ("*.md", "docs/**/*.md", "ptxkit/**/*.md", "benchmarks/**/*.md")
WRITTEN = written.PAGES | from_data.PAGES    # when a site is built; only its pages lead there
SITES = {ROOT / "docs", ROOT / "ptxkit" / "docs"}
PAGES = sorted({page for where in FOLDERS for page in ROOT.glob(where)} | WRITTEN.keys())


@functools.cache
def text_of(page):
    return WRITTEN[page]() if page in WRITTEN else page.read_text()


def anchors(page):
    """What a heading is called in a link."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page, text):
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        exists = bool(SITES & {*page.parents}) if target in WRITTEN else target.exists()
        if "://" not in link and not (exists and (not anchor or anchor in anchors(target))):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    assert list(broken_links(page, text_of(page))) == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in shared.ROOT_PAGES.values()], ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_line_of_prose_is_longer_than_120_characters(page):
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)      # code may be longer
    assert [line for line in prose.splitlines() if len(line) > 120 and line.lstrip()[0] not in "|<"] == []


def test_a_broken_link_is_noticed():
    page = ROOT / "docs" / "stages" / "sm89.md"
    assert page in PAGES
    text = "[a](sm89.md) [b](#nowhere) [c](../nobody.md) [d](sm90_forward.md#why-chunks-of-32) [e](sm89.md#no)"
    assert list(broken_links(page, text + " [f](../mutants.md)")) == ["#nowhere", "../nobody.md", "sm89.md#no"]
    assert list(broken_links(ROOT / "README.md", "[a](docs/errors.md) [b](docs/index.md)")) == ["docs/errors.md"]


def test_a_link_to_a_page_of_another_site_leads_to_where_it_is_built():
    links = "[a](../../ptxkit/docs/clock.md#the-model) [b](../words.md) [c](../../ptxkit/chips.py) [d](../../ptxkit)"
    source = [links]
    shared.adapt(SimpleNamespace(srcdir=ROOT / "docs"), "stages/sm89", source)
    assert source == ["[a](site:../ptxkit/clock.html#the-model) [b](../words.md) [c](path:../../ptxkit/chips.py) d"]
    source = ["[a](../../docs/results/clock.md) [b](clock.md)"]
    shared.adapt(SimpleNamespace(srcdir=ROOT / "ptxkit" / "docs"), "index", source)
    assert source == ["[a](site:../results/clock.html) [b](clock.md)"]


def pages_under(site, *captions):
    """Return the index of a site, and the pages that stand in its navigation under the captions."""
    index = site / "index.md"
    trees = re.findall(r"^```\{toctree\}\n:caption: (.*)\n(?::.*\n)+\n((?:.+\n)+)```$", text_of(index), re.MULTILINE)
    assert {*captions} <= {caption for caption, _ in trees}
    names = [name for caption, names in trees if caption in captions for name in names.split()]
    return [index, *(site / f"{name}.md" for name in names)]


def test_pages_for_users_and_those_that_are_not_have_at_most_30_000_words_each():
    users = {*pages_under(ROOT / "docs", "Use", "Understand"), *pages_under(ROOT / "ptxkit" / "docs", "Use")}
    internals = {page for site in SITES for page in site.rglob("*.md")} - users - WRITTEN.keys()
    for pages in (users, internals):
        assert len(pages) > 15 and sum(len(text_of(page).split()) for page in pages) <= 30_000


# how figures came to be incomplete, which is no concern of who reads them
CIRCUMSTANCES = re.compile(r"\b(?:lent to us|(?:was|were)(?: never| not)? (?:lent|rented|borrowed|available)|"
                           r"in the time that was left|no time was left|ran out of time)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_says_what_was_not_measured_and_not_how_that_came_about(page):
    assert CIRCUMSTANCES.findall(" ".join(text_of(page).split())) == []


def test_such_a_sentence_is_noticed():
    said = "A100 cards were never lent. 27 of 28 ran in the time that was left. No Blackwell GPU was available."
    assert CIRCUMSTANCES.findall(said) == ["were never lent", "in the time that was left", "was available"]
    assert CIRCUMSTANCES.findall("`lent` streams; nothing was left out; no Blackwell GPU has run it") == []


def test_the_pages_on_nvrtc_name_the_wheel_that_its_error_names():
    wheel = re.search(r"pip install ([\w-]+)", nvrtc._WHEEL)[1]
    for name in ("own_kernels", "simulator"):
        assert wheel in text_of(ROOT / "ptxkit" / "docs" / f"{name}.md")


def test_a_page_of_the_site_leads_to_other_pages_of_it_and_not_to_raw_markdown():
    source = ["[a](../README.md) [b](../CHANGELOG.md#010-not-released-yet) [c](../LICENSE)"]
    shared.adapt(SimpleNamespace(srcdir=ROOT / "docs"), "tutorial", source)
    assert source == ["[a](site:readme.html) [b](site:changelog.html#010-not-released-yet) [c](path:../LICENSE)"]
    readme = written.PAGES[ROOT / "docs" / "readme.md"]()
    assert "](tutorial.md)" in readme and "](contributing.md#run-it-on-a-gpu)" in readme and "<picture>" not in readme


def examples(page):
    """Each block of Python on a page, and the text that stands right under it: what it prints."""
    blocks = r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?"
    return re.findall(blocks, text_of(page), re.DOTALL | re.MULTILINE)


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


@pytest.fixture
def pictures(monkeypatch):
    """The scripts of docs/pictures, by name."""
    monkeypatch.syspath_prepend(PICTURES)
    names = ("maths", "losses", "kernels", "budgets", "specs", "protocols")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in (*names, "drawing"):
        del sys.modules[name]


def test_the_pictures_are_those_that_their_scripts_draw(pictures):
    drawn = {PICTURES / name: draw() for script in (pictures.maths, pictures.losses)
             for name, draw in script.PICTURES.items()}
    for script in (pictures.kernels, pictures.budgets):
        drawn |= {PICTURES / "kernels" / name: text for name, text in script.pictures().items()}
    assert {path for path in drawn if path.parent.name == "kernels"} == set((PICTURES / "kernels").iterdir())
    assert [path.name for path, text in drawn.items() if path.read_text() != text] == []


def test_every_picture_of_a_kernel_is_on_a_page():
    shown = "".join(map(text_of, PAGES))
    files = [path.name for path in (PICTURES / "kernels").iterdir()]
    assert [name for name in files if f"pictures/kernels/{name})" not in shown] == []


def turned(edge):
    return dataclasses.replace(edge, start=edge.end, end=edge.start)


@pytest.mark.parametrize("name, pipelines, change, message", [
    (None, "empty", None, r"the picture shows \['full'\]"),
    (None, "full", turned, "CHAIN has an arrow, but LOAD arrives at full"),
    (None, "empty", turned, "LOAD has an arrow, but CHAIN arrives at empty"),
    ("sm90_stream_walks", "written", lambda edge: dataclasses.replace(edge, end="LOAD"),
     "LOAD has an arrow, but STORE waits for written"),
], ids=["an mbarrier is missing", "LOAD arrives", "CHAIN arrives", "STORE waits"])
def test_a_picture_without_an_mbarrier_or_with_an_arrow_of_a_wrong_role_is_refused(
        pictures, name, pipelines, change, message):
    kernel = next(each for each in pictures.specs.KERNELS[1:] if name in (None, each.name))
    edges = [change(edge) if edge.pipelines == pipelines else edge
             for edge in kernel.edges if change or edge.pipelines != pipelines]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(kernel, edges=edges)


def test_an_arrow_says_how_many_arrivals_its_pipeline_has(pictures):
    kernel = pictures.specs.KERNELS[1]
    full, empty = kernel.config.pipelines
    fewer = full._replace(arrivals=full.arrivals[1:])
    other = SimpleNamespace(pipelines=(fewer, empty), meetings=(), roles=kernel.config.roles)
    labels = [each.label(kernel.edges[1]) for each in (kernel, dataclasses.replace(kernel, config=other))]
    assert labels == ["full: 33 + bytes", "full: 32"]


def test_the_table_in_a_kernels_docstring_is_that_of_its_configurations(pictures):
    sources = pictures.protocols.sources()
    assert len(sources) == 14
    said = "python docs/pictures/protocols.py writes them"
    assert [str(file) for file, source in sources.items() if file.read_text() != source] == [], said


def test_a_wrong_count_in_a_docstring_is_noticed(pictures, tmp_path):
    file, configs = next((f, c) for f, c in pictures.protocols.configurations().items() if f.name == "chain.py")
    kernel, source = tmp_path / "chain.py", file.read_text()
    kernel.write_text(source.replace("4 of CHAIN, a lane", "5 of CHAIN, a lane"))
    assert kernel.read_text() != source == pictures.protocols.written(kernel, configs)


def test_a_kernel_without_a_table_is_told_how_to_get_one(pictures, tmp_path):
    (tmp_path / "chain.py").write_text('"""A kernel."""')
    with pytest.raises(ValueError, match="has no table of mbarriers and named barriers: add a line"):
        pictures.protocols.written(tmp_path / "chain.py", [])


def test_a_map_of_shared_memory_has_every_byte_once(pictures):
    for kernel in pictures.specs.KERNELS:
        struct = kernel.config.struct
        rows = list(pictures.kernels.rows_of(struct, {}, [0], 0, 0))
        ends = [0, *(row.offsets[0] + row.bytes for row in rows)]
        assert all(0 <= row.offsets[0] - end < 1024 for row, end in zip(rows, ends, strict=False)), kernel.name
        assert ends[-1] == kernel.config.shared


def test_the_readme_names_every_function():
    text = (ROOT / "README.md").read_text()
    functions = [name for name in kda.__all__ if name[0].islower()]
    assert len(functions) == 9
    for name in functions:
        assert f"kda.{name}" in text and hasattr(kda, name)


def test_the_readme_names_the_oldest_driver_of_each_cuda_that_torch_is_built_for():
    said = re.findall(r"([\d.]+) or\s+newer\s+for CUDA (\d+)", (ROOT / "README.md").read_text())
    assert {int(cuda): driver for driver, cuda in said} == {
        cuda: driver for cuda, driver in findings.LOWEST_DRIVER.items() if cuda > 11}


def test_the_readme_says_of_blackwell_what_its_page_says():
    """Times that the clock predicts are round in the README: they differ by less than 5%."""
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/results/sm100.md"))
    said = re.search(
        r"predicts a forward of (\S+) ms and a step with `disable_recompute` of (\S+), or (\S+) and (\S+) if it is "
        r"as far off as on Hopper; others publish (\S+) and (\S+) ", " ".join(readme.split()))
    forward, kept = (
        [cell.split()[0] for cell in row.split(" | ")[-3:]]
        for row in re.findall(r"^\| B=1 T=8192 H=64 \| (.*) \|$", page, re.MULTILINE))
    clock, as_hopper, published = ([float(number) for number in pair] for pair in zip(forward, kept))
    assert [float(number) for number in said.groups()] == pytest.approx([*clock, *as_hopper, *published], rel=0.05)


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


def test_the_policy_names_the_environment_variables_that_the_package_reads():
    source = "".join(path.read_text() for path in (ROOT / "kda").rglob("*.py"))
    known = {name for name in findings.VARIABLES if name.startswith("KDA_")}
    assert variables((ROOT / "docs" / "policy.md").read_text()) == variables(source) == known


def variables(text):
    return set(re.findall(r"\bKDA_[A-Z]+(?:_[A-Z]+)*\b", text))


ONE_KERNEL = ROOT / "docs" / "decisions" / "hopper.md"
QUOTED = {                                   # what a page says -> constants of sm90/forms.py and costs.py
    r"a cluster takes (\S+) for its first chunk and (\S+) for each further walk": ("FIRST_CHUNK", "ONE_PRODUCT.piece"),
    r"two kernels (\S+) / (\S+) per walk": ("WALK", "ONE_PRODUCT.pair"),
    r"outnumber the (\d+) clusters that run at once": ("FIT[2]",),
    r"runs (\d+) such clusters at once": ("FIT[4]",),
    r"at most (\d+)% of what else would run": ("100 * AT_MOST",),
}


@pytest.mark.parametrize("pattern", QUOTED)
def test_thresholds_on_a_page_are_those_of_the_plan(pattern):
    said = re.search(pattern, " ".join(ONE_KERNEL.read_text().split()))
    known = vars(forms) | vars(costs)
    assert [float(number) for number in said.groups()] == [eval(name, known) for name in QUOTED[pattern]]


KEPT = {                                     # what a page says a forward keeps -> bytes of a token and value head
    ("sm90", 128, r'="states"` \|.*\| (\S+) bytes: r, h'): "h + r",
    ("sm90", 128, r"(\S+) bytes: tiles, r, h"): "tiles + h + r",
    ("sm90", 128, r"tiles: .* \| (\d+) \| prepare"): "tiles",
    ("sm90", 128, r"h, one per 64 .* \| (\d+) \| chain"): "h",
    ("sm90", 128, r"\| r \| (\d+) \| chain"): "r",
    ("sm90", 128, r"read it again: (\d+) bytes per token"): "tiles",
    ("sm90", 128, r"CTAs of a head read it: (\S+)\."): "3 * tiles",
    ("sm90", 64, r"`disable_recompute` saves (\d+) bytes"): "tiles + h + r",
    ("sm100", 128, r"(\d+) bytes: h \d+, r"): "h + r",
    ("sm100", 128, r"(\S+) bytes: tiles"): "tiles + h + r",
    ("sm100", 128, r"bytes: tiles (\d+), h"): "tiles",
    ("sm100", 128, r"bytes: tiles \d+, h (\d+), r"): "h",
    ("sm100", 128, r"bytes: tiles .*, r (\d+)"): "r",
}


@pytest.mark.parametrize("backend, K, pattern", KEPT)
def test_bytes_that_a_page_says_are_kept_are_those_of_the_plan(backend, K, pattern):
    text = (ROOT / "docs" / "stages" / f"{backend}_backward.md").read_text()
    said = int(re.search(pattern, text)[1].replace(",", ""))
    p = Problem.parse(f"bounded l2norm bfloat16 K={K} V={K} T=8192 H=1")
    kept = importlib.import_module(f"kda.backends.{backend}.plan").training_plan(p, 132).saved._asdict()
    assert said == eval(KEPT[backend, K, pattern], kept) / p.T


def test_pages_name_only_what_the_forms_of_hopper_have():
    pages = [*ROOT.glob("docs/stages/sm90*.md"), *ROOT.glob("docs/decisions/hopper*.md")]
    named = {name for page in pages for name in re.findall(r"`forms\.(\w+)`", page.read_text())}
    assert {"Times", "chosen"} <= named
    assert [name for name in named if not hasattr(forms, name)] == []


def test_the_table_of_heads_is_what_the_plan_chooses(pictures):
    _, _, after = (ROOT / "docs" / "stages" / "sm90_forward.md").read_text().partition("| tokens |")
    rows = re.findall(r"^\| ([\d,]+) \| (.*) \| (.*) \| (.*) \| (.*) \|$", after.partition("\n\n")[0], re.MULTILINE)
    assert len(rows) == 8
    for tokens, *said in rows:
        problems = [pictures.specs.problem(int(tokens.replace(",", "")), heads) for heads in range(1, 129)]
        plans = [plan.plan(p, pictures.specs.SMS) for p in problems]
        chosen = [found.clusters.ctas if found.name == "one kernel" else found.name for found in plans]
        assert said == [in_words(chosen, form) for form in ("two kernels", "stream", 4, 2)], tokens


def test_ctas_walk_alone_from_as_many_walks_on_as_the_page_says(pictures):
    text = (ROOT / "docs" / "stages" / "sm90_forward.md").read_text()
    said = int(re.search(r"CTAs alone are chosen from about (\d+) walks on", text)[1])
    for tokens, K in itertools.product((1024, 8192, 32768), (64, 128)):
        p = dataclasses.replace(pictures.specs.problem(tokens, 1), K=K, V=64)
        plans = {n: plan.plan(dataclasses.replace(p, H=n, HV=n), pictures.specs.SMS) for n in (said - 10, said + 10)}
        assert {n: found.fused.ctas for n, found in plans.items()} == {said - 10: 2, said + 10: 1}


def in_words(chosen, form):
    """Runs of numbers of heads: "1 to 22, 31 to 38", "37", "from 39"."""
    heads = [n for n, found in enumerate(chosen, 1) if found == form]
    begins, ends = [n for n in heads if n - 1 not in heads], [n for n in heads if n + 1 not in heads]
    words = [f"from {a}" if b == len(chosen) else f"{a} to {b}" if a < b else str(a)
             for a, b in zip(begins, ends, strict=True)]
    return ", ".join(words) or "-"


def test_the_reference_has_every_public_name():
    table, _, directives = (ROOT / "docs" / "api.md").read_text().partition("## Functions")
    names = {name for name in kda.__all__ if name != "__version__"}
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))) == names
    assert set(re.findall(r"^\.\. auto\w+:: (\w+)", directives, re.MULTILINE)) == names


def test_every_public_name_has_a_docstring():
    assert all(getattr(kda, name).__doc__ for name in kda.__all__ if name != "__version__")


SAVED = {                                    # rows of the tutorial's table -> archs, dtype, K, V
    "| Hopper, Blackwell | bfloat16, K = V = 128 |": (("sm_90a", "sm_100a"), torch.bfloat16, 128, 128),
    "| Hopper, Blackwell | bfloat16, K = V = 64 |": (("sm_90a", "sm_100a"), torch.bfloat16, 64, 64),
    "| Hopper | bfloat16, K = 128, V = 64 |": (("sm_90a",), torch.bfloat16, 128, 64),
    "| any other from compute capability 8.0 | bfloat16 or": (("sm_80", "sm_89"), torch.float16, 128, 128),
    "| any from compute capability 8.9 | float32, K = V = 128 |": (("sm_89", "sm_100a"), torch.float32, 128, 128),
}


@pytest.mark.simulated
@pytest.mark.compiler
@pytest.mark.parametrize("words", SAVED)
def test_bytes_that_the_tutorial_says_are_saved_are_those_that_explain_names(words):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    archs, dtype, K, V = SAVED[words]
    (row,) = (line for line in text_of(ROOT / "docs/tutorial.md").splitlines() if line.startswith(words))
    T, H = 1024, 64
    for arch, (said, kind) in itertools.product(archs, zip(row.strip("| ").split(" | ")[2:], (False, "states", True))):
        with ptxkit.capture(arch=arch):
            rows = (torch.empty(1, T, H, size, dtype=dtype, device="cuda", requires_grad=True) for size in (K, K, V, K))
            beta = torch.empty(1, T, H, dtype=dtype, device="cuda")
            found = kda.explain(*rows, beta, disable_recompute=kind, use_qk_l2norm_in_kernel=True)
        size = int(said.partition(", all")[0].replace(",", "")) * T * H / 2**20
        assert (f"keeps {size:,.1f} MiB beside the inputs" if size else "nothing is kept but the inputs") in str(found)
        assert found.backend == "triton" or ", all by `triton`" not in said


def test_no_file_has_the_marks_of_a_merge_that_was_not_finished():
    marks = re.compile(rf"^(?:{'<' * 7} |{'>' * 7} )", re.MULTILINE)
    assert marks.search(f"one\n{'<' * 7} HEAD\n")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    files = [ROOT / name for name in tracked if name.endswith((".md", ".py", ".toml", ".txt", ".sh", ".yml", ".json"))]
    assert not [file for file in files if file.is_file() and marks.search(file.read_text())]
