"""Triton functions to kernels without a GPU, and launches to the bytes that a kernel reads."""

import struct

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
from triton import jit

from ptxkit.compile import launching
from ptxkit.compile import triton as door
from ptxkit.compile.errors import BuildError, MissingCompilerError

pytestmark = pytest.mark.compiler


@jit
def axpy(x, y, n, a, b, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, a * tl.load(x + i, mask=i < n) + b, mask=i < n)


@jit
def of_a_pair(pair, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(pair[0] + i) * pair[1])


@jit
def through_a_map(source, y, M: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + offsets, source.load([0, 0]))


@jit
def through_a_map_of_its_own(x, y, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [M, N])
    offsets = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + offsets, source.load([0, 0]))


class Notebook:
    """Takes launches and writes them down."""

    def __init__(self):
        self.launches, self.maps = [], []

    def launch(self, launch):
        self.launches.append(launch)
        return "noted"

    def tensor_map(self, **fields):
        self.maps.append(fields)
        return bytes(range(128))


@pytest.fixture
def notebook():
    notes = Notebook()
    with launching.redirect(notes):
        yield notes


TYPES = {"x": "*fp32", "y": "*bf16", "n": "i64", "a": "fp32", "b": "bf16"}


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100"])
def test_a_kernel_is_built_for_any_arch_without_a_gpu(target):
    kernel = door.compile(axpy, TYPES, {"BLOCK": 128}, target=target, num_warps=2)
    assert f".target {kernel.target.spelling}" in kernel.ptx and kernel.cubin[:4] == b"\x7fELF"
    assert kernel.name == "axpy" and kernel.num_warps == 2
    assert kernel.registers > 0 and kernel.spills == 0 and kernel.shared == 0
    assert [p.size for p in kernel.params] == [8, 8, 8, 4, 2, 8, 8]  # and two pointers that Triton adds


def test_the_cubin_and_the_ptx_agree_on_every_parameter():
    from ptxkit.compile.elf import resources

    kernel = door.compile(axpy, TYPES, {"BLOCK": 128}, target="sm90")
    assert resources(kernel.cubin)["axpy"].params == tuple((p.offset, p.size) for p in kernel.params)


def test_a_launch_is_the_bytes_that_the_kernel_reads(notebook):
    kernel = door.compile(axpy, TYPES, {"BLOCK": 128}, target="sm90", num_warps=4)
    x, y = torch.zeros(1000), torch.zeros(1000, dtype=torch.bfloat16)
    assert kernel.launch((8, 2), x, y, 1000, 1.5, -2.0) == "noted"
    (launch,) = notebook.launches
    assert (launch.grid, launch.block, launch.cluster) == ((8, 2, 1), (128, 1, 1), (1, 1, 1))
    assert launch.args == struct.pack("<QQqf2s2xQQ", x.data_ptr(), y.data_ptr(), 1000, 1.5, b"\x00\xc0", 0, 0)
    assert launch.tensors == {"x": x, "y": y}


def test_tuples_are_spread_out(notebook):
    kernel = door.compile(of_a_pair, {"pair": ("*fp32", "i32"), "y": "*fp32"}, {"BLOCK": 64}, target="sm80")
    x, y = torch.zeros(64), torch.zeros(64)
    kernel.launch(1, (x, -3), y)
    assert notebook.launches[0].args == struct.pack("<Qi4xQQQ", x.data_ptr(), -3, y.data_ptr(), 0, 0)
    assert notebook.launches[0].tensors == {"pair[0]": x, "y": y}
    with pytest.raises(BuildError, match=r"tuple of 2 arguments .* was given 3"):
        kernel.launch(1, (x, 1, 2), y)


def test_a_tensor_descriptor_becomes_a_tensor_map_with_its_sizes(notebook):
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel = door.compile(
        through_a_map, {"source": "tensordesc<bf16[16, 64]>", "y": "*bf16"}, {"M": 16, "N": 64}, target="sm90"
    )
    x, y = torch.zeros(40, 128, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    kernel.launch(1, TensorDescriptor.from_tensor(x, [16, 64]), y)
    (fields,), (launch,) = notebook.maps, notebook.launches
    assert fields == dict(
        address=x.data_ptr(), dtype="bfloat16", dims=[128, 40], strides=[256], box=[64, 16], swizzle=128, fill="zero"
    )
    assert launch.args[:128] == bytes(range(128))
    assert struct.unpack_from("<iiqqQ", launch.args, 128) == (40, 128, 128, 1, y.data_ptr())
    assert launch.tensors == {"source": x, "y": y}


def test_a_tensor_descriptor_is_taken_apart_where_there_is_no_copy_engine(notebook):
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel = door.compile(
        through_a_map, {"source": "tensordesc<bf16[16, 64]>", "y": "*bf16"}, {"M": 16, "N": 64}, target="sm80"
    )
    x, y = torch.zeros(40, 128, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    kernel.launch(1, TensorDescriptor.from_tensor(x, [16, 64]), y)
    assert struct.unpack_from("<Qqqqq", notebook.launches[0].args) == (x.data_ptr(), 40, 128, 128, 1)


def test_a_kernel_that_makes_maps_itself_gets_aligned_scratch_for_every_program(notebook):
    kernel = door.compile(through_a_map_of_its_own, {"x": "*bf16", "y": "*bf16"}, {"M": 16, "N": 64}, target="sm90")
    x, y = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    kernel.launch((2, 3), x, y)
    (launch,) = notebook.launches
    scratch = launch.tensors["global scratch"]
    assert scratch.numel() == 6 * kernel.scratch > 0 and scratch.data_ptr() % kernel.scratch_align == 0
    assert struct.unpack_from("<QQQQ", launch.args) == (x.data_ptr(), y.data_ptr(), scratch.data_ptr(), 0)


def test_a_promise_of_alignment_is_held(notebook):
    kernel = door.compile(axpy, TYPES, {"BLOCK": 128}, target="sm80", divisible=["x", "n"])
    x, y = torch.zeros(100), torch.zeros(100, dtype=torch.bfloat16)
    kernel.launch(1, x, y, 64, 1.0, 0.0)
    with pytest.raises(BuildError, match=r"built for a x that is a multiple of 16"):
        kernel.launch(1, x[1:], y, 64, 1.0, 0.0)
    with pytest.raises(BuildError, match=r"built for a n that is a multiple of 16; found 0x63"):
        kernel.launch(1, x, y, 99, 1.0, 0.0)
    assert len(notebook.launches) == 1


def test_an_argument_too_few_or_of_the_wrong_kind_is_named(notebook):
    kernel = door.compile(axpy, TYPES, {"BLOCK": 128}, target="sm80")
    x = torch.zeros(100)
    with pytest.raises(BuildError, match=r"needs 5 arguments \(x, y, n, a, b\); found 4"):
        kernel.launch(1, x, x, 64, 1.0)
    with pytest.raises(BuildError, match=r"argument 2 must fit a parameter of 8 bytes \(\.u64\); found float 2\.5"):
        kernel.launch(1, x, x, 2.5, 1.0, 0.0)
    with pytest.raises(BuildError, match="grid"):
        kernel.launch((0, 1), x, x, 2, 1.0, 0.0)


def test_types_and_constants_must_name_every_argument():
    with pytest.raises(BuildError, match="no type for b, BLOCK"):
        door.compile(axpy, {n: TYPES[n] for n in "xyna"}, target="sm80")
    with pytest.raises(BuildError, match="has no argument z; it has x, y"):
        door.compile(axpy, TYPES | {"z": "i32"}, {"BLOCK": 128}, target="sm80")


def test_what_triton_cannot_build_says_so():
    with pytest.raises(BuildError, match="cannot build axpy for sm_90a"):
        door.compile(axpy, TYPES, {"BLOCK": 100}, target="sm90")  # a range is a power of two


def test_without_triton_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    with pytest.raises(MissingCompilerError, match="pip install triton"):
        door.compile(axpy, TYPES, {"BLOCK": 128}, target="sm90")


def test_without_a_gpu_a_launch_names_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    kernel = door.compile(axpy, TYPES, {"BLOCK": 128}, target="sm80")
    x = torch.zeros(100)
    with pytest.raises((BuildError, MissingCompilerError), match=r"libcuda|cuda-python|There is no GPU"):
        kernel.launch(1, x, x, 64, 1.0, 0.0)
