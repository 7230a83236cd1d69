"""The engine's C files call downwards: the table of floors in machine.h against the symbols of the object files.

The compiler has nothing to say about these files, either.
"""

import re
import shutil
import subprocess

import pytest

from ptxkit.engine import build
from ptxkit.isa import generate

pytestmark = pytest.mark.simulated

ROW = re.compile(r"^ \*     (\S+\.c(?: \S+\.c)*)  +\S", re.M)  # files of a floor, and what they are


def floors(texts):
    """Return file name -> its floor, from 0 at the bottom, as the table in machine.h has them."""
    rows = [row.split() for row in ROW.findall(texts["machine.h"])]
    table = {name: floor for floor, names in enumerate(reversed(rows)) for name in names}
    assert len(table) == sum(map(len, rows)), "a file stands twice in the table of floors"
    generated = table.pop("scalar_*.c")
    return table | {name: generated for name in texts if re.fullmatch(r"scalar_.*\.c", name)}


def symbols(objects, folder):
    """Return (symbol -> the file that defines it, file -> the symbols that it asks others for)."""
    defined, wanted = {}, {}
    for name in objects:
        done = subprocess.run(["nm", "-P", name], cwd=folder, capture_output=True, text=True, check=True)
        kinds = [line.split()[:2] for line in done.stdout.splitlines()]
        file = name.removesuffix(".o")
        wanted[file] = {symbol for symbol, kind in kinds if kind == "U"}
        defined |= {symbol: file for symbol, kind in kinds if kind.isupper() and kind != "U"}
    return defined, wanted


def upward(table, defined, wanted):
    """Return `file -> callee: symbol` for each call that does not go to a lower floor."""
    calls = [(file, defined[symbol], symbol) for file, asked in wanted.items() for symbol in asked if symbol in defined]
    return sorted(f"{file} -> {to}: {symbol}" for file, to, symbol in calls if table[to] >= table[file])


def compile_files(texts, folder, *flags):
    """Return (symbols of the objects, the compiler's warnings)."""
    if not shutil.which("nm"):
        pytest.skip("there is no nm (binutils), which lists the symbols of an object file")
    warnings, run = [], build._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_run", lambda *command: warnings.append(run(*command)))
        objects = build.objects(texts, folder, *flags)
    return symbols(objects, folder), "".join(warnings)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return (texts, folder, symbols) of all C files but the generated ones."""
    texts, folder = build.sources(), tmp_path_factory.mktemp("objects")
    return texts, folder, compile_files(handwritten(texts), folder, "-O0")[0]


def handwritten(texts):
    return {name: text for name, text in texts.items() if name.endswith(".h") or name not in generate.sources()}


def compile_again(texts, folder, tmp_path, **added):
    """Return (symbols that files ask for, warnings) once these lines are added to them: name without .c -> C."""
    for header in folder.glob("*.h"):
        shutil.copy(header, tmp_path)
    changed = {f"{name}.c": f"{texts[f'{name}.c']}\n{line}\n" for name, line in added.items()}
    (_, wanted), warnings = compile_files(changed, tmp_path, "-O0")
    return wanted, warnings


def test_every_file_has_a_floor():
    texts = build.sources()
    assert floors(texts).keys() == {name for name in texts if name.endswith(".c")}


def test_a_file_calls_only_files_of_lower_floors(compiled):
    texts, _, (defined, wanted) = compiled
    assert sum(symbol in defined for asked in wanted.values() for symbol in asked) > 200
    assert upward(floors(texts), defined, wanted) == []


@pytest.mark.exhaustive
def test_generated_files_call_no_other_file(tmp_path):
    texts = build.sources()
    headers = {name: text for name, text in texts.items() if name.endswith(".h")}
    (defined, wanted), _ = compile_files(headers | generate.sources(), tmp_path, "-O0")
    assert {defined[symbol] for asked in wanted.values() for symbol in asked if symbol in defined} <= {
        name for name in generate.sources() if name != "scalar.c"
    }
    assert upward(floors(texts), defined, wanted) == []


def test_a_call_of_a_higher_floor_is_noticed(compiled, tmp_path):
    texts, folder, (defined, wanted) = compiled
    planted, _ = compile_again(
        texts, folder, tmp_path, findings="void run_machine(Machine *m); void *planted = run_machine;"
    )
    assert upward(floors(texts), defined, wanted | planted) == ["findings.c -> schedule.c: run_machine"]


def test_a_circle_between_files_of_one_floor_is_noticed(compiled, tmp_path):
    texts, folder, (defined, wanted) = compiled
    planted, _ = compile_again(
        texts, folder, tmp_path, copies="void tmem_at_exit(Cta *c); void *planted = tmem_at_exit;",
        tmem="void bulk_groups_at_exit(Cta *c); void *planted_too = bulk_groups_at_exit;",
    )
    assert upward(floors(texts), defined, wanted | planted) == [
        "copies.c -> tmem.c: tmem_at_exit", "tmem.c -> copies.c: bulk_groups_at_exit",
    ]


@pytest.fixture
def gcc():
    if "Free Software Foundation" not in build._answers("--version"):
        pytest.skip("other compilers than gcc have warnings of their own")


@pytest.mark.exhaustive
def test_the_compiler_warns_of_nothing(tmp_path, gcc):
    """Some warnings take the engine's own flags, with -O3."""
    assert compile_files(handwritten(build.sources()), tmp_path)[1] == ""


def test_a_warning_is_noticed(compiled, tmp_path, gcc):
    texts, folder, _ = compiled
    _, warnings = compile_again(texts, folder, tmp_path, trace="static int planted;")
    assert "planted" in warnings and "-Wunused-variable" in warnings
