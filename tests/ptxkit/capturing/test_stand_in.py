"""What host code asks of a GPU inside a capture: torch, torch.cuda, custom operators, graphs, cuda-python."""

import array
import ctypes
import threading

import pytest
import torch
import torch.utils.checkpoint
from torch import empty as empty_by_name

from ptxkit.capturing import CaptureError, capture
from ptxkit.tensormap import TensorMap, decode

pytestmark = pytest.mark.simulated

PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .f32 a)
{
    .reg .b32 %r<3>; .reg .f32 %f<3>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [x];
    ld.param.f32 %f2, [a];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f1, [%rd3];
    mul.f32 %f1, %f1, %f2;
    st.global.f32 [%rd3], %f1;
    ret;
}
"""


@pytest.fixture
def driver():
    return pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")


@pytest.fixture
def runtime():
    return pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed")


@pytest.fixture
def session():
    with capture(arch="sm_90a") as session:
        yield session


def scale(driver, x, a, stream=0):
    """Multiply 32 numbers in place, as a program that uses the driver does."""
    _, module = driver.cuModuleLoadData(PTX.encode() + b"\0")
    _, function = driver.cuModuleGetFunction(module, b"scale")
    address = x.data_ptr() if isinstance(x, torch.Tensor) else int(x)
    given = (address, a), (ctypes.c_uint64, ctypes.c_float)
    return driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, given, 0)


# ---- where tensors lie


def test_a_tensor_lies_where_the_program_put_it(session):
    on_gpu = torch.zeros(3, device="cuda")
    plain = torch.zeros(3)
    on_host = on_gpu.cpu()
    assert on_gpu.is_cuda and not on_gpu.is_cpu
    assert on_gpu.device == torch.device("cuda", 0) and on_gpu.get_device() == 0
    assert on_host.is_cpu and on_host.device.type == "cpu" and not on_host.is_cuda
    assert plain.is_cuda and plain.to("cuda").is_cuda                        # nothing was said: it is the GPU's
    assert torch.empty(3, device="cpu").is_cpu and torch.empty(3, device=0).is_cuda
    assert torch.ones(3, device=on_host.device).is_cpu and torch.ones(3, device=on_gpu.device).is_cuda
    assert (on_gpu + 1).is_cuda and (on_host + 1).is_cpu and (on_host.view(3, 1) + on_gpu).is_cuda
    assert all(part.is_cpu for part in on_host.split(1)) and on_gpu.new_zeros(2).is_cuda
    assert on_host.to(0).is_cuda and on_host.to(device=0).is_cuda and on_gpu.to(device="cpu").is_cpu
    assert on_host.to(on_gpu).is_cuda and on_gpu.to(on_host).is_cpu and on_gpu.type() == "torch.cuda.FloatTensor"


def test_functions_that_were_imported_by_name_are_seen(session):
    assert empty_by_name(3, device="cuda").is_cuda


def test_a_move_between_the_two_copies_and_a_move_to_where_it_lies_does_not(session):
    x = torch.zeros(4)
    on_gpu = x.cuda()
    back = on_gpu.cpu()
    assert on_gpu.cuda() is not x and on_gpu.cuda().data_ptr() == on_gpu.data_ptr()
    on_gpu += 1
    back += 5
    assert x.tolist() == [0] * 4 and on_gpu.tolist() == [1] * 4 and back.tolist() == [5] * 4
    assert back.cpu().data_ptr() == back.data_ptr() and on_gpu.to("cuda", copy=True).data_ptr() != on_gpu.data_ptr()
    assert on_gpu.to("cuda", torch.float16, True).dtype == torch.float16
    assert on_gpu.to("cpu", non_blocking=True).is_cpu and on_gpu.half().is_cuda


@pytest.mark.parametrize("make", [
    lambda: torch.empty(100, device="cuda"), lambda: torch.randn(7, 3, device="cuda"),
    lambda: torch.ones(5).cuda(), lambda: torch.tensor([1, 2], device="cuda"),
    lambda: torch.nn.Linear(3, 5, device="cuda").weight, lambda: torch.nn.Linear(3, 5).cuda().weight,
    lambda: torch.arange(6).to("cuda", torch.int32),
])
def test_memory_is_aligned_as_the_caching_allocator_aligns_it(session, make):
    kept = [make() for _ in range(5)]
    assert all(x.data_ptr() % 512 == 0 and x.storage_offset() == 0 for x in kept)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in kept)


def test_devices_that_are_set_for_a_block_or_for_all_hold(session):
    with torch.device("cuda"):
        assert torch.ones(2).data_ptr() % 512 == 0
    torch.set_default_device("cuda")
    assert torch.ones(2).is_cuda and torch.get_default_device().type == "cuda"
    torch.set_default_device("cpu")
    assert torch.ones(2).is_cpu


def test_gradients_lie_with_their_tensors_and_code_that_autograd_calls_sees_the_gpu(session):
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, d):
            seen.append((d.is_cuda, torch.empty(1, device="cuda").is_cuda, torch.cuda.is_available()))
            return 2 * d

    model = torch.nn.Linear(3, 1).cuda()
    x = torch.ones(2, 3, device="cuda", requires_grad=True)
    model(Twice.apply(x)).sum().backward()
    assert seen == [(True, True, True)]
    assert x.grad.is_cuda and model.weight.grad.is_cuda and torch.allclose(x.grad, 2 * model.weight.detach())


def test_seeds_and_generators_of_the_gpu_work(session):
    def drawn():
        return torch.randn(3, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda").tolist()

    torch.cuda.manual_seed(5)
    first = torch.randn(3, device="cuda").tolist()
    torch.cuda.manual_seed_all(5)
    assert torch.randn(3, device="cuda").tolist() == first and drawn() == drawn()
    assert isinstance(torch.default_generator, torch.Generator) and not isinstance(3, torch.Generator)


def test_dlpack_says_the_gpu_and_leads_back(session):
    x = torch.arange(4.0, device="cuda")
    assert x.__dlpack_device__() == (2, 0)
    assert torch.from_dlpack(x).data_ptr() == x.data_ptr()

    class Wrapped:
        def __dlpack_device__(self):
            return x.__dlpack_device__()

        def __dlpack__(self, **options):
            return x.__dlpack__()

    assert torch.from_dlpack(Wrapped()).tolist() == x.tolist()


# ---- operators


@pytest.fixture
def operators():
    library = torch.library.Library("kda_stand_in", "FRAGMENT")
    yield library
    library._destroy()


def test_an_operator_for_cuda_alone_runs_its_kernel_inside_and_not_after(operators):
    seen = []

    def kernel(x):
        seen.append((x.is_cuda, torch.cuda.is_available()))
        return x + 1

    operators.define("plus_one(Tensor x) -> Tensor")
    operators.impl("plus_one", kernel, "CUDA")
    with capture():
        x = torch.zeros(2, device="cuda")
        assert torch.ops.kda_stand_in.plus_one(x).tolist() == [1, 1]
        assert torch.ops.kda_stand_in.plus_one.default(x).tolist() == [1, 1]
    assert seen == [(True, True)] * 2
    with pytest.raises(NotImplementedError):
        torch.ops.kda_stand_in.plus_one(torch.zeros(2))


def test_of_two_kernels_that_for_cuda_runs_inside(operators):
    operators.define("which(Tensor x) -> int")
    operators.impl("which", lambda x: 1, "CPU")
    operators.impl("which", lambda x: 2, "CUDA")
    with capture():
        assert torch.ops.kda_stand_in.which(torch.zeros(1)) == 2
    assert torch.ops.kda_stand_in.which(torch.zeros(1)) == 1


def test_a_custom_operator_keeps_its_gradient(operators):
    @torch.library.custom_op("kda_stand_in::double", mutates_args=(), device_types="cuda")
    def double(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return 2 * x

    double.register_autograd(lambda ctx, d: 2 * d)
    with capture():
        x = torch.ones(3, device="cuda", requires_grad=True)
        (found,) = torch.autograd.grad(double(x).sum(), x)
        assert found.tolist() == [2, 2, 2]


# ---- torch.cuda


def test_torch_cuda_tells_of_the_chip(session):
    properties = torch.cuda.get_device_properties("cuda:0")
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.get_device_name() == "NVIDIA H200"
    assert properties.multi_processor_count == 132 and properties.shared_memory_per_block_optin == 227 << 10
    assert torch.version.cuda and torch.backends.cuda.is_built()
    assert torch.cuda.get_device_capability(("nvidia", 132)) == (9, 0)       # no device: torch takes the current one
    x = torch.zeros(1)
    for beyond in (lambda: torch.cuda.set_device(1), lambda: torch.zeros(1, device="cuda:1"), lambda: x.to(1)):
        with torch.cuda.device(0), pytest.raises(RuntimeError, match="one GPU, cuda:0"):
            beyond()


def test_a_capture_on_fewer_multiprocessors_tells_of_them():
    with capture(arch="sm_100a", sms=4):
        assert torch.cuda.get_device_properties(0).multi_processor_count == 4
        assert torch.cuda.get_device_capability() == (10, 0)


def test_streams_and_events_are_there(session):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
    stream.wait_stream(torch.cuda.current_stream())
    event = stream.record_event()
    torch.cuda.current_stream().wait_event(event)
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda").record_stream(stream)
    assert event.query() and stream.query() and not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon])
def test_an_optimizer_steps_on_the_gpu_as_on_the_cpu(session, kind):
    def stepped(device):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 12, device=device).view(3, 4))
        optimizer = kind([weight], lr=0.1)
        for _ in range(2):
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().cpu()

    assert torch.equal(stepped("cuda"), stepped("cpu")) and not torch.cuda.current_stream().is_capturing()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_computes_again_sees_the_gpu(session, reentrant):
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4, device="cuda"), torch.nn.LayerNorm(4, device="cuda"))
    x, seen = torch.ones(2, 4, device="cuda", requires_grad=True), []

    def part(x):
        seen.append(x.is_cuda)
        return layer(x)

    again, = torch.autograd.grad(part(x).square().sum(), x)
    torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, again) and seen == [True] * 3


@pytest.mark.parametrize(("location", "is_cuda"), [
    ("cuda", True), (torch.device("cuda", 0), True), ("cpu", False), ({"cpu": "cuda:0"}, True),
], ids=["cuda", "a device", "cpu", "a dict"])
def test_a_file_of_tensors_is_loaded_to_where_the_program_says(session, tmp_path, location, is_cuda):
    layer = torch.nn.Linear(3, 2, device="cuda")
    torch.save({"model": layer.state_dict(), "step": 5}, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", map_location=location)
    assert found["step"] == 5 and torch.equal(found["model"]["weight"], layer.weight)
    assert {x.is_cuda for x in found["model"].values()} == {is_cuda}


def test_memory_in_use_grows_with_tensors(session):
    before = torch.cuda.memory_allocated()
    x = torch.zeros(1 << 20, device="cuda")
    free, total = torch.cuda.mem_get_info()
    assert torch.cuda.memory_allocated() - before >= x.nbytes and 0 < free < total
    del x
    assert torch.cuda.max_memory_allocated() >= before + (4 << 20)


def test_time_between_events_is_that_of_the_clock_and_unknown_without_one(driver):
    def timed(**options):
        with capture(arch="sm_90a", **options) as session:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            x = torch.ones(32, device="cuda")
            first.record()
            scale(driver, x, 2.0)
            last.record()
            return first.elapsed_time(last), session

    found, session = timed(clock=True)
    assert found == session.milliseconds > 0
    assert timed()[0] != timed()[0]                                          # nan
    with capture(), pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())


def test_a_graph_runs_nothing_until_its_replay_and_then_what_it_captured(session, driver):
    x, y = torch.ones(32, device="cuda"), torch.zeros(32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing() and torch.cuda.current_stream().is_capturing()
        scale(driver, x, 3.0)
        y.add_(x)
        out = y * 2
        noise = [torch.rand(9, device="cuda") for _ in range(4)]             # aligned, and moved to be
    drawn = [x.clone() for x in noise]
    assert not session.runs and x[0] == 1
    y.zero_()
    for n, expected in enumerate([(3, 3, 6), (9, 12, 24)], 1):
        graph.replay()
        assert (x[5].item(), y[5].item(), out[5].item()) == expected and len(session.runs) == n
        assert not any(map(torch.equal, drawn, noise))
    with pytest.raises(RuntimeError, match="already"), torch.cuda.graph(graph):
        torch.cuda.CUDAGraph().capture_begin()


def test_all_is_as_before_after_the_block_and_for_other_threads():
    def state():
        return (torch.cuda.is_available, torch.cuda.Stream, torch.cuda.Event, torch.Generator, torch.from_dlpack,
                torch.version.cuda, hasattr(torch._C, "_cuda_getDevice"), torch.cuda.memory.memory_allocated)

    before, outside = state(), []
    available, x = torch.cuda.is_available(), torch.zeros(2)

    def elsewhere():
        outside.append((torch.cuda.is_available(), x.is_cuda, torch.get_default_device().type))

    with pytest.raises(ZeroDivisionError), capture():
        assert torch.cuda.is_available() and x.is_cuda
        torch.set_default_device("cuda")
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        1 / 0                                                                # noqa: B018
    assert outside == [(available, False, "cpu")]
    assert state() == before and not x.is_cuda and torch.ones(1).device.type == "cpu"


def test_captures_inside_of_captures_each_have_their_own_gpu():
    with capture(arch="sm_80"):
        x = torch.zeros(2, device="cuda")
        with capture(arch="sm_100a"):
            assert torch.cuda.get_device_capability() == (10, 0) and x.is_cuda and x.cpu().is_cpu
            inner = torch.zeros(2, device="cuda")
        assert torch.cuda.get_device_capability() == (8, 0) and inner.is_cuda and x.cpu().is_cpu


# ---- cuda-python


def test_a_kernel_that_the_driver_loads_as_ptx_runs(session, driver):
    success = (driver.CUresult.CUDA_SUCCESS,)
    assert driver.cuInit(0) == success
    _, address = driver.cuMemAlloc(4 * 32)
    host = array.array("f", range(32))
    assert driver.cuMemcpyHtoD(address, host, 4 * 32) == success
    assert scale(driver, address, 3.0) == success and not session.findings
    driver.cuMemcpyDtoH(host, address, 4 * 32)
    assert host.tolist() == [3.0 * n for n in range(32)]
    assert driver.cuMemFree(address) == success
    with pytest.raises(CaptureError, match="not allocated"):
        driver.cuMemFree(address)


def test_tensor_maps_of_both_modes_are_encoded(session, driver):
    u16, none = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16, driver.CUtensorMapInterleave(0)
    x = torch.zeros(2, 7, 9, 16, dtype=torch.uint16)
    more = none, driver.CUtensorMapSwizzle(1), driver.CUtensorMapL2promotion(0), driver.CUtensorMapFloatOOBfill(0)
    dims, strides = x.shape[::-1], [2 * n for n in x.stride()[2::-1]]
    dims, strides = map(driver.cuuint64_t, dims), map(driver.cuuint64_t, strides)
    dims, strides, ones, box = [*dims], [*strides], [driver.cuuint32_t(1)] * 4, [*map(driver.cuuint32_t, (8, 4, 2, 1))]
    done, tile = driver.cuTensorMapEncodeTiled(u16, 4, x.data_ptr(), dims, strides, box, ones, *more)
    assert done == 0 and decode(image_of(tile)) == TensorMap(x, box=(8, 4, 2, 1), swizzle=32)
    common = u16, 4, x.data_ptr(), dims, strides
    done, image = driver.cuTensorMapEncodeIm2col(*common, [-1, 0], [2, -3], 8, 40, ones, *more)
    assert done == 0
    assert decode(image_of(image)) == TensorMap(x, box=(8,), swizzle=32, pixels=40, lower=(-1, 0), upper=(2, -3))


def image_of(tensor_map):
    return ctypes.string_at(int(tensor_map.getPtr()), 128)


def test_parameters_may_be_an_array_of_pointers(session, driver):
    x = torch.arange(32.0, device="cuda")
    values = ctypes.c_uint64(x.data_ptr()), ctypes.c_float(0.5)
    pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
    _, library = driver.cuLibraryLoadData(PTX.encode(), None, None, 0, None, None, 0)
    _, kernel = driver.cuLibraryGetKernel(library, b"scale")
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX = 32
    driver.cuLaunchKernelEx(config, driver.cuKernelGetFunction(kernel)[1], ctypes.addressof(pointers), 0)
    assert torch.equal(x, torch.arange(32.0) / 2)


def test_both_apis_tell_of_the_chip(session, driver, runtime):
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    assert driver.cuDeviceGetAttribute(which, driver.cuDeviceGet(0)[1])[1] == 132
    assert driver.cuDeviceGetName(100, 0)[1] == b"NVIDIA H200"
    assert int(driver.cuCtxGetCurrent()[1]) and int(driver.cuStreamCreate(0)[1]) != int(driver.cuStreamCreate(0)[1])
    properties = runtime.cudaGetDeviceProperties(0)[1]
    assert (properties.major, properties.minor, properties.multiProcessorCount) == (9, 0, 132)
    assert runtime.cudaGetDeviceCount() == (runtime.cudaError_t.cudaSuccess, 1)
    _, function = driver.cuModuleGetFunction(driver.cuModuleLoadData(PTX.encode())[1], b"scale")
    assert driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 1024, 0)[1] == 2


def test_a_graph_of_the_runtime_is_replayed(session, driver, runtime):
    x = torch.ones(32, device="cuda")
    runtime.cudaStreamBeginCapture(0, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
    scale(driver, x, 2.0)
    _, graph = runtime.cudaStreamEndCapture(0)
    _, ready = runtime.cudaGraphInstantiate(graph, 0)
    assert x[0] == 1 and runtime.cudaGraphGetNodes(graph)[2] == 1
    runtime.cudaGraphLaunch(ready, 0)
    assert x[0] == 2


def test_what_cannot_run_or_is_not_replaced_is_refused_by_name(session, driver):
    with pytest.raises(CaptureError, match="cuStreamBeginCaptureToGraph, which a capture does not replace"):
        driver.cuStreamBeginCaptureToGraph(0, 0, None, None, 0, None)
    with pytest.raises(CaptureError, match=r"no kernel 'nothing'; it has scale"):
        driver.cuModuleGetFunction(driver.cuModuleLoadData(PTX.encode())[1], b"nothing")
    _, function = driver.cuModuleGetFunction(driver.cuModuleLoadData(b"\x7fELF code")[1], b"f")
    with pytest.raises(CaptureError, match="f was loaded as machine code; a capture runs PTX"):
        driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, ((), ()), 0)
    with pytest.raises(CaptureError, match="is no function of this capture"):
        driver.cuLaunchKernel(driver.CUfunction(3), 1, 1, 1, 32, 1, 1, 0, 0, ((), ()), 0)
