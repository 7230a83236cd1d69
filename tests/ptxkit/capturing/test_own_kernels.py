"""The kernels of ptxkit/docs/own_kernels.md: their bugs are reported as the page says, and its fixes remove them."""

import linecache
import pathlib
import re
import runpy

import pytest

pytestmark = pytest.mark.simulated

PAGE = pathlib.Path(__file__).parents[3] / "ptxkit" / "docs" / "own_kernels.md"
BLOCKS = re.findall(r"^```(py|text|diff)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
EXAMPLES = dict(zip(("triton", "cutlass", "cuda.bindings.nvrtc"), zip(*[(text for _, text in BLOCKS)] * 3)))


def printed_by(path, code, capsys):
    path.write_text(code)
    linecache.checkcache(str(path))
    runpy.run_path(str(path))
    return capsys.readouterr().out


def settled(report):
    """Return a report without what another release of a compiler, or another run, may change: addresses, folders, and
    lines of PTX."""
    report = re.sub(r"\(\S*/", "(", re.sub(r"0x[0-9a-f]{6,}", "0x...", report))
    return re.sub(r"PTX line \d+: .*?;  ", "PTX  ", report)


def applied(diff, code):
    before, after = ("".join(line[1:] + "\n" for line in diff.splitlines() if line[0] in keep) for keep in (" -", " +"))
    assert code.count(before) == 1
    return code.replace(before, after)


def test_the_page_has_a_script_a_report_and_a_fix_for_each_kernel():
    assert [kind for kind, _ in BLOCKS] == ["py", "text", "diff"] * 3


@pytest.mark.parametrize(
    "compiler, name", [("triton", "total.py"), ("cutlass", "reverse.py"), ("cuda.bindings.nvrtc", "sum.py")]
)
def test_the_bug_is_reported_as_printed_and_the_fix_removes_it(compiler, name, tmp_path, capsys):
    pytest.importorskip(compiler, reason=f"needs {compiler}")
    code, report, fix = EXAMPLES[compiler]
    found = printed_by(tmp_path / name, code, capsys)
    assert settled(found) == settled(report)
    assert len(printed_by(tmp_path / name, applied(fix, code), capsys).strip().splitlines()) == 1


@pytest.mark.parametrize("second", ["second/total.py", "first/renamed.py"])
def test_a_kernel_that_triton_first_compiled_in_another_file_is_reported_in_its_own(tmp_path, capsys, second):
    pytest.importorskip("triton", reason="needs triton")
    for file in (tmp_path / "first" / "total.py", tmp_path / second):
        file.parent.mkdir(exist_ok=True)
        found = printed_by(file, EXAMPLES["triton"][0], capsys)
        assert set(re.findall(r"\((\S*:\d+)\)", found)) == {f"{file}:12"}
