"""Launches of compiled kernels, taken in the driver's place: what arrives is what the host code meant.

`ptxkit.launch` is replaced by a note of its arguments, except where a test says that the kernel really runs.
"""

import math
import struct
import subprocess
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
triton = pytest.importorskip("triton", reason="Triton is not installed")

import cutlass.cute as cute  # noqa: E402
import triton.language as tl  # noqa: E402
from cuda.bindings.driver import CUstream  # noqa: E402
from cutlass.cute.nvgpu import cpasync  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream  # noqa: E402
from cutlass.experimental.cuda import tensor_map as maps  # noqa: E402
from cutlass.memory import SmemAllocator  # noqa: E402

import ptxkit  # noqa: E402
from kda.model.host import detect  # noqa: E402
from ptxkit.capturing import CaptureError, capture, memory  # noqa: E402
from ptxkit.capturing.devices import ATTRIBUTES, runs  # noqa: E402
from ptxkit.chips import CHIPS  # noqa: E402
from ptxkit.compile import cutedsl, nvrtc  # noqa: E402
from ptxkit.compile.errors import BuildError, MissingCompilerError  # noqa: E402
from ptxkit.compile.store import Store  # noqa: E402
from ptxkit.compile.triton import flatten  # noqa: E402
from ptxkit.tensormap import TensorMap, decode  # noqa: E402

pytestmark = pytest.mark.simulated

STREAM = CUstream(0)


@cute.kernel
def scale(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32):
    row, column = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    y[row, column] = x[row, column] * a


@cute.jit
def scaled(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, stream):
    scale(x, y, a).launch(grid=(x.shape[0], 1, 1), block=(x.shape[1], 1, 1), stream=stream)


@cute.jit
def scaled_in_place_of_stream(x: cute.Tensor, y: cute.Tensor):
    scale(x, y, 2.0).launch(grid=(x.shape[0], 1, 1), block=(x.shape[1], 1, 1))


@cute.jit
def scaled_twice(x: cute.Tensor, y: cute.Tensor, stream):
    scale(x, y, 2.0).launch(grid=(x.shape[0], 1, 1), block=(x.shape[1], 1, 1), stream=stream)
    scale(y, x, 3.0).launch(grid=(x.shape[0], 1, 1), block=(x.shape[1], 1, 1), stream=stream)


@cute.kernel
def with_everything(atom: cute.CopyAtom, x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32):
    cpasync.prefetch_descriptor(atom)
    kept = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(1024), byte_alignment=128)
    thread = cute.arch.thread_idx()[0]
    kept[thread] = a
    y[0, thread] = kept[thread] * n


@cute.jit
def launch_with_everything(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32, stream):
    tile = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout((8, 64), stride=(64, 1)))
    atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, tile, (8, 64))
    with_everything(atom, tensor, y, a, n).launch(
        grid=(6, 2, 1), block=(32, 4, 1), cluster=(2, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def with_an_encoded_map(described: cutlass.GridConstant[maps.TensorMap], y: cute.Tensor):
    y[0, cute.arch.thread_idx()[0]] = cutlass.Float32(described.get_ptr().toint() & 255)


@cute.jit
def launch_with_an_encoded_map(x: cute.Tensor, y: cute.Tensor):
    described = maps.create_tensor_map_tiled_from_view(
        x, box_dims=(8, 64), stride_order=(1, 0), swizzle=maps.TensorMapSwizzle.s128b,
        oob_fill=maps.TensorMapFloatOOBFill.nan_request_zero_fma, l2_promotion=maps.TensorMapL2Promotion.l2_256b,
    )
    with_an_encoded_map(described, y).launch(grid=(1, 1, 1), block=(32, 1, 1))


@triton.jit
def axpy(x, y, n, a, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, a * tl.load(x + i, mask=i < n), mask=i < n)


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def through_a_map(source, y, M: tl.constexpr, N: tl.constexpr):
    tl.store(y + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], source.load([0, 0]))


AXPY = 'extern "C" __global__ void axpy(const float* x, float* y, int n, float a) { if (threadIdx.x < n) *y = a * *x; }'


def fake(width=32, dtype=cutlass.Float32):
    return make_fake_compact_tensor(dtype, (cute.sym_int(), width), stride_order=(1, 0), assumed_align=16)


def fake_of_rows():
    """Return a bf16 matrix whose rows are as long as a multiple of 64."""
    shape = (cute.sym_int(), cute.sym_int(divisibility=64))
    return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=(1, 0), assumed_align=16)


def scaled_for(target, **more):
    return cutedsl.compile(*of_scaled(), target=target, **more)


def of_scaled(**stream):
    """Return what the DSL compiles `scaled` from."""
    return scaled, fake(), fake(), cutlass.Float32(1), make_fake_stream(**stream)


@dataclass
class Note:
    """One call of the simulator."""

    ptx: str
    kernel: str
    fields: dict
    findings: tuple = ("a finding",)

    def __getattr__(self, name):
        return self.fields[name]


@pytest.fixture
def noted(monkeypatch):
    monkeypatch.setattr("ptxkit.launches.launch", lambda ptx, kernel, **fields: Note(ptx, kernel, fields))


def axpy_of_nvrtc(**more):
    try:
        return nvrtc.compile(AXPY, "axpy", **more)
    except MissingCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture
def xy():
    return torch.arange(160.0).view(5, 32), torch.zeros(5, 32)


def tensor_bytes(x):
    """Return a row-major matrix with a static width, as the DSL passes it: address and rows."""
    return struct.pack("<Qi", x.data_ptr(), x.shape[0])


def assert_scaled(run, x, y, a):
    """Compare the buffer of `scale`, less the padding behind each tensor, which may hold anything."""
    assert "scale" in run.kernel and run.kernel in run.ptx
    assert run.args[:12] == tensor_bytes(x) and run.args[16:28] == tensor_bytes(y)
    assert run.args[32:] == struct.pack("<f", a)
    assert (run.grid, run.block, run.cluster, run.dynamic_shared) == ((5, 1, 1), (32, 1, 1), (1, 1, 1), 0)


@pytest.mark.parametrize(("target", "arch"), [
    ("sm90", "sm_90a"), ("sm100", "sm_100a"), ("sm103", "sm_103a"), ("sm110", "sm_110a"),
])
def test_a_host_function_launches_into_the_capture(noted, xy, target, arch):
    compiled = scaled_for(target)                                            # before the block, and used inside it
    with capture(arch=arch) as session:
        compiled(*xy, 2.5, STREAM)
    (run,) = session.runs
    assert_scaled(run, *xy, 2.5)
    assert run.arch == session.arch == arch and f".target {arch}" in run.ptx
    assert session.findings == ["a finding"]
    x, y = xy
    spans = [(x.data_ptr(), 640, "x (float32 [5, 32])"), (y.data_ptr(), 640, "y (float32 [5, 32])")]
    assert [(*span[:2], str(span)) for span in run.memory] == sorted(spans)


def test_a_host_function_from_the_disk_launches_like_a_fresh_one(noted, xy, tmp_path):
    fresh, kept = (scaled_for("sm100", key="scaled", keep_in=Store(tmp_path)) for _ in range(2))
    assert kept.function.load_from_binary
    with capture() as session:
        fresh(*xy, 2.5, STREAM)
        kept(*xy, 2.5, STREAM)
    for run in session.runs:
        assert_scaled(run, *xy, 2.5)


def test_functions_of_the_dsl_itself_are_taken_however_they_are_called(noted, xy, tmp_path):
    options = f"--keep-ptx --dump-dir {tmp_path}"
    kept = cute.compile(*of_scaled(), options=options)
    with capture() as session:
        inside = cute.compile(*of_scaled())
        kept(*xy, 1.0, STREAM)
        inside(*xy, 2.0, STREAM)
        inside(*xy, a=3.0, stream=STREAM)
        inside.to(0)(*xy, 4.0, STREAM)
    for run, a in zip(session.runs, (1.0, 2.0, 3.0, 4.0), strict=True):
        assert_scaled(run, *xy, a)


def test_a_call_that_compiles_as_it_goes_is_taken_without_a_warning(noted, xy, recwarn):
    """The DSL would say that its cache is disabled, because the capture keeps PTX."""
    x, y = xy
    with capture() as session:
        scaled_in_place_of_stream(from_dlpack(x), from_dlpack(y))
    assert not recwarn.list
    (run,) = session.runs
    assert (run.grid, run.block) == ((5, 1, 1), (32, 1, 1))
    assert run.args[:16] == struct.pack("<QQ", x.data_ptr(), y.data_ptr())
    spans = {(address, size) for address, size, *_ in run.memory}            # addresses alone: any storage may be meant
    assert {(x.data_ptr(), 640), (y.data_ptr(), 640)} <= spans


def test_functions_that_are_called_through_tvm_ffi_are_taken(noted, xy, tmp_path):
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    arguments, option = of_scaled(use_tvm_ffi_env_stream=True), dict(options="--enable-tvm-ffi")
    kept = [cutedsl.compile(*arguments, target="sm100", **option, key="k", keep_in=Store(tmp_path)) for _ in range(2)]
    with capture() as session:
        for a, function in enumerate((*kept, cute.compile(*arguments, **option))):
            function(*xy, a + 0.5)
            function(*xy, a + 0.5)
        with pytest.raises(TypeError, match="Expects 3 parameters"):
            function(*xy)
    for i, run in enumerate(session.runs):
        assert_scaled(run, *xy, i // 2 + 0.5)
    assert len(session.runs) == 6


def test_launches_of_one_call_come_in_order(noted, xy):
    x, y = xy
    compiled = cutedsl.compile(scaled_twice, fake(), fake(), make_fake_stream(), target="sm100")
    with capture() as session:
        compiled(x, y, STREAM)
    assert [struct.unpack_from("<Q", run.args)[0] for run in session.runs] == [x.data_ptr(), y.data_ptr()]


def test_attributes_and_tensor_maps_arrive(noted):
    numbers = cutlass.Float32(1), cutlass.Int32(1)
    compiled = cutedsl.compile(
        launch_with_everything, fake_of_rows(), fake(), *numbers, make_fake_stream(), target="sm90"
    )
    x, y = torch.zeros(40, 128, dtype=torch.bfloat16), torch.zeros(3, 32)
    with capture(arch="sm_90a", schedule=7, strict=True) as session:
        compiled(x, y, 1.5, -7, STREAM)
    (run,), (launch,) = session.runs, session.launches
    assert (run.grid, run.block, run.cluster, run.dynamic_shared) == ((6, 2, 1), (32, 4, 1), (2, 1, 1), 4096)
    assert (launch.pdl, launch.cooperative) == (True, False)
    assert (run.schedule, run.strict) == (7, True)                           # options of the simulator
    seen = decode(run.args[:128])
    assert seen == TensorMap(x, box=(64, 8), swizzle=128, l2=2)
    assert (seen.address, seen.dims, seen.strides, seen.dtype) == (x.data_ptr(), (128, 40), (256,), "bfloat16")
    params = [(p.offset, p.size) for p in launch.kernel.params]
    assert params == [(0, 128), (128, 8), (136, 16), (152, 4), (156, 4)]
    assert run.args[128:136] == struct.pack("<ii", 40, 128)
    assert run.args[136:148] == tensor_bytes(y) and run.args[152:] == struct.pack("<fi", 1.5, -7)


def test_a_map_that_the_driver_would_encode_is_encoded_here(noted):
    compiled = cutedsl.compile(launch_with_an_encoded_map, fake_of_rows(), fake(), target="sm100")
    x, y = torch.zeros(40, 128, dtype=torch.bfloat16), torch.zeros(1, 32)
    with capture() as session:
        compiled(x, y)
    assert decode(session.runs[0].args[:128]) == TensorMap(x, box=(64, 8), swizzle=128, fill="nan", l2=3)


class Broken(Exception):
    pass


def test_an_exception_of_the_simulator_comes_out_as_it_went_in(monkeypatch, xy):
    def fail(*arguments, **more):
        raise Broken("in the middle")

    monkeypatch.setattr("ptxkit.launches.launch", fail)
    compiled = cutedsl.compile(scaled_twice, fake(), fake(), make_fake_stream(), target="sm100")
    with capture() as session:
        for _ in range(2):                                                   # and leaves nothing behind
            with pytest.raises(Broken, match="in the middle") as caught:
                compiled(*xy, STREAM)
            assert caught.traceback[-1].name == "fail"
        with pytest.raises(Broken):
            axpy[(1,)](*xy, 100, 2.0, BLOCK=128)
        assert session.runs == [] and len(session.launches) == 3             # the second launch of a call is not tried


def test_a_function_without_ptx_says_how_to_keep_it(noted, xy):
    with capture() as session:
        cute.compile(*of_scaled())(*xy, 1.0, STREAM)
    outside = cute.compile(*of_scaled())                                       # no longer kept
    with capture(), pytest.raises(CaptureError, match="--keep-ptx"):
        outside(*xy, 1.0, STREAM)
    assert len(session.runs) == 1


def test_an_executor_from_before_the_block_is_refused(noted, xy):
    from cutlass.base_dsl.jit_executor import JitExecutor

    compiled = scaled_for("sm100").function
    module = type("Module", (), {"capi_func": compiled.capi_func, "execution_args": compiled.execution_args})()
    executor = JitExecutor(module, None, False)
    with capture(), pytest.raises(CaptureError, match="before the capture began"):
        executor(*xy, 1.0, STREAM)


def test_a_kernel_for_another_arch_is_refused(noted, xy):
    with capture(arch="sm_100a"), pytest.raises(CaptureError, match=r"sm_90a; .* stands in for sm_100a"):
        scaled_for("sm90")(*xy, 1.0, STREAM)


def test_everything_is_put_back_at_the_end(noted, xy):
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Function

    def state():
        dsl = CuTeDSL._get_dsl().envar
        return (dict(vars(Function)), dsl.arch, dsl.keep_ptx, dsl.dump_dir, triton.runtime.driver._active)

    before = state()
    with pytest.raises(Broken), capture(arch="sm_90a"):
        assert state() != before
        raise Broken
    assert state() == before


@pytest.mark.parametrize(("options", "error", "says"), [
    (dict(scheduel=1), TypeError, "no option 'scheduel'.* schedule"),
    (dict(schedule="x"), ValueError, "seed"),
    (dict(clock="h9000"), ValueError, "is not a chip"),
    (dict(clock="b200"), ValueError, "is a chip of sm_100"),
    (dict(timeline=True), ValueError, "without a clock"),
])
def test_wrong_options_are_refused_before_anything_is_launched(options, error, says):
    with pytest.raises(error, match=says), capture(arch="sm_90a", **options):
        pass


def test_captures_nest(noted, xy):
    with capture(arch="sm_90a") as outer:
        with capture(arch="sm_100a") as inner:
            scaled_for("sm100")(*xy, 1.0, STREAM)
        scaled_for("sm90")(*xy, 2.0, STREAM)
        axpy[(1,)](*xy, 100, 2.0, BLOCK=128)
    assert [run.arch for run in inner.runs] == ["sm_100a"] and [run.arch for run in outer.runs] == ["sm_90a"] * 2


def test_another_thread_is_not_captured(noted):
    kernel = axpy_of_nvrtc()
    x, outcome = torch.zeros(4), []

    def elsewhere():
        try:
            kernel.launch(1, x, x, 4, 2.0, block=32)
        except Exception as error:
            outcome.append(error)

    with capture(arch="sm_90a") as session:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        kernel.launch(1, x, x, 4, 2.0, block=32)
    assert len(session.runs) == 1 and len(outcome) == 1


class Address:
    """What Triton takes for a tensor: it has an address, a type, and the device of its tensor."""

    def __init__(self, x, offset):
        self.x, self.offset, self.dtype, self.device = x, offset, x.dtype, x.device

    def data_ptr(self):
        return self.x.data_ptr() + self.offset * self.dtype.itemsize


@pytest.mark.parametrize("offset", [0, 96])
def test_an_object_with_an_address_may_stand_for_a_tensor(xy, offset):
    x, y = xy
    with capture(arch="sm_90a", raises=False) as session:
        source = Address(x, offset)
        axpy[(1,)](source, y, 64, 2.0, BLOCK=64, num_warps=2)
        axpy[(3,)](source, y, 160, 2.0, BLOCK=64, num_warps=2)
    assert source.device.type == "cuda" and not session.runs[0].findings
    assert torch.equal(y.flatten()[:64], 2 * x.flatten()[offset : offset + 64])
    assert [f.kind for f in session.runs[1].findings] == ["out-of-bounds"] * (offset > 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_plain_triton_launches_are_taken(noted, xy, arch):
    x, y = xy
    with capture(arch=arch, sms=3) as session:
        axpy[(2, 3)](x, y, 100, 2.5, BLOCK=64, num_warps=2)
        axpy[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, y, 100, 2.5, BLOCK=64, num_warps=2)
        assert triton.runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"] == 3
        assert detect().sms == 3
    first, second = session.runs
    assert (first.grid, first.block, second.grid) == ((2, 3, 1), (64, 1, 1), (2, 1, 1))
    assert first.args == struct.pack("<QQifQQ", x.data_ptr(), y.data_ptr(), 100, 2.5, 0, 0)
    assert f".target {arch}" in first.ptx and first.kernel == "axpy"
    assert sorted(span.name for span in first.memory) == ["x", "y"]


def test_an_autotuned_kernel_uses_its_first_configuration(noted, xy):
    with capture(arch="sm_90a") as session:
        tuned[lambda meta: (triton.cdiv(160, meta["BLOCK"]),)](*xy, 160)
    assert [run.grid for run in session.runs] == [(3, 1, 1)]


def test_an_autotuner_with_times_of_its_own_measures_nothing_either(noted, xy):
    configurations = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})]
    with pytest.warns(DeprecationWarning, match="warmup"):
        timed = triton.autotune(configurations, key=["n"], warmup=5, rep=10)(tuned.fn)
    with capture(arch="sm_90a") as session:
        timed[lambda meta: (triton.cdiv(160, meta["BLOCK"]),)](*xy, 160)
    assert [run.grid for run in session.runs] == [(3, 1, 1)]


def test_a_benchmark_calls_once_and_tells_the_predicted_time(xy):
    from triton import testing

    before = testing.do_bench
    for clock in (False, True):
        with capture(arch="sm_90a", clock=clock) as session:
            took = testing.do_bench(lambda: axpy[(3,)](*xy, 160, 2.0, BLOCK=64), quantiles=[0.5, 0.2, 0.8])
        assert len(session.runs) == 1 and len(took) == 3
        assert took == [session.milliseconds] * 3 if clock else all(map(math.isnan, took))
    assert testing.do_bench is before


def test_a_triton_descriptor_arrives_as_a_tensor_map(noted):
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, y = torch.zeros(40, 128, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    with capture(arch="sm_90a") as session:
        through_a_map[(1,)](TensorDescriptor.from_tensor(x, [16, 64], padding="nan"), y, M=16, N=64)
    assert decode(session.runs[0].args[:128]) == TensorMap(x, box=(64, 16), swizzle=128, fill="nan")


def lowered(**more):
    """Return what Triton's compiler says of a descriptor."""
    return {"swizzle": 3, "elem_size": 1, "elem_type": 0, "block_size": [8, 128], "fp4_padded": False} | more


def described(x, **more):
    return SimpleNamespace(base=x, shape=x.shape, strides=x.stride(), padding="zero", **more)


def test_a_padded_descriptor_of_gluon_counts_halves_of_bytes():
    x = torch.zeros(16, 256, dtype=torch.uint8)
    descriptor = described(x)
    with capture(arch="sm_100a"):
        found, *sizes = flatten(["tensordesc<u8>"], [descriptor], iter([lowered(elem_type=14, fp4_padded=True)]))
    wanted = TensorMap(x.data_ptr(), (512, 16), (256,), (128, 8), dtype="16u4_align16b", swizzle=128)
    assert decode(found) == wanted and sizes == [16, 256, 256, 1]


def test_a_descriptor_of_gluon_in_im2col_mode_has_corners_from_the_inside_out():
    x = torch.zeros(2, 7, 9, 64, dtype=torch.float16)
    corners = dict(pixel_box_lower_corner=[-1, -2], pixel_box_upper_corner=[3, 4])
    image = described(x, element_strides=[1, 2, 3, 1], **corners)
    meta = lowered(elem_size=2, elem_type=6, block_size=[16, 64], is_im2col=True)
    with capture(arch="sm_90a"):
        found, *_ = flatten(["tensordesc_im2col<fp16>"], [image], iter([meta]))
    wanted = {"pixels": 16, "lower": (-2, -1), "upper": (4, 3), "element_strides": (1, 3, 2, 1)}
    assert decode(found) == TensorMap(x, box=(64,), swizzle=128, **wanted)
    with pytest.raises(BuildError, match="launches no descriptor in im2col mode on a GPU; a capture runs it"):
        flatten(["tensordesc_im2col<fp16>"], [image], iter([meta]))


def test_an_element_type_that_no_map_has_is_refused_by_its_number():
    descriptor = described(torch.zeros(16, 256, dtype=torch.uint8))
    with pytest.raises(BuildError, match=r"element type 15 cannot be launched. Use one of 0 \(uint8\)"):
        flatten(["tensordesc<u8>"], [descriptor], iter([lowered(elem_type=15)]))


def test_a_kernel_of_triton_has_the_registers_that_ptxas_gives_it(noted, xy, tmp_path):
    """Tutorials of Triton divide by them."""
    with capture(arch="sm_90a"):
        kernel = axpy[(3,)](*xy, 160, 2.0, BLOCK=64)
        tiny = axpy.warmup(*xy, 160, 2.0, BLOCK=64, grid=(1,))
        assert triton.runtime.driver.active.utils.load_binary("axpy", b"no cubin", 0, 0)[2:4] == (32, 0)
        tiny._init_handles()
    (tmp_path / "k.ptx").write_text(kernel.asm["ptx"])
    ptxas = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", tmp_path / "k.ptx", "-o", tmp_path / "k.cubin"]
    says = subprocess.run(ptxas, capture_output=True, text=True, check=True).stderr
    assert f"Used {kernel.n_regs} registers" in says and kernel.n_regs > 0
    assert (kernel.n_spills, tiny.n_regs) == (0, kernel.n_regs)


def test_kernels_of_nvrtc_are_taken_on_every_later_arch(noted):
    kernel = axpy_of_nvrtc(target="sm89")
    x, y = torch.zeros(4), torch.zeros(4)
    for arch in ("sm_89", "sm_90a", "sm_120a"):
        with capture(arch=arch) as session:
            kernel.launch((1, 2), x, y, 4, 2.0, block=64, cluster=(1, 2), dynamic_shared=128)
        (run,) = session.runs
        assert run.args == struct.pack("<QQif", x.data_ptr(), y.data_ptr(), 4, 2.0)
        assert (run.grid, run.block, run.cluster, run.dynamic_shared) == ((1, 2, 1), (64, 1, 1), (1, 2, 1), 128)
    with capture(arch="sm_80"), pytest.raises(CaptureError, match=r"sm_89; .* for sm_80"):
        kernel.launch(1, x, y, 4, 2.0, block=64)


def test_which_code_runs_where():
    ptx = "\n.version 9.0\n.target {}\n"
    table = {
        "sm_80": ["sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"],
        "sm_90": ["sm90", "sm100", "sm103", "sm110", "sm120", "sm121"],
        "sm_90a": ["sm90"],
        "sm_100f": ["sm100", "sm103"],
        "sm_103a": ["sm103"],
        "sm_110a": ["sm110"],
        "sm_120a": ["sm120"],
        "sm_120f": ["sm120", "sm121"],
    }
    for target, devices in table.items():
        assert [c.target.name for c in CHIPS.values() if runs(ptx.format(target + ", debug"), c.target)] == devices
    assert not runs("no PTX", CHIPS[90].target)


def test_a_device_answers_what_an_h200_answered():
    asked = {1: 1024, 8: 49152, 10: 32, 12: 65536, 16: 132, 38: 62914560, 39: 2048, 75: 9, 76: 0, 97: 232448}
    assert {attribute: ATTRIBUTES[attribute](CHIPS[90]) for attribute in asked} == asked


def test_memory_is_what_tensors_cover():
    x = torch.zeros(6, 8)
    found = memory.regions({"x": x[1:, :4], "empty": x[:0], "again": x[1:, :4]})
    (only,) = found
    assert only[:3] == (x.data_ptr() + 32, 4 * (4 * 8 + 4), "x") and str(only) == "x (float32 [5, 4])"


def test_tensors_are_found_inside_of_arguments():
    @dataclass
    class Inputs:
        q: torch.Tensor
        sizes: tuple

    x, y, z = (torch.zeros(1) for _ in range(3))
    found = memory.tensors_among({"inputs": Inputs(x, (y, 3)), "more": {"z": z}, "n": 2, "stream": STREAM})
    assert list(found) == ["inputs.q", "inputs.sizes[0]", "more['z']"]
    assert [id(t) for t in found.values()] == [id(x), id(y), id(z)]
    for pointer in (y.data_ptr(), 632459456):                                # what malloc gave once
        assert memory.tensors_among({"x": x, "pointer": pointer}) is None
    assert memory.tensors_among({"x": x, "thing": object()}) is None


def test_numbers_too_large_for_an_address_are_not_followed(monkeypatch):
    poisoned, table = torch.full((4,), torch.iinfo(torch.int64).max), torch.tensor([torch.ones(3).data_ptr()])
    monkeypatch.setattr(memory, "_storages", lambda: pytest.fail("looked for storages"))
    assert set(memory.with_pointees({"x": poisoned})) == {"x"}
    with pytest.raises(pytest.fail.Exception, match="looked for storages"):
        memory.with_pointees({"table": table})


def test_every_living_storage_is_found_once():
    x = torch.zeros(100)
    views = [x[10:], x.view(10, 10)]
    found = [t for t in memory.live().values() if t.data_ptr() == x.data_ptr()]
    assert [t.numel() for t in found] == [400] and len(views) == 2


def test_living_memory_has_the_names_of_variables_and_of_the_largest_tensor():
    whole, two = torch.zeros(100), torch.zeros(2, 50)
    part, (first, second) = whole[10:20], two.unbind()
    del two
    padded = torch.zeros(200, dtype=torch.uint8)[8:88].view(torch.float32)
    extents = {id(x): (x.data_ptr(), x.nbytes) for x in (whole, part, first, second, padded)}
    regions = memory.with_tensors(memory.live())
    ours = [r for r in regions if r.layout and (r.address, r.size) in extents.values()]
    named = {region.name: region for region in ours}
    assert set(named) == {"whole", "first", "second", "padded"}
    assert named["padded"].layout.shape == (20,) and named["padded"].layout.dtype == "float32"
    around = [r for r in regions if not r.layout and r.address + 8 == padded.data_ptr()]
    assert [r.size for r in around] == [200] and around[0].name.startswith("storage")


@cute.kernel
def copied_by_all(x: cute.Tensor, y: cute.Tensor):
    t = cute.arch.thread_idx()[0]
    y[t] = x[t] + cutlass.Float32(cute.arch.block_idx()[0])


@cute.jit
def copied_twice(x: cute.Tensor, y: cute.Tensor):
    copied_by_all(x, y).launch(grid=(2, 1, 1), block=(32, 1, 1))


def test_a_finding_names_the_tensor_behind_a_dlpack_capsule_as_the_program_does():
    source, result = torch.arange(32.0), torch.zeros(32)
    with capture("sm_90a") as session:
        copied_twice(from_dlpack(source), from_dlpack(result))
    assert "writes result[0] (float32 [32]), which" in session.findings[0].says


def test_a_tensor_of_a_trace_which_has_no_memory_is_no_living_storage():
    traced = torch._to_functional_tensor(torch.zeros(100))
    with pytest.raises(RuntimeError, match="invalid python storage"):
        traced.untyped_storage().data_ptr()
    assert all(t.untyped_storage().data_ptr() for t in memory.live().values())


def test_a_captured_kernel_really_runs(xy):
    x, y = xy
    with ptxkit.capture(arch="sm_100a") as session:
        scaled_for("sm100")(x, y, 2.5, STREAM)
        axpy[(1,)](x, y[:1], 4, 3.0, BLOCK=32)
    assert torch.equal(y[1:], 2.5 * x[1:]) and torch.equal(y[0, :4], 3.0 * x[0, :4])
    assert session.findings == [] and len(session.runs) == 2
