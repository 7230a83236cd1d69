"""CuPy: kernels of its RawModules, and of its ElementwiseKernels in the C++ that CuPy makes of them.

CuPy's own launches ask a CUDA runtime that is linked into its extensions. So CuPy writes the source, and
ptxkit.run compiles and launches it, with CuPy's headers and parameters as CuPy packs them.
"""

from __future__ import annotations

import functools
import struct

import numpy as np
import torch

import ptxkit

from .cases import agree, case, importable

ARRAY, INDEXER, SCALAR = 1, 2, 3             # CuPy's kinds of parameters
HEADER = "#include <cupy/complex.cuh>\n#include <cupy/carray.cuh>\n#include <cupy/atomics.cuh>\n#include <cupy/math_constants.h>\n"  # noqa: E501
ARCH = "sm_80"


def cupy_case(title):
    def add(function):
        @case("cupy", title, ARCH)
        def launched(folder):
            importable(folder, folder / "packages", ("cupyx.scipy.signal",))  # it would import cuBLAS
            include = folder / "packages" / "cupy" / "_core" / "include"
            flags = [f"-I{include}", f"-I{include / 'cupy' / '_cccl' / 'libcudacxx'}", "-std=c++17"]
            correct, run = function(functools.partial(ptxkit.run, arch=ARCH, options=flags))
            return correct, [run]

        return function

    return add


def elementwise(run, kernel, values, size, types=()):
    """Launch an ElementwiseKernel: tensors are contiguous arrays, other values (number, format of `struct`)."""
    import cupy
    from cupy._core import _carray, _kernel, _scalar

    infos, buffer, tensors = [], b"", []
    for value in [*values, size]:
        if isinstance(value, torch.Tensor):
            dtype = np.dtype(str(value.dtype).removeprefix("torch."))
            infos.append(_kernel._ArgInfo(ARRAY, cupy.ndarray, dtype, 1, True, True))
            packed = struct.pack("qqqq", value.data_ptr(), value.numel(), value.numel(), dtype.itemsize)
            tensors.append(value)
        elif value is size:
            infos.append(_kernel._ArgInfo(INDEXER, _carray.Indexer, None, 1, True, True))
            packed = struct.pack("qqq", size, size, 0)
        else:
            number, form = value
            infos.append(_kernel._ArgInfo(SCALAR, _scalar.CScalar, np.dtype(form), 0, True, True))
            packed = np.array(number, dtype=form).tobytes()
        align = 8 if len(packed) >= 8 else len(packed)
        buffer += bytes(-len(buffer) % align) + packed
    code = _kernel._get_elementwise_kernel_code(
        tuple(infos), _kernel._TypeMap(tuple(types)), kernel.params, kernel.operation, kernel.name, kernel.preamble,
        **kernel.kwargs,
    )
    return run(HEADER + code, kernel.name, grid=(size + 127) // 128, block=128, args=buffer, memory=tensors)


@cupy_case("RawModule of cupyx.scipy.signal: _cupy_upfirdn1D_float32")
def _(run):
    from cupyx.scipy.signal import _upfirdn

    x, taps, up, down = torch.randn(64), torch.randn(3, 4), 3, 2
    out = torch.zeros((64 * up + 3 * 4 - up) // down)
    launched = run(_upfirdn.UPFIRDN_KERNEL, "_cupy_upfirdn1D_float32", grid=2, block=128, args=[
        x, 1, taps.flip(1).contiguous(), up, down, 0, 64, 4, 64 + 3, out, out.numel(),
    ])
    spread = torch.zeros(64 * up)
    spread[::up] = x
    filtered = np.convolve(spread.double(), taps.t().reshape(-1).double())
    return agree((out, torch.from_numpy(filtered[::down][: out.numel()]))), launched


@cupy_case("ElementwiseKernel of cupy.kaiser: cupy_kaiser")
def _(run):
    from cupy._math import window

    out = torch.zeros(101, dtype=torch.float64)
    values = [(8.6, "float32"), (50.0, "float32"), out]
    launched = elementwise(run, window._kaiser_kernel, values, 101, [("T", np.float64)])
    return agree((out, torch.kaiser_window(101, periodic=False, beta=8.6, dtype=torch.float64))), launched


@cupy_case("ElementwiseKernel of cupy.bincount: cupy_bincount_kernel")
def _(run):
    from cupy._statistics import histogram

    x, bins = torch.randint(0, 10, (500,)), torch.zeros(10, dtype=torch.int64)
    types = [("S", np.int64), ("U", np.int64)]
    launched = elementwise(run, histogram._bincount_kernel, [x, bins], 500, types)
    return torch.equal(bins, x.bincount(minlength=10)), launched


@cupy_case("ElementwiseKernel of cupy.searchsorted: cupy_searchsorted_kernel")
def _(run):
    from cupy._sorting import search

    x, bins, out = torch.randn(300), torch.randn(40).sort().values, torch.zeros(300, dtype=torch.int64)
    values = [x, bins, (40, "int64"), (True, "bool"), (True, "bool"), out]
    types = [("S", np.float32), ("T", np.float32)]
    launched = elementwise(run, search._searchsorted_kernel, values, 300, types)
    return torch.equal(out, torch.searchsorted(bins, x, right=True)), launched


@cupy_case("ElementwiseKernel of cupy.tri: cupy_tri")
def _(run):
    from cupy._creation import matrix

    out = torch.zeros(12 * 20)
    values = [(20, "int32"), (2, "int32"), out]
    launched = elementwise(run, matrix._tri_kernel, values, 12 * 20, [("T", np.float32)])
    return torch.equal(out.view(12, 20), torch.ones(12, 20).tril(2)), launched
