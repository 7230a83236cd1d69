"""Tensor copies of elements of 4 and 6 bits: packed in global memory, in shared memory packed or 16 to 16 bytes."""

import numpy as np
import pytest
import torch
from assembly import kinds
from transfers import load, loading, store, swizzled

from ptxkit.launches import launch
from ptxkit.tensormap import TensorMap, TensorMapError, decode

pytestmark = pytest.mark.simulated

SM100 = "sm_100a"


def packed(rows, columns, bits, seed=0):
    """Return (codes [rows][columns], the bytes that hold them)."""
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(seed))
    ones = (codes[..., None] >> torch.arange(bits) & 1).reshape(rows, -1, 8)
    data = torch.zeros(rows * columns * bits // 8 + 64, dtype=torch.uint8)
    offset = -data.data_ptr() % 32  # padded types want 32 bytes
    x = data[offset : offset + rows * columns * bits // 8].view(rows, -1)
    x.copy_((ones << torch.arange(8)).sum(-1))
    return codes, x


def a_map(x, dtype, box, columns=512, **options):
    sizes = dict(dims=(columns, x.shape[0]), strides=(x.stride(0),), box=box)
    m = TensorMap(x.data_ptr(), **sizes, dtype=dtype, **options)
    object.__setattr__(m, "spans", lambda: [x])
    return m


def expected(codes, start, box, bits, held, pitch, swizzle, filler=0xFF):
    """Return shared memory: runs of 16 elements, packed, each in 2 * held bytes."""
    image = np.full(box[1] * pitch, filler, dtype=np.uint8)
    for r in range(box[1]):
        for group in range(0, box[0], 16):
            row, column = start[1] + r, start[0] + group
            inside = 0 <= row < codes.shape[0]
            present = [e for e in range(16) if inside and 0 <= column + e < codes.shape[1]]
            word = sum(int(codes[row, column + e]) << bits * e for e in present)
            for n, byte in enumerate(word.to_bytes(2 * bits, "little")):
                image[swizzled(swizzle, r * pitch + group // 16 * 2 * held + n)] = byte
    return image


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("start", [(0, 0), (64, 3), (-32, 5), (448, -2)], ids=str)
def test_packed_elements_arrive_packed(swizzle, start):
    codes, x = packed(8, 512, 4)
    box = ({0: 96, 32: 64, 64: 128, 128: 256}[swizzle], 4)
    m = a_map(x, "16u4_align8b", box, swizzle=swizzle)
    assert m.box_bytes == box[0] * box[1] // 2
    found, run = load(x, m, start, target=SM100)
    assert not run.findings
    np.testing.assert_array_equal(found, expected(codes, start, box, 4, 4, m.pitch, swizzle))


@pytest.mark.parametrize("bits, dtype", [(4, "16u4_align16b"), (6, "16u6_align16b")])
@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize("start", [(0, 0), (128, 5), (384, -1)], ids=str)
def test_padded_elements_get_16_bytes_for_16(bits, dtype, swizzle, start):
    codes, x = packed(8, 512, bits)
    m = a_map(x, dtype, (128, 4), swizzle=swizzle)
    assert (m.box_bytes, m.pitch) == (64 * bits, 128)
    found, run = load(x, m, start, target=SM100)
    assert not run.findings
    np.testing.assert_array_equal(found, expected(codes, start, (128, 4), bits, 8, 128, swizzle))


def test_the_mbarrier_does_not_count_the_padding():
    _, x = packed(8, 512, 4)
    m = a_map(x, "16u4_align16b", (128, 4))
    assert "deadlock" in kinds(load(x, m, (0, 0), target=SM100, count=512)[1])
    assert not load(x, m, (0, 0), target=SM100, count=256)[1].findings


def test_packed_elements_are_stored_where_they_were_loaded_from():
    codes, x = packed(8, 512, 4)
    m = a_map(x, "16u4_align8b", (128, 4))
    source = torch.arange(256, dtype=torch.uint8)
    wanted = x.clone()
    wanted[2:6, 32:96] = source.view(4, 64)
    assert not store(x, m, (64, 2), source, target=SM100).findings
    assert torch.equal(x, wanted) and codes.shape == (8, 512)


@pytest.mark.parametrize("dtype, start, target, says", [
    ("16u4_align8b", (16, 0), SM100, "coordinate 16 of dimension 0 is 8 bytes from the tensor's start"),
    ("16u4_align16b", (64, 0), SM100, "not a multiple of 16, or of 128 elements"),
    ("16u4_align8b", (0, 0), "sm_90a", "type b4x16 needs sm_100"),
], ids=["packed, within a unit", "padded, within a unit", "before Blackwell"])
def test_a_load_that_cannot_be_is_found(dtype, start, target, says):
    _, x = packed(8, 512, 4)
    assert says in load(x, a_map(x, dtype, (128, 4)), start, target=target)[1].findings[0].says


def test_a_store_of_padded_elements_is_refused_by_name():
    _, x = packed(8, 512, 4)
    run = store(x, a_map(x, "16u4_align16b", (128, 4)), (0, 0), torch.zeros(512, dtype=torch.uint8), target=SM100)
    assert "b4x16_p64 is for loads; its stores are not simulated" in run.findings[0].says


def test_a_padded_map_of_another_box_is_refused():
    _, x = packed(8, 512, 4)
    with pytest.raises(TensorMapError, match=r"a box of padded elements has 128 of them.*\[map.packed\]"):
        a_map(x, "16u4_align16b", (64, 4))
    m = a_map(x, "16u4_align8b", (64, 4))
    changed = int.from_bytes(m.encode(), "little") & ~(15 << 71) | 12 << 71
    args = [changed.to_bytes(128, "little"), torch.zeros(4096, dtype=torch.uint8)]
    run = launch(loading(m, (0, 0), 4096, target=SM100), grid=1, block=128, args=args, memory=[x])
    assert "b4x16_p64 takes boxes of 128 elements" in run.findings[0].says


def test_packed_maps_survive_both_directions():
    _, x = packed(8, 512, 6)
    for dtype, box in (("16u4_align8b", (64, 4)), ("16u4_align16b", (128, 4)), ("16u6_align16b", (128, 4))):
        m = a_map(x, dtype, box)
        assert decode(m.encode()) == m
