"""`kda simulate` and the plug-in for pytest, on scripts with kernels of a few instructions of PTX."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")

import kda
import ptxkit
from kda.cli import cli
from ptxkit import engine, scripts
from ptxkit.capturing.gpu import order
from ptxkit.commands.simulate import command
from ptxkit.findings import FREED, KINDS, Finding, FindingPlace, SimulationError
from ptxkit.scripts import places, sarif
from ptxkit.scripts.places import PageLine

pytestmark = pytest.mark.simulated

# Line numbers in .loc are those of the comments in the kernels' place; a kernel gets the address of x.
SCRIPT = '''
import ctypes, sys
import torch
from cuda.bindings import driver

HEAD = """.version 8.0
.target sm_80
.address_size 64
.file 1 "FILE"
.visible .entry NAME(.param .u64 x)
{ .shared .align 4 .b8 kept[512]; .reg .b32 %r<9>; .reg .b64 %rd<9>;
ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
mov.u32 %r2, kept; shl.b32 %r3, %r1, 2; add.u32 %r3, %r2, %r3; xor.b32 %r4, %r1, 32; shl.b32 %r4, %r4, 2;
add.u32 %r4, %r2, %r4;
"""
KERNELS = {
    "twice": ".loc 1 16 0\\nld.global.b32 %r5, [%rd3]; add.u32 %r5, %r5, %r5; st.global.b32 [%rd3], %r5;",  # <16>
    "racy": ".loc 1 17 0\\nst.global.b32 [%rd1], %r1;",
    "swap": "st.shared.b32 [%r3], %r1; bar.sync 0; ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd3], %r5;",
    "idle": ".loc 1 19 0\\nbar.sync 0;",
    "last": "shr.u32 %r6, %r1, 5; atom.global.exch.b32 %r5, [%rd1], %r6;",
    "endless": ".reg .pred %p;\\nAGAIN: ld.volatile.global.b32 %r5, [%rd1]; setp.eq.u32 %p, %r5, 1;\\n@%p bra AGAIN;",
    "counts": ".reg .pred %p;\\nAGAIN: add.u32 %r4, %r4, 1; ld.volatile.global.b32 %r5, [%rd1];\\n"
              "setp.eq.u32 %p, %r5, 1; @%p bra AGAIN;",
}

def launch(name, x):
    ptx = HEAD.replace("NAME", name).replace("FILE", __file__) + KERNELS[name] + "\\nret; }"
    _, module = driver.cuModuleLoadData(ptx.encode())
    _, function = driver.cuModuleGetFunction(module, name.encode())
    driver.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, 0, ((x.data_ptr(),), (ctypes.c_uint64,)), 0)

if __name__ == "__main__":
    import beside
    x = torch.ones(64, dtype=torch.int32, device="cuda")
    for name in sys.argv[1:]:
        if name == "fail":
            raise AssertionError("x is wrong")
        if name == "leave":
            sys.exit(3)
        launch(name, x)
    print("x:", x[5].item(), beside.VALUE)
'''


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDA_QUIET", "1")     # on a busy machine commands say how long they will still take
    yield tmp_path
    sys.modules.pop("beside", None)


def test_a_kernel_that_does_not_end_is_told_of_and_interrupted(workspace):
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from kda.cli import main; main()"
    words = [sys.executable, "-c", begin, "simulate", "--arch", "sm90", "script.py", "counts"]    # nohup ignores SIGINT
    path = os.pathsep.join([str(Path(kda.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    spoken = {"PYTHONPATH": path, "KDA_QUIET": "0"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | spoken) as program:
        progress = next(line for line in program.stderr if "simulating" in line)
        program.send_signal(signal.SIGINT)
        try:
            program.wait(timeout=300)
        finally:
            program.kill()                   # also where Ctrl-C did not end it
        rest = program.stderr.read()
    engine = "building the engine of ptxkit, once for this machine"
    assert re.fullmatch(rf"simulating counts; (0 of 3 done|{engine}); \d+ s \.\.\.\n", progress)
    assert program.returncode == 130
    assert [line for line in rest.splitlines() if "simulating" not in line] == ["kda: interrupted"]


def simulate(*words):
    return CliRunner().invoke(cli, ["simulate", "--arch", "sm90", *words])


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("names, code, says", [
    (["twice"], 0, "1 launch of 1 kernel on sm_90a, simulated under 3 schedules"),
    (["twice", "racy"], 1, "race-write-write: racy"),
    (["twice", "fail"], 2, "AssertionError: x is wrong"),
    (["racy", "fail"], 2, "race-write-write: racy"),
    (["twice", "leave"], 2, "script.py failed: it ended with 3"),
    (["endless"], 1, "livelock: endless"),
    (["--limit", "9000", "counts"], 1, "too-many-instructions: counts"),
    ([], 3, "script.py launched no kernel in the capture of this command"),
])
def test_the_exit_code_says_how_it_ended(workspace, names, code, says):
    argv, path = sys.argv, [*sys.path]
    options, names = (names[:2], names[2:]) if names[:1] == ["--limit"] else ([], names)
    result = simulate(*options, "script.py", *names)
    assert (result.exit_code, says in result.output) == (code, True), result.output
    assert (sys.argv, sys.path) == (argv, path)


def test_a_script_has_a_limit_without_being_asked(workspace, monkeypatch):
    (limit,) = (option for option in command.params if option.name == "limit")
    assert limit.default >= 10**7 and f"{limit.default:,}" in simulate("--help").output
    monkeypatch.setattr(limit, "default", 9000)
    result = simulate("script.py", "counts")
    assert result.exit_code == 1 and "--limit) allows more" in result.output.replace("\n", " ").replace("    ", "")


def test_every_output_says_that_a_launch_was_ended_by_a_finding(workspace):
    said = "it ended the launch, whose results are incomplete"
    options = ("--limit", "9000", "--html", "page.html", "--sarif", "log.sarif")
    text = simulate(*options, "script.py", "counts", "twice").output
    assert text.count(said) == 1
    assert said in (workspace / "page.html").read_text()
    assert said in results(workspace / "log.sarif")[0]["message"]["text"]
    found = json.loads(simulate("--json", *options, "script.py", "counts", "twice").stdout)
    assert [launch["incomplete"] for launch in found["launches"]] == [True, False]
    assert [finding["ended"] for finding in found["findings"]] == [True]


def test_a_script_that_cannot_be_parsed_is_shown_without_frames_of_others(workspace):
    (workspace / "script.py").write_text("print(1\n")
    result = simulate("script.py")
    assert result.exit_code == 2 and "SyntaxError: '(' was never closed" in result.output
    assert "script.py" in result.output and "line 1" in result.output
    assert "Traceback" not in result.output and "runpy" not in result.output


@pytest.mark.parametrize("names, code, looks, says", [
    (["twice"], 0, "clean", "1 launch of 1 kernel, 3 schedules of each; 0 findings, 0 notes"),
    (["twice", "fail"], 2, "", "1 launch of 1 kernel, 3 schedules of each; 0 findings, 0 notes; the script failed"),
    ([], 3, "", "0 launches of 0 kernels, 3 schedules of each; 0 findings, 0 notes; the script launched no kernel"),
])
def test_a_page_looks_clean_only_if_kernels_ran_to_the_end(workspace, names, code, looks, says):
    assert simulate("--html", "page.html", "script.py", *names).exit_code == code
    assert f'<p class="{looks}">{says}</p>' in Path("page.html").read_text()


def test_a_traceback_begins_in_the_script_and_a_missing_script_is_named(workspace):
    assert "runpy" not in simulate("script.py", "fail").output
    result = simulate("nothing.py")
    assert result.exit_code == 2 and "there is no script 'nothing.py'" in result.output


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("schedules", [1, 2, 5])
def test_a_script_sees_each_launch_once_however_many_schedules_there_are(workspace, schedules):
    result = simulate("--schedules", str(schedules), "script.py", "twice", "twice")
    assert "x: 4 7\n" in result.output and "2 launches of 1 kernel" in result.output


def test_an_option_behind_the_script_is_the_scripts_and_the_message_says_so(workspace):
    result = simulate("script.py", "--clock", "twice")
    says = "--clock went to the script; options of kda simulate come before it"
    assert result.exit_code == 2 and says in result.output


def test_that_is_said_also_where_the_script_does_not_mind(workspace):
    runs_it = "runpy.run_path('script.py', run_name='__main__')"
    Path("deaf.py").write_text(f"import runpy, sys\nsys.argv[1:] = ['twice']\n{runs_it}\n")
    result = simulate("deaf.py", "--strict", "--html=page.html")
    assert result.exit_code == 0 and "--strict, --html=page.html went to the script; options of kda" in result.stderr


TRAINS = """
import torch, triton, triton.language as tl

@triton.jit
def double(x, y):
    i = tl.arange(0, 32)
    tl.store(y + i, 2 * tl.load(x + i))

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        double[(1,)](x, y := torch.empty_like(x))
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * dy + 0 * x

x = torch.ones(32, requires_grad=True)
y = Double.apply(x)
double[(1,)](x.detach(), torch.empty(32))
y.sum().backward()
print("gradient", x.grad.unique().item())
"""


def test_a_script_may_save_what_a_kernel_reads_for_its_backward(workspace):
    """Several schedules start from the same memory, and autograd must not take that for a change."""
    pytest.importorskip("triton", reason="triton is not installed")
    Path("trains.py").write_text(TRAINS)
    result = simulate("--arch", "sm90", "--schedules", "3", "trains.py")
    assert (result.exit_code, result.output.splitlines()[0]) == (0, "gradient 2.0")


def test_json_is_one_object_and_what_the_script_prints_goes_to_stderr(workspace):
    result = simulate("--json", "--clock", "script.py", "twice", "racy")
    found = json.loads(result.stdout)
    assert "x: " in result.stderr and found["exit"] == result.exit_code == 1 and found["failed"] is None
    assert [launch["kernel"] for launch in found["launches"]] == ["twice", "racy"]
    assert found["launches"][0]["counters"]["global_bytes_read"] == 64 * 4
    assert found["milliseconds"] > max(launch["milliseconds"] for launch in found["launches"]) > 0
    (finding, *_) = found["findings"]
    assert finding["kernel"] == "racy" and finding["place"]["source"].endswith("script.py:17")
    tensor = finding["memory"]["tensor"]
    assert tensor.keys() == {"address", "size", "name", "layout", "argument"} and tensor["name"]
    assert tensor["layout"]["shape"] and tensor["layout"].keys() == {"dtype", "shape", "strides", "itemsize"}
    assert len({(f["kind"], f["place"]["line"]) for f in found["findings"]}) == len(found["findings"])


@pytest.mark.parametrize("printed", ["print('x' * 100_000)", "print('x', flush=True)"])
def test_a_script_whose_output_nobody_reads_runs_to_its_end(workspace, monkeypatch, capfd, printed):
    (workspace / "script.py").write_text(f"{SCRIPT}    {printed}\n    open('ended', 'w').close()\n")
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        code = command.main(["--arch", "sm90", "script.py", "twice"], standalone_mode=False)
    assert (code, Path("ended").exists(), capfd.readouterr().err) == (0, True, "")


def test_a_pipe_of_the_script_that_nobody_reads_is_a_failure_of_the_script(workspace):
    (workspace / "script.py").write_text("import os\nread, write = os.pipe()\nos.close(read)\nos.write(write, b'x')\n")
    result = simulate("script.py")
    assert result.exit_code == 2 and "BrokenPipeError" in result.stderr


def test_a_result_that_depends_on_the_schedule_is_reported(workspace):
    found = json.loads(simulate("--json", "--schedules", "6", "script.py", "twice", "last").stdout)
    assert found["varying"] == ["last"] and found["exit"] == 0


def test_mutants_tell_a_barrier_that_is_needed_from_one_that_is_not(workspace):
    needed = simulate("--mutants", "script.py", "swap")
    assert needed.exit_code == 0 and "1 mutant, 1 noticed" in needed.output
    idle = simulate("--mutants", "script.py", "twice", "idle")
    assert idle.exit_code == 1 and "SURVIVED" in idle.output
    assert "no mutants: fix the findings first" in simulate("--mutants", "script.py", "racy", "swap").stdout
    without = simulate("--mutants", "script.py", "twice")
    assert without.exit_code == 0 and "no mutants: these kernels have no synchronising instruction" in without.stdout


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_mutants_fits_the_terminal_with_whole_cells(workspace, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = simulate("--mutants", "script.py", "swap", "idle").stdout.splitlines()
    assert all(len(line) <= width for line in lines)
    cells = [re.split(r" {2,}", line.strip()) for line in lines]
    assert ["line", "mutants", "instruction", "what was changed", "noticed by"] in cells
    assert ["PTX line 10", "1", "bar.sync", "removed", "uninitialised"] in cells
    assert ["script.py:19", "1", "bar.sync", "removed", "SURVIVED (PTX line 11)"] in cells


def test_memory_that_the_script_did_not_make_is_neither_copied_nor_compared(workspace):
    mine = torch.zeros(1000)
    found = scripts.run("script.py", ["twice"], schedules=3, keep=True)
    ((_, kept),) = found.first.values()
    assert kept.tensors and mine.data_ptr() not in {x.data_ptr() for x in kept.tensors.values()}


def test_a_finding_that_only_the_schedules_of_mutants_have_is_a_finding(workspace, monkeypatch):
    race = Finding("race-lanes", "of a schedule", "swap", 0, 0, 0, FindingPlace(3, "st", None), None, 1)

    def found(*calls, **options):
        raise SimulationError([race])

    monkeypatch.setattr("ptxkit.scripts.running.mutants", found)
    result = simulate("--mutants", "script.py", "swap")
    assert result.exit_code == 1 and "race-lanes: swap" in result.output


@pytest.mark.parametrize("words", [["simulate", "--arch", "sm120", "--clock", "script.py"],
                                   ["timeline", "--arch", "sm120"]], ids=lambda words: words[0])
def test_a_clock_that_the_arch_does_not_have_is_a_wrong_command(workspace, words):
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2 and "no clock for sm120; it has one for sm80" in result.output


# ---- SARIF


def results(path):
    return json.loads(path.read_text())["runs"][0]["results"]


def test_sarif_names_rule_file_and_line_and_knows_a_finding_again_when_lines_move(workspace):
    arguments = ("--mutants", "--sarif", "log.sarif", "script.py")
    assert simulate(*arguments, "racy").exit_code == 1
    before = results(workspace / "log.sarif")
    assert {result["ruleId"] for result in before} == {"race-lanes", "race-write-write"}
    first = next(result for result in before if result["ruleId"] == "race-write-write")
    where = first["locations"][0]
    assert first["level"] == "error" and first["relatedLocations"]
    assert where["physicalLocation"] == {
        "artifactLocation": {"uri": "script.py", "uriBaseId": "SRCROOT"}, "region": {"startLine": 17}
    }
    assert where["logicalLocations"][0]["fullyQualifiedName"] == "racy"
    (workspace / "script.py").write_text("\n\n" + SCRIPT.replace(".loc 1 17", ".loc 1 19"))
    sarif.text_of.cache_clear()
    simulate(*arguments, "racy")
    after = results(workspace / "log.sarif")
    assert after[0]["locations"][0]["physicalLocation"]["region"]["startLine"] == 19
    prints = [[result["partialFingerprints"] for result in found] for found in (before, after)]
    assert prints[0] == prints[1]


@pytest.mark.parametrize(("name", "uri"), [
    ("a b%#.py", "a%20b%25%23.py"), ("a < b.py", "a%20%3C%20b.py"), (os.fsdecode(b"\xff.py"), "script.py"),
], ids=ascii)
def test_a_script_of_any_name_has_its_page_and_its_uri_in_sarif(workspace, name, uri):
    source = "__file__" if name.isascii() else '"script.py"'                   # PTX is UTF-8
    (workspace / name).write_text(SCRIPT.replace("__file__", source))
    done = simulate("--html", "page.html", "--sarif", "log.sarif", name, "racy")
    assert done.exit_code == 1 and (workspace / "page.html").stat().st_size > 1000
    (where,) = {each["physicalLocation"]["artifactLocation"]["uri"] for result in results(workspace / "log.sarif")
                for each in result["locations"]}
    assert where == uri


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("option", ["--html", "--sarif"])
def test_a_full_disk_is_said_to_be_full(workspace, option):
    done = simulate(option, "/dev/full", "script.py", "twice")
    assert done.exit_code == 2
    assert done.stderr.endswith("kda: /dev/full cannot be written (No space left on device). Name another file.\n")


@pytest.mark.exhaustive
def test_a_surviving_mutant_is_a_warning_in_sarif(workspace):
    simulate("--mutants", "--sarif", "log.sarif", "script.py", "idle")
    (result,) = results(workspace / "log.sarif")
    assert result["ruleId"] == "mutant-survived" and result["level"] == "warning"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 19


def test_every_kind_of_finding_has_a_rule():
    header = (Path(engine.__file__).parent / "findings.h").read_text()
    of_the_engine = re.findall(r"\w+", re.search(r"typedef enum \{(.*?)\} FindingKind", header, re.DOTALL)[1])
    of_the_engine.remove("1")                                                # the first one's number
    assert sorted(KINDS) == [*range(1, len(of_the_engine) + 1)]
    assert {kind.id for kind in (*KINDS.values(), FREED)} | {sarif.SURVIVED, order.KIND} == set(sarif.RULES)


def test_a_finding_is_shown_at_the_innermost_line_of_the_users_own_files(tmp_path):
    kernel, library = tmp_path / "kernel.py", tmp_path / "venv" / "site-packages" / "sort.py"
    source = f"{library}:3 < {kernel}:5 < {kernel}:9"
    assert places.line_of(source, 1, tmp_path) == PageLine(str(kernel), 5)
    assert places.line_of(source, 1, tmp_path / "elsewhere") == PageLine(str(library), 3)
    assert places.line_of(None, 8, tmp_path) == PageLine(None, 8)
    assert places.frames("C:/a b.py:12") == [PageLine("C:/a b.py", 12)]


# ---- the page


def test_the_page_has_the_source_with_counts_and_findings_at_their_lines(workspace):
    result = simulate("--html", "page.html", "script.py", "twice", "racy", "swap")
    assert result.exit_code == 1
    page = (workspace / "page.html").read_text()
    text = re.sub(r"<[^>]+>", "", page)
    assert "&lt;16&gt;" in page and "<16>" not in page
    assert "race-write-write" in text and "3 launches of 3 kernels" in text and "1 launch, the first with" in text
    of_racy = page[page.index("<h2>racy") : page.index("<h2>swap")]
    assert re.search(r'<td class="n">17</td>.*\n(<tr class="error">.*\n)*.*<b>race-write-write</b>', of_racy)
    assert "PTX (it names no source)" in page[page.index("<h2>swap") :] and "bar.sync 0" in page
    assert not re.search(r'(src|href)=|url\(|@import', page)                  # it needs no network


def test_lines_of_no_file_and_code_of_no_line_are_shown_as_ptx(workspace):
    (workspace / "script.py").write_text(CUDA)
    result = simulate("--html", "page.html", "--sarif", "log.sarif", "script.py")
    assert result.exit_code == 1 and "uninitialised" in result.output, result.output
    page = (workspace / "page.html").read_text()
    assert "PTX (it names no source)" in page and "&lt;string&gt;" not in page
    (run,) = json.loads((workspace / "log.sarif").read_text())["runs"]
    assert run["results"] and "<string>" not in json.dumps(run["results"])


# ---- the plug-in for pytest

CUDA = '''
import torch, ptxkit
SOURCE = """extern "C" __global__ void k(const int *x, int *out) {
    __shared__ int kept[64];
    for (int n = 0; n < x[0]; n++) kept[threadIdx.x] += x[threadIdx.x];
    out[threadIdx.x] = kept[threadIdx.x ^ 32];
}"""
x, out = torch.ones(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
ptxkit.run(SOURCE, "k", grid=1, block=64, args=[x, out], arch="sm_90a")
'''

TESTS = '''
import pytest
import torch
from script import launch

def test_right(simulated):
    x = torch.ones(64, dtype=torch.int32, device="cuda")
    launch("twice", x)
    assert x.tolist() == [2] * 64 and simulated.arch == "sm_90a"

def test_race(simulated):
    launch("racy", torch.ones(64, dtype=torch.int32, device="cuda"))

def test_both(simulated):
    launch("racy", torch.ones(64, dtype=torch.int32, device="cuda"))
    assert False, "wrong as well"

@pytest.mark.simulated(arch="b200", clock=True)
def test_marked(simulated):
    launch("twice", torch.ones(64, dtype=torch.int32, device="cuda"))
    assert simulated.arch == "sm_100a" and simulated.milliseconds > 0

def test_after(pytestconfig):
    assert not hasattr(torch.cuda.is_available, "__wrapped__")
'''


class Watching:
    """A plug-in that keeps the verdict of each test, and why."""

    def __init__(self):
        self.verdicts, self.reasons = {}, {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("::test_")[2]
            self.verdicts[name] = f"{report.when} {report.outcome}"
            self.reasons[name] = report.longreprtext + "".join(text for _, text in report.sections)


def under_pytest(name, text, *options):
    """Run a file of tests with the plug-in, in the folder of this process; return the verdicts and the reasons."""
    Path(name).write_text(text)
    Path("pytest.ini").write_text("[pytest]\n")
    watching = Watching()
    words = ["-p", "ptxkit.pytest_plugin", "-p", "no:cacheprovider", *options, "-q", "-c", "pytest.ini"]
    pytest.main([*words, name], plugins=[watching])
    return watching.verdicts, watching.reasons


def test_findings_fail_the_test_that_has_them(workspace):
    options = ("--simulate-arch", "h100", "--strict-markers")
    verdicts, reasons = under_pytest("test_kernels_of_somebody.py", TESTS, *options)
    right, wrong = "call passed", "call failed"
    assert verdicts == {"right": right, "race": wrong, "both": wrong, "marked": right, "after": right}
    assert "race-write-write: racy" in reasons["race"] and "Traceback" not in reasons["race"]
    assert "race-write-write: racy" in reasons["both"] and "wrong as well" in reasons["both"]


WRONG = '''
import pytest

@pytest.mark.simulated(strct=True)
def test_option(simulated):
    pass

@pytest.mark.simulated(arch="h1000")
def test_arch(simulated):
    pass

@pytest.mark.simulated("h100")
def test_place(simulated):
    pass
'''


def test_a_wrong_marker_fails_its_test_in_a_line(workspace):
    verdicts, reasons = under_pytest("test_wrong_markers.py", WRONG)
    assert set(verdicts.values()) == {"setup failed"} and len(verdicts) == 3
    says = {"option": "capture has no option 'strct'", "arch": "did you mean 'h100'", "place": "options by name"}
    for name, part in says.items():
        assert part in reasons[name] and "\n" not in reasons[name].strip()


def python(*words, **environment):
    words = [sys.executable, *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, env=os.environ | environment)


def test_a_wrong_arch_of_the_command_line_is_one_usage_error(workspace):
    (workspace / "pytest.ini").write_text("[pytest]\n")
    words = ["-m", "pytest", "-p", "ptxkit.pytest_plugin", "-c", "pytest.ini", "--simulate-arch", "h10"]
    ran = python(*words, PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]))
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--simulate-arch: no GPU arch or card is called 'h10'; did you mean 'h100'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_plug_in_costs_nothing_until_it_is_used():
    code = "import sys, ptxkit.pytest_plugin; print(sorted({'torch', 'kda', 'triton', 'cutlass'} & set(sys.modules)))"
    ran = python("-c", code, PYTHONPATH=str(Path(__file__).parents[3]))
    assert ran.stdout.strip() == "[]", ran.stderr


def test_the_options_of_the_command_come_before_the_script():
    assert command.context_settings["allow_interspersed_args"] is False


def test_without_a_c_compiler_the_script_does_not_begin(workspace, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    result = simulate("script.py", "twice")
    assert result.exit_code == 3 and "needs a C compiler" in result.stderr and not result.stdout


def test_the_package_runs_as_a_command():
    said = subprocess.run([sys.executable, "-m", "ptxkit", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"ptxkit {ptxkit.__version__}\n"
