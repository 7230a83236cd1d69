"""What host code of the CuTe DSL may do inside a capture: no kernels at all, tables of addresses, CPU tensors."""

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass.cute as cute  # noqa: E402
from cuda.bindings.driver import CUstream  # noqa: E402
from cutlass.cute.nvgpu import cpasync  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_ptr  # noqa: E402

from ptxkit.capturing import CaptureError, capture, memory  # noqa: E402
from ptxkit.capturing.aligned import aligned  # noqa: E402
from ptxkit.compile import cutedsl  # noqa: E402
from ptxkit.tensormap import decode  # noqa: E402

pytestmark = pytest.mark.simulated

STREAM = CUstream(0)


@cute.jit
def greets(n: cutlass.Int32):
    cute.printf("from the host: {}", n)


@cute.kernel
def double(x: cute.Tensor, y: cute.Tensor):
    i = cute.arch.thread_idx()[0]
    y[i] = x[i] * 2


@cute.jit
def doubled(x: cute.Tensor, y: cute.Tensor, stream):
    double(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def doubled_here(x: cute.Tensor, y: cute.Tensor):
    double(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def follow(table: cute.Tensor):
    """table holds the addresses of two rows of 32 numbers."""
    i = cute.arch.thread_idx()[0]
    x, y = (
        cute.make_tensor(cute.make_ptr(cutlass.Float32, table[k], cute.AddressSpace.gmem), cute.make_layout(32))
        for k in (0, 1)
    )
    y[i] = x[i] * 2


@cute.jit
def followed(table: cute.Tensor, stream):
    follow(table).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def fake(n=32, dtype=cutlass.Float32, align=16):
    return make_fake_compact_tensor(dtype, (n,), assumed_align=align)


@pytest.fixture
def xy():
    return torch.arange(32.0), torch.zeros(32)


def test_host_code_without_a_kernel_runs_as_it_is(capfd):
    before = cute.compile(greets, cutlass.Int32(0))
    executor = before.to(None)
    with capture() as session:
        before(cutlass.Int32(1))
        executor(cutlass.Int32(2))
        before.to(None)(cutlass.Int32(3))
        cute.compile(greets, cutlass.Int32(0))(cutlass.Int32(4))
        greets(5)
    assert capfd.readouterr().out.split("from the host: ")[1:] == [f"{n}\n" for n in range(1, 6)]
    assert not session.runs


def test_memory_behind_a_table_of_addresses_is_known(xy):
    x, y = xy
    compiled = cutedsl.compile(followed, fake(2, cutlass.Int64), make_fake_stream(), target="sm100")
    table = torch.tensor([x.data_ptr(), y.data_ptr()])
    with capture() as session:
        compiled(table, STREAM)
    assert not session.findings and torch.equal(y, 2 * x)


def test_whole_numbers_that_are_no_addresses_open_no_memory(xy):
    x, _ = xy
    address = torch.tensor([x.data_ptr()])
    for numbers in (torch.tensor([0, 65, 128]), torch.tensor([1 << 40]), x.int(), address.double()):
        assert list(memory.with_pointees({"numbers": numbers})) == ["numbers"]
    table = torch.tensor([[0, x.data_ptr() + 8]])
    found = memory.with_pointees({"table": table, "y": torch.zeros(3)})
    (*given, behind) = found.items()
    assert [name for name, _ in given] == ["table", "y"] and behind[0].startswith("memory behind table")
    assert behind[1].data_ptr() == x.untyped_storage().data_ptr()


def compile_too_few_arguments(door):
    """Fail before the DSL traces, which is when it drops the options of a compilation."""
    with pytest.raises(Exception, match="`y`"):
        if door == "kda":
            cutedsl.compile(doubled_here, fake(), target="sm_90a")
        else:
            cute.compile(doubled_here, fake(), options="--dump-dir /nowhere")


@pytest.mark.parametrize("door", ["kda", "cute.compile", "cute.compile inside"])
def test_options_of_a_failed_compilation_are_not_those_of_the_next(door, xy):
    x, y = xy
    if door != "cute.compile inside":
        compile_too_few_arguments(door)
    with capture(arch="sm_90a") as session:
        if door == "cute.compile inside":
            compile_too_few_arguments(door)
        doubled_here(from_dlpack(x), from_dlpack(y))
    assert not session.findings and torch.equal(y, 2 * x)


def test_tensors_of_the_cpu_are_of_the_gpu_to_what_is_compiled_inside(xy):
    """Their pointers are global ones, not generic ones."""
    x, y = xy
    with capture() as session:
        compiled = cute.compile(doubled, from_dlpack(x), from_dlpack(y), make_fake_stream())
        compiled(from_dlpack(x), from_dlpack(y), STREAM)
        doubled_here(from_dlpack(x), from_dlpack(y))
    assert not session.findings and torch.equal(y, 2 * x)
    for launch in session.launches:
        assert "ld.global" in launch.kernel.ptx and "st.global" in launch.kernel.ptx
    assert len(session.launches) == 2


def test_an_object_file_is_refused_inside_for_it_has_no_ptx(tmp_path):
    from cutlass import runtime

    with capture(), pytest.raises(CaptureError, match=r"kernel\.o is an object file, which contains no PTX"):
        runtime.load_module(str(tmp_path / "kernel.o"), enable_tvm_ffi=True)
    with pytest.raises(Exception, match="kernel") as error:                  # it does not exist
        runtime.load_module(str(tmp_path / "kernel.o"), enable_tvm_ffi=False)
    assert not isinstance(error.value, CaptureError)


@pytest.mark.parametrize("name", ["prefix" * 30, "\N{GREEK SMALL LETTER DELTA}" * 130], ids=["long", "of many bytes"])
def test_a_function_whose_name_is_too_long_for_a_file_keeps_its_ptx(xy, name):
    @cute.jit
    def named(x: cute.Tensor, y: cute.Tensor, words: cutlass.Constexpr, stream):
        double(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    arguments = fake(), fake(), name, make_fake_stream()
    if name.isascii():
        named.set_name_prefix(name)
    with capture() as session:
        inside = cute.compile(named, *arguments)
        inside(*xy, STREAM)
        cutedsl.compile(named, *arguments, target="sm100")(*xy, STREAM)
    assert len(inside.function_name.encode()) > 255
    assert len(session.runs) == 2 and torch.equal(xy[1], 2 * xy[0])


@cute.kernel
def hold_map(atom: cute.CopyAtom, tensor: cute.Tensor):
    """The map is a parameter; nothing is copied."""
    cpasync.prefetch_descriptor(atom)


@cute.jit
def mapped(rows: cute.Pointer, stream):
    x = cute.make_tensor(rows, cute.make_layout((256, 512), stride=(512, 1)))
    tile = cute.make_layout((8, 128), stride=(128, 1))
    atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, tile, (8, 128))
    hold_map(atom, tensor).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def test_a_function_whose_ptx_was_not_kept_is_refused_by_what_was_kept(xy, monkeypatch):
    from cutlass.base_dsl import jit_executor

    monkeypatch.setattr(jit_executor.JitFunctionArtifacts, "__post_init__", lambda self: None)
    with capture(arch="sm_90a"), pytest.raises(CaptureError, match=r"doubled_here.* has no kernel: '\S*\.ptx'"):
        doubled_here(*map(from_dlpack, xy))


@pytest.mark.parametrize("dtype, name", [("Int4", "16u4_align8b"), ("Float4E2M1FN", "16u4_align8b"),
                                         ("Float6E3M2FN", "16u6_align16b")])
def test_the_codes_of_packed_elements_are_those_of_the_compiler(dtype, name):
    x = torch.zeros(1 << 17, dtype=torch.uint8)
    with capture() as session:
        mapped(make_ptr(getattr(cutlass, dtype), x.data_ptr(), cute.AddressSpace.gmem, assumed_align=32), STREAM)
    assert decode(session.launches[0].args[:128]).dtype == name


# ---- through tvm-ffi


@pytest.fixture
def tvm_ffi():
    return pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")


def test_tvm_ffi_takes_what_was_compiled_for_tensors_of_the_cpu(tvm_ffi, xy):
    x, y = xy
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with capture() as session:
        given = [from_dlpack(each, enable_tvm_ffi=True) for each in xy]
        compiled = cute.compile(doubled, *given, stream, options="--enable-tvm-ffi")
        compiled(x, y)
    assert not session.findings and torch.equal(y, 2 * x)


def test_tensors_may_lie_anywhere_though_a_function_assumes_an_alignment(tvm_ffi):
    """Memory of CUDA is aligned to 512 bytes; torch's on a CPU to 64."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cutedsl.compile(
        doubled, fake(align=512), fake(align=512), stream, target="sm100", options="--enable-tvm-ffi"
    )
    kept = [torch.arange(256.0) for _ in range(100)]
    x, row, *_ = (each for each in kept if each.data_ptr() % 512)
    with capture() as session:
        compiled(x[128:160], row[128:160])
        compiled(x[128:160], row[128:160])
        with pytest.raises(ValueError, match="alignment=512"):                   # no memory of CUDA's either
            compiled(x[16:48], row[128:160])
    assert torch.equal(row[128:160], 2 * x[128:160]) and len(session.runs) == 2 and not session.findings
    assert torch.equal(row[:128], x[:128]) and torch.equal(row[160:], x[160:])   # the neighbours of a view


def test_copies_that_share_memory_still_do_and_give_back_what_was_written_alone():
    row, other = torch.arange(64.0), torch.arange(64.0)
    with aligned([row[8:16], row[8:].view(2, 28).T, other, 3]) as (first, second, untouched, number):
        first[0] = 100.0
        assert second[0, 0] == 100 and row[8] == 8 and number == 3 and (first.data_ptr() - 32) % 512 == 0
        other[0] = 7.0                                                           # by somebody else
        assert torch.equal(untouched, torch.arange(64.0))
    assert row[8] == 100 and other[0] == 7
