"""CuTe DSL host functions compiled without a GPU, for several archs in one process, and kept on disk."""

import contextlib
import subprocess
import sys
import textwrap

import pytest

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
cute = pytest.importorskip("cutlass.cute")

from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402

from ptxkit.compile import cutedsl  # noqa: E402
from ptxkit.compile.elf import resources  # noqa: E402
from ptxkit.compile.errors import BuildError, MissingCompilerError  # noqa: E402
from ptxkit.compile.store import Store, sources  # noqa: E402

pytestmark = pytest.mark.compiler


@cute.kernel
def double(x: cute.Tensor, y: cute.Tensor):
    row, column = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    y[row, column] = x[row, column] * 2


@cute.jit
def doubled(x: cute.Tensor, y: cute.Tensor):
    double(x, y).launch(grid=(x.shape[0], 1, 1), block=(x.shape[1], 1, 1))


@cute.jit
def twice_doubled(x: cute.Tensor, y: cute.Tensor):
    double(x, y).launch(grid=(x.shape[0], 1, 1), block=(x.shape[1], 1, 1))
    triple(y, x).launch(grid=(x.shape[0], 1, 1), block=(x.shape[1], 1, 1))


@cute.kernel
def triple(x: cute.Tensor, y: cute.Tensor):
    row, column = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    y[row, column] = x[row, column] * 3


@cute.jit
def nothing(x: cute.Tensor):
    pass


def fakes(number=2):
    rows = cute.sym_int()
    return [make_fake_compact_tensor(cutlass.Float32, (rows, 32), stride_order=(1, 0)) for _ in range(number)]


def arch():
    return cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar.arch


def test_one_process_compiles_for_several_archs():
    before = arch()
    for name, spelling in (("sm90", "sm_90a"), ("sm100", "sm_100a"), ("sm103", "sm_103a"), ("sm90", "sm_90a")):
        compiled = cutedsl.compile(doubled, *fakes(), target=name)
        assert f".target {spelling}" in compiled.ptx and compiled.target.spelling == spelling
        assert compiled.function.engine is not None  # it can be called where there is such a GPU
    assert arch() == before


def test_a_kernel_has_ptx_machine_code_and_what_it_takes():
    compiled = cutedsl.compile(doubled, *fakes(), target="sm100")
    (kernel,) = compiled.kernels.values()
    assert kernel.ptx is compiled.ptx and compiled.cubin[:4] == b"\x7fELF"
    assert kernel.registers > 0 and kernel.spills == 0 and kernel.shared == 0
    assert resources(compiled.cubin)[kernel.name].params == tuple((p.offset, p.size) for p in kernel.params)


def test_every_kernel_of_a_host_function_is_there():
    compiled = cutedsl.compile(twice_doubled, *fakes(), target="sm90")
    assert ["double" in name for name in sorted(compiled.kernels)] == [True, False] and len(compiled.kernels) == 2


def test_line_information_names_this_file():
    compiled = cutedsl.compile(doubled, *fakes(), target="sm100")
    assert ".loc" in compiled.ptx and "test_cutedsl_door.py" in compiled.ptx


def test_lines_are_those_that_the_dsl_finds_by_itself(monkeypatch):
    op = sys.modules["cutlass._mlir_helpers.op"]
    look_up, asked = op._fast_frameinfo, []
    monkeypatch.setattr(op, "_fast_frameinfo", lambda frame: asked.append(frame.f_lineno) or look_up(frame))
    kept, once = cutedsl.compile(twice_doubled, *fakes(), target="sm90"), len(asked)
    monkeypatch.setattr(cutedsl, "_lines_kept", contextlib.nullcontext)
    assert cutedsl.compile(twice_doubled, *fakes(), target="sm90").ptx == kept.ptx
    assert 0 < once < len(asked) - once


def test_a_key_keeps_the_host_function_on_disk(tmp_path):
    key = (sources(sys.modules[__name__]), "float32")
    first, second, other = (
        cutedsl.compile(doubled, *fakes(), target=target, key=key, keep_in=Store(tmp_path))
        for target in ("sm100", "sm100", "sm90")
    )
    assert not first.function.load_from_binary and second.function.load_from_binary
    assert (second.ptx, second.cubin, second.symbol, second.module) == (
        first.ptx, first.cubin, first.symbol, first.module,
    )
    assert second.kernels == first.kernels and "sm_90a" in other.ptx
    names = list(first.function.execution_args.signature.parameters)
    assert list(second.function.execution_args.signature.parameters) == names == ["x", "y"]


def test_without_a_key_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path))
    cutedsl.compile(doubled, *fakes(), target="sm100")
    assert not list(tmp_path.iterdir())


def test_a_damaged_entry_is_compiled_again(tmp_path):
    build = lambda: cutedsl.compile(doubled, *fakes(), target="sm100", key="k", keep_in=Store(tmp_path))  # noqa: E731
    first = build()
    (path,) = tmp_path.rglob("*.kernel")
    path.write_bytes(path.read_bytes()[:-100])
    again = build()
    assert again.ptx == first.ptx and not again.function.load_from_binary
    assert build().function.load_from_binary


def test_a_host_function_that_launches_nothing_is_refused():
    with pytest.raises(BuildError, match="launches no kernel"):
        cutedsl.compile(nothing, *fakes(1), target="sm100")


def test_what_the_dsl_says_is_passed_on_without_colours():
    with pytest.raises(BuildError, match="cannot compile doubled for sm_90a") as caught:
        cutedsl.compile(doubled, *fakes(1), target="sm90")
    assert "`y`" in str(caught.value) and "\x1b" not in str(caught.value)


def test_settings_come_back_after_an_error():
    before = arch()
    with pytest.raises(RuntimeError), cutedsl.compiling_for("sm_90a", keep_ptx=True):
        assert arch() == "sm_90a"
        raise RuntimeError("out")
    assert arch() == before


def test_without_the_dsl_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(MissingCompilerError, match=r"pip install 'nvidia-cutlass-dsl\[cu13\]'"):
        cutedsl.compile(doubled, target="sm100")


def test_importing_the_doors_imports_no_compiler():
    code = textwrap.dedent("""
        import sys, torch
        before = set(sys.modules)
        from ptxkit.compile import cutedsl, driver, elf, kernel, launching, nvrtc, store, triton
        print(sorted({name.split(".")[0] for name in set(sys.modules) - before} & {"cutlass", "cuda", "triton"}))
    """)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert ran.stdout.strip() == "[]", ran.stderr
