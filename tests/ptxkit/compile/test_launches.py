"""What the driver gets for a launch: a stand-in for libcuda, built against NVIDIA's header, writes it down."""

import ctypes
import importlib.util
import pathlib
import shutil
import struct
import subprocess
import sys
import threading
import types
from ctypes import c_int, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptxkit.compile import driver, launch_list
from ptxkit.compile.code import Place
from ptxkit.compile.errors import BuildError
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.launch_list import LaunchList, Location
from ptxkit.compile.launching import redirect
from ptxkit.compile.listening import launched
from ptxkit.compile.target import parse
from ptxkit.compile.triton import TritonKernel

pytestmark = pytest.mark.compiler

HELPERS = pathlib.Path(__file__).parents[2] / "helpers"
KERNEL = 0x7FFF12345678
PTX = """
.version 8.0
.target sm_90a
.visible .entry many(.param .u64 a, .param .u32 b, .param .f32 c, .param .align 64 .b8 map[128], .param .u64 d) {}
.visible .entry none() {}
.visible .entry bound(.param .u64 a, .param .u64 b, .param .u32 c, .param .f32 d) {}
"""


class Launch(ctypes.Structure):
    _fields_ = (("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("attributes", c_uint),
                ("stream", c_void_p), ("function", c_void_p), ("attribute", (c_uint * 18) * 4),
                ("params", c_ubyte * 512), ("size", c_uint))


class Map(ctypes.Structure):
    _fields_ = (("numbers", c_int * 6), ("address", c_void_p), ("destination", c_void_p), ("dims", c_uint64 * 5),
                ("strides", c_uint64 * 5), ("box", c_uint32 * 5), ("steps", c_uint32 * 5))


class Libcuda:
    """The stand-in: its variables as attributes."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))

    def __getattr__(self, name):
        return c_int.in_dll(self.library, name).value

    def set(self, **values):
        for name, value in values.items():
            c_int.in_dll(self.library, name).value = value

    def expect(self, kernel):
        self.set(parameters=len(kernel.params))
        (c_uint * 64).in_dll(self.library, "sizes")[: len(kernel.params)] = [p.size for p in kernel.params]

    @property
    def launches(self):
        return list((Launch * 256).in_dll(self.library, "launches")[: self.launched])

    @property
    def settings(self):
        return [tuple(row) for row in ((c_int * 4) * 16).in_dll(self.library, "settings")[: self.settled]]

    @property
    def map(self):
        return Map.in_dll(self.library, "map")

    def text(self, name):
        return ctypes.string_at(ctypes.addressof(c_ubyte.in_dll(self.library, name)))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    triton, compiler = importlib.util.find_spec("triton"), shutil.which("gcc") or shutil.which("cc")
    if triton is None or compiler is None:
        pytest.skip("needs a C compiler, and the cuda.h that Triton brings along")
    include = pathlib.Path(triton.origin).parent / "backends" / "nvidia" / "include"
    path = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", f"-I{include}", HELPERS / "libcuda.c", "-o", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def libcuda(built, tmp_path, monkeypatch):
    stand_in = Libcuda(shutil.copy(built, tmp_path))  # a copy has variables of its own
    monkeypatch.setattr(ctypes, "CDLL", lambda name: stand_in.library)
    for name in ("_READY", "_HANDLES"):
        monkeypatch.setattr(driver, name, {})
    use_torch(monkeypatch, device=0)
    driver._cuda.cache_clear()
    yield stand_in
    driver._cuda.cache_clear()


def use_torch(monkeypatch, device):
    """Make torch say that it uses CUDA, with this device and a stream of its own there."""
    answers = {"_cuda_getDevice": lambda: device, "_cuda_getCurrentRawStream": lambda asked: 0x7F0000077000 + asked}
    monkeypatch.setattr(driver, "_torch", types.SimpleNamespace(**answers))


def kernel_of(name="many", target="sm90", cubin=None):
    ptx = PTX.replace("sm_90a", parse(target).spelling)
    return Kernel.of(name, ptx, cubin, parse(target))


ARGUMENTS = (0x7F00DEADBEE0, -5, 1.5, bytes(range(128)), None)
BYTES = struct.pack("<Qif128sQ", 0x7F00DEADBEE0, -5, 1.5, bytes(range(128)), 0)


def start(kernel, libcuda, *args, grid=(8, 2), block=128, **more):
    libcuda.expect(kernel)
    kernel.launch(grid, *(args or ARGUMENTS), block=block, **more)
    return libcuda.launches[-1]


# ---- what a launch hands over


def test_grid_block_stream_function_and_arguments_arrive(libcuda):
    launch = start(kernel_of(), libcuda, grid=(70000, 2, 3), block=(32, 4))
    assert (*launch.grid, *launch.block) == (70000, 2, 3, 32, 4, 1)
    assert (launch.shared, launch.attributes) == (0, 0)
    assert (launch.stream, launch.function) == (0x7F0000077000, KERNEL)
    assert bytes(launch.params[: launch.size]) == BYTES
    assert (libcuda.text("image"), libcuda.text("name")) == (PTX.encode()[:16], b"many")


def test_a_tensor_arrives_as_its_address(libcuda):
    x = torch.zeros(4)
    launch = start(kernel_of(), libcuda, x, 1, 2, bytes(128), x[1:])
    assert struct.unpack_from("<QifQQ", bytes(launch.params))[:3] == (x.data_ptr(), 1, 2.0)
    assert struct.unpack_from("<Q", bytes(launch.params), launch.size - 8) == (x.data_ptr() + 4,)


def test_attributes_arrive_as_the_header_lays_them_out(libcuda):
    launch = start(kernel_of(), libcuda, grid=8, cluster=(2, 4, 1), pdl=True, cooperative=True)
    assert launch.attributes == 3
    cluster, pdl, cooperative = ([words[0], *words[2:5]] for words in launch.attribute[:3])
    assert (cluster, pdl[:2], cooperative[:2]) == ([4, 2, 4, 1], [6, 1], [2, 1])


def test_the_next_launch_has_its_own_grid_arguments_and_stream_and_keeps_nothing(libcuda):
    kernel = kernel_of()
    start(kernel, libcuda, grid=(8, 2))
    second = start(kernel, libcuda, 1, 2, 3.0, bytes(128), 4, grid=5, stream=0x1234)
    assert [*second.grid] == [5, 1, 1] and second.stream == 0x1234
    assert bytes(second.params[: second.size]) == struct.pack("<Qif128sQ", 1, 2, 3.0, bytes(128), 4)
    assert start(kernel, libcuda, stream=0).stream is None and libcuda.loaded == 1


def test_a_kernel_without_parameters_is_launched(libcuda):
    kernel = kernel_of("none")
    libcuda.expect(kernel)
    kernel.launch(1, block=32)
    assert libcuda.launches[0].size == 0


def test_what_is_bound_is_called_with_tensors(libcuda, monkeypatch):
    kernel, x = kernel_of("bound"), torch.zeros(4)
    libcuda.expect(kernel)
    twice = [kernel.bound((8, n), -5, 1.5, block=128, dynamic_shared=1000) for n in (2, 3)]
    for device, tensors, start in ((0, (x, None), twice[0]), (0, (None, x), twice[1]), (1, (x, x), twice[0])):
        use_torch(monkeypatch, device)
        start(*tensors)
        launch = libcuda.launches[-1]
        assert (*launch.grid, *launch.block) == (*start.grid, 128, 1, 1) and launch.stream == 0x7F0000077000 + device
        addresses = [0 if t is None else x.data_ptr() for t in tensors]
        assert bytes(launch.params[: launch.size]) == struct.pack("<QQif", *addresses, -5, 1.5)
    assert len(driver._READY) == 2 and [setting[-1] for setting in libcuda.settings] == [0, 1]
    with pytest.raises(BuildError, match="needs 2 tensors; found 1"):
        twice[0](x)


def test_parts_of_a_memory_are_launched_by_their_addresses_and_hold_the_memory(libcuda, monkeypatch):
    kernel = kernel_of("bound")
    libcuda.expect(kernel)
    use_torch(monkeypatch, 0)
    start = kernel.bound(8, -5, 1.5, block=128)
    whole = torch.zeros(64, dtype=torch.uint8)
    early, late = Place(whole, whole.data_ptr(), 48), Place(whole, whole.data_ptr() + 48, 16)
    memory = StorageWeakRef(whole.untyped_storage())
    del whole
    start(early, late)
    launch = libcuda.launches[-1]
    expected = struct.pack("<QQif", early.address, early.address + 48, -5, 1.5)
    assert bytes(launch.params[: launch.size]) == expected
    assert [(part.tensor().data_ptr(), part.tensor().numel()) for part in (early, late)] == [
        (early.address, 48), (early.address + 48, 16)
    ]
    del early
    assert not memory.expired()
    del late
    assert memory.expired()
    with pytest.raises(AttributeError):
        start(1 << 40, None)                 # an address alone holds nothing


@pytest.fixture(params=["in C", "in Python"])
def listed(request, libcuda, monkeypatch):
    """Makes lists of launches, which C runs or Python."""
    if request.param == "in Python":
        monkeypatch.setattr(launch_list, "in_c", lambda: None)
    kernel = kernel_of("bound")
    libcuda.expect(kernel)

    def make(locations, slots):
        launches = [(kernel.bound((8, n), -5, 1.5, block=128, cluster=n, pdl=True), each) for n, each in locations]
        ready = LaunchList(launches, slots)
        ready([None] * slots)
        assert (ready._in_c[0] is None) == (request.param == "in Python")
        return ready

    return make


def test_a_list_launches_in_order_what_its_spans_say(listed, libcuda, monkeypatch):
    ready = listed([(2, (Location(0), Location(2, 16))), (3, (Location(2, 48, 16), None))], 3)
    x, memory = torch.zeros(4), Place(torch.zeros(64), 0x7000, 64)
    for device in (0, 1):
        use_torch(monkeypatch, device)
        ready([x, None, memory])
        first, second = libcuda.launches[-2:]
        for launch, grid, addresses in ((first, 2, (x.data_ptr(), 0x7010)), (second, 3, (0x7030, 0))):
            assert (*launch.grid, *launch.block) == (8, grid, 1, 128, 1, 1)
            assert launch.stream == 0x7F0000077000 + device
            assert bytes(launch.params[: launch.size]) == struct.pack("<QQif", *addresses, -5, 1.5)
            assert [[*words[:4]] for words in launch.attribute[:2]] == [[4, 0, grid, 1], [6, 0, 1, 0]]


def test_a_list_of_a_thread_without_a_context_goes_on_where_it_stopped(listed, libcuda):
    ready = listed([(2, (Location(0), None)), (3, (Location(0), None))], 1)
    before = libcuda.launched
    libcuda.set(answer=driver.NO_CONTEXT)
    thread = threading.Thread(target=ready, args=([torch.zeros(4)],))
    thread.start()
    thread.join()
    assert [launch.grid[1] for launch in libcuda.launches[before:]] == [2, 3] and libcuda.made_current == 1


def test_a_list_says_which_of_its_kernels_the_driver_refused(listed, libcuda):
    ready = listed([(2, (Location(0), None))], 1)
    libcuda.set(answer=719)
    with pytest.raises(BuildError, match="launching bound: the driver answered"):
        ready([torch.zeros(4)])


def test_a_listener_is_told_of_each_launch_that_the_driver_accepts(libcuda):
    kernel, heard = kernel_of("bound"), []
    libcuda.expect(kernel)
    with launched(heard):
        assert heard == []
        ready = LaunchList([(kernel.bound(8, -5, 1.5, block=128), (Location(0), None))] * 2, 1)
        ready([torch.zeros(4)])
        assert (0 in ready._in_c, heard) == (True, [kernel] * 2)
        kernel.launch(8, None, None, -5, 1.5, block=128)
    ready([torch.zeros(4)])                  # nobody listens any more
    assert heard == [kernel] * 3 and libcuda.launched == 5


def test_a_list_holds_each_tensor_that_it_gives_to_a_replacement_of_the_driver():
    class Sink:
        def launch(self, launch):
            found.append(launch)

    found, kernel, memory = [], kernel_of("bound"), torch.zeros(64)
    ready = LaunchList([(kernel.bound(8, -5, 1.5, block=128), (Location(0, 16, 32), None))], 1)
    with redirect(Sink()):
        ready([memory])
    (launch,) = found
    (part,) = launch.tensors.values()
    assert (part.address, part.size, part.memory is memory) == (memory.data_ptr() + 16, 32, True)
    assert launch.args == struct.pack("<QQif", memory.data_ptr() + 16, 0, -5, 1.5)


def test_a_list_too_large_for_c_is_run_in_python(libcuda):
    kernel = kernel_of("bound")
    libcuda.expect(kernel)
    ready = LaunchList([(kernel.bound(8, -5, 1.5, block=128), (Location(99), None))], 100)
    ready([None] * 99 + [torch.zeros(1)])
    assert ready._in_c == {0: None} and libcuda.launched == 1


def test_pretended_launches_call_no_driver():
    kernel = kernel_of("bound")
    ready = LaunchList([(kernel.bound(8, -5, 1.5, block=128), (Location(0), None))], 1)
    with driver.pretended():
        ready([torch.zeros(1)])
        kernel.launch(8, torch.zeros(1), None, -5, 1.5, block=128)
        with pytest.raises(AttributeError):
            ready([1 << 40])                 # an address alone holds nothing


def test_threads_that_launch_at_once_do_not_share_a_buffer(libcuda):
    kernel = kernel_of()
    start(kernel, libcuda)
    libcuda.set(delay=2000)  # the driver reads late
    every = [(i, (i + 1, i, i / 2, bytes([i]) * 128, i)) for i in range(1, 17)]
    threads = [
        threading.Thread(target=kernel.launch, args=(grid, *args), kwargs={"block": 32, "stream": grid})
        for grid, args in every
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {launch.grid[0]: (launch.stream, bytes(launch.params[: launch.size])) for launch in libcuda.launches[1:]}
    assert found == {grid: (grid, struct.pack("<Qif128sQ", *args)) for grid, args in every}


def test_arguments_that_do_not_fit_are_never_launched(libcuda):
    kernel = kernel_of()
    for position, wrong in ((1, 1 << 40), (1, 2.5), (3, bytes(127)), (3, bytes(129)), (3, 7), (0, "x")):
        args = [*ARGUMENTS]
        args[position] = wrong
        with pytest.raises(BuildError, match=f"argument {position} must fit"):
            start(kernel, libcuda, *args)
    with pytest.raises(BuildError, match="needs 5 arguments; found 4"):
        start(kernel, libcuda, *ARGUMENTS[:4])
    assert libcuda.launched == 0
    assert bytes(start(kernel, libcuda).params[:148]) == BYTES[:148]


def test_what_a_struct_refuses_and_the_kernel_takes_still_arrives(libcuda):
    unusual = (1 << 63, 0xFFFFFFFB, 1, memoryview(bytes(range(128))), (9).to_bytes(8, "little"))
    launch = start(kernel_of(), libcuda, *unusual)
    assert bytes(launch.params[: launch.size]) == struct.pack("<Qif128sQ", 1 << 63, -5, 1.0, bytes(range(128)), 9)


# ---- what the driver is told once


def test_memory_and_clusters_above_the_usual_are_allowed_once_on_each_device(libcuda, monkeypatch):
    kernel = kernel_of()
    for device in (0, 1):
        use_torch(monkeypatch, device)
        for shared, cluster in ((1000, 1), (500, 1), (1000, 1), (200_000, 16), (200_000, 16)):
            launch = start(kernel, libcuda, grid=16, dynamic_shared=shared, cluster=cluster)
            assert (launch.shared, launch.stream) == (shared, 0x7F0000077000 + device)
    memory, clusters = (1, 0), (0, 1)
    assert libcuda.settings == [
        (*what, value, device)
        for device in (0, 1)
        for what, value in ((memory, 1000), (memory, 200_000), (clusters, 1))
    ]


@pytest.mark.parametrize("target, cc, loaded", [("sm90", 90, "cubin"), ("sm80", 80, "cubin"), ("sm80", 86, "ptx")])
def test_the_cubin_is_loaded_where_it_was_built_for_and_the_ptx_elsewhere(libcuda, target, cc, loaded):
    image = {"cubin": b"\x7fELF", "ptx": PTX.encode()[:4]}[loaded]
    libcuda.set(cc=cc)
    start(kernel_of(target=target, cubin=b"\x7fELF" + bytes(100)), libcuda)
    assert libcuda.text("image")[:4] == image


def test_a_kernel_for_one_arch_alone_is_refused_elsewhere(libcuda):
    libcuda.set(cc=100)
    with pytest.raises(BuildError, match=r"many was built for sm_90a, which H100, .* alone run; this GPU is an sm_100"):
        start(kernel_of(), libcuda)


# ---- without torch, without a context, with errors


def test_without_torch_the_driver_says_which_device_is_current(libcuda, monkeypatch):
    monkeypatch.setattr(driver, "_torch", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    libcuda.set(device=3, answer=0)
    assert start(kernel_of(), libcuda, dynamic_shared=99).stream is None
    assert libcuda.settings == [(1, 0, 99, 3)] and driver._torch is None
    libcuda.set(answer=1)
    with pytest.raises(BuildError, match=r"current device: the driver answered CUDA_ERROR_INVALID_VALUE \(1\)"):
        start(kernel_of(), libcuda)


def test_torch_is_asked_as_soon_as_it_uses_cuda(libcuda, monkeypatch):
    answers = driver._torch
    monkeypatch.setattr(driver, "_torch", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "_C", answers)
    assert start(kernel_of(), libcuda).stream == 0x7F0000077000 and driver._torch is answers


def test_a_thread_that_never_used_cuda_gets_the_context_of_torch(libcuda):
    libcuda.set(answer=201)
    kernel = kernel_of()
    start(kernel, libcuda)
    start(kernel, libcuda)
    assert (libcuda.made_current, libcuda.launched) == (1, 2)


def test_an_error_of_the_driver_is_named_and_the_next_launch_is_as_good_as_ever(libcuda):
    kernel = kernel_of()
    for code, words in ((1, r"CUDA_ERROR_INVALID_VALUE \(1\)"), (209, r"\(209\)\. The kernel was built for another")):
        libcuda.set(answer=code)
        with pytest.raises(BuildError, match="launching many: the driver answered .*" + words):
            start(kernel, libcuda)
    libcuda.set(answer=0)
    assert bytes(start(kernel, libcuda).params[:148]) == BYTES[:148]


def test_an_old_driver_is_distinguished_from_a_missing_one(monkeypatch):
    monkeypatch.setattr(driver, "_torch", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for found, words in ((types.SimpleNamespace(), "has no cuCtxGetDevice: it is older"), (None, "found no libcuda")):
        driver._cuda.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", lambda name, found=found: found if found else raised(OSError(name)))
        with pytest.raises(BuildError, match=words):
            kernel_of().launch(1, *ARGUMENTS, block=32)


def raised(error):
    raise error


# ---- tensor maps


def test_a_tensor_map_is_requested_with_every_field_and_comes_back_whole(libcuda):
    found = driver.tensor_map(
        address=0x7F0000001000, dtype="bfloat16", dims=[1 << 33, 40, 3], strides=[256, 1 << 34], box=[64, 16, 1],
        swizzle=128, fill="nan",
    )
    asked = libcuda.map
    assert found == bytes(range(128)) and asked.destination % 64 == 0 and asked.address == 0x7F0000001000
    dtype, rank, interleave, swizzle, promotion, fill = asked.numbers
    assert (dtype, rank, interleave, swizzle, promotion, fill) == (9, 3, 0, 3, 2, 1)
    assert [*asked.dims] == [1 << 33, 40, 3, 0, 0] and [*asked.strides] == [256, 1 << 34, 0, 0, 0]
    assert [*asked.box] == [64, 16, 1, 0, 0] and [*asked.steps] == [1, 1, 1, 0, 0]
    driver.tensor_map(address=16, dtype="float32", dims=[8], strides=[], box=[4], element_strides=[2])
    assert [*libcuda.map.steps] == [2, 0, 0, 0, 0] and [*libcuda.map.numbers] == [7, 1, 0, 0, 2, 0]


def test_names_and_numbers_are_those_of_the_driver():
    cu = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    kinds = {name.lower(): int(x) for name, x in cu.CUtensorMapDataType.__members__.items()}
    assert set(driver.DTYPES.values()) <= set(kinds.values())
    for name, number in driver.DTYPES.items():
        assert kinds["cu_tensor_map_data_type_" + name.replace("tfloat", "tfloat")] == number
    function, launch = cu.CUfunction_attribute, cu.CUlaunchAttributeID
    assert driver.DYNAMIC_SHARED == function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.ANY_CLUSTER == function.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert driver.CLUSTER == launch.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert driver.PDL == launch.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert driver.COOPERATIVE == launch.CU_LAUNCH_ATTRIBUTE_COOPERATIVE


# ---- what it costs


def calls_made(function, *args):
    """Count the calls of functions, of Python or of C, that a call consists of."""
    events = []
    sys.setprofile(lambda frame, event, what: events.append(event) if event in ("call", "c_call") else None)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return len(events) - 1                                                   # that of setprofile


def test_a_repeated_launch_is_a_few_calls_of_python(libcuda):
    tensors, numbers = [torch.zeros(16) for _ in range(8)], [16, 32, 64, 1.5]
    params = ", ".join([*(f".param .u64 p{i}" for i in range(8)), *(f".param .u32 n{i}" for i in range(3))])
    ptx = f".target sm_90a\n.visible .entry f({params}, .param .f32 x, .param .u64 s, .param .u64 t) {{}}"
    kernel = TritonKernel.of(
        "f", ptx, None, parse("sm90"), signature=(*["*fp32"] * 8, *["i32"] * 3, "fp32"),
        names=tuple("abcdefghijkl"), divisible=tuple(range(11)),
    )
    first, second, third = (calls_made(kernel.launch, (4, 4), *tensors, *numbers) for _ in range(3))
    assert second == third <= 40 < first                                      # one for each tensor, and two dozen more
