"""Tensor maps against those that a driver made, and every limit with a map that breaks it."""

import struct

import pytest
import torch

from ptxkit.tensormap import BOX, CHECKS, DTYPES, FIELDS, SIZE, SWIZZLES, TensorMap, TensorMapError, decode, encode

A = 0x7F0000000000
TWO = dict(address=A, dims=(1024, 512), strides=(2048,), box=(64, 32), dtype="float16")
FIVE = dict(dims=(1024, 300, 77, 19, 5), strides=(2048, 614400, 49152000, 983040000), box=(64, 33, 7, 5, 3))
TYPED = dict(strides=(8192,), box=(16, 32))
# What cuTensorMapEncodeTiled of driver 580 wrote on an H200 for TWO with these changes, as sixteen words of 32 bits in
# hexadecimal, less the words that only the driver reads.
MADE_BY_A_DRIVER = {
    "two dimensions": (dict(), "0 7f00 310 80 0 0 0 0 3ff 1ff 0 0 0 3f000000 1f 0"),
    "uint8": (TYPED | dict(dtype="uint8"), "0 7f00 10 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "uint16": (TYPED | dict(dtype="uint16"), "0 7f00 90 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "uint32": (TYPED | dict(dtype="uint32"), "0 7f00 110 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "int32": (TYPED | dict(dtype="int32"), "0 7f00 190 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "uint64": (TYPED | dict(dtype="uint64"), "0 7f00 210 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "int64": (TYPED | dict(dtype="int64"), "0 7f00 290 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "float32": (TYPED | dict(dtype="float32"), "0 7f00 390 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "float64": (TYPED | dict(dtype="float64"), "0 7f00 490 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "bfloat16": (TYPED | dict(dtype="bfloat16"), "0 7f00 510 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "float32_ftz, NaN outside":
        (TYPED | dict(dtype="float32_ftz", fill="nan"), "0 7f00 8410 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "tfloat32": (TYPED | dict(dtype="tfloat32"), "0 7f00 10390 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "tfloat32_ftz, NaN outside":
        (TYPED | dict(dtype="tfloat32_ftz", fill="nan"), "0 7f00 18410 200 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "one dimension": (dict(dims=(1024,), strides=(), box=(64,)), "0 7f00 300 0 0 0 0 0 3ff 0 0 0 0 3f000000 0 0"),
    "three dimensions": (
        dict(dims=(1024, 300, 77), strides=(2048, 614400), box=(64, 33, 7)),
        "0 7f00 320 80 9600 0 0 0 3ff 12b 4c 0 0 3f000000 620 0",
    ),
    "four dimensions": (
        dict(dims=(1024, 300, 77, 19), strides=(2048, 614400, 49152000), box=(64, 33, 7, 5)),
        "0 7f00 330 80 9600 2ee000 0 0 3ff 12b 4c 12 0 3f000000 40620 0",
    ),
    "every eighth row": (
        dict(**FIVE, element_strides=(1, 8, 1, 1, 1)),
        "0 7f00 340 80 9600 2ee000 3a98000 0 3ff 12b 4c 12 4 3f000038 2040620 0",
    ),
    "every eighth of the last dimension": (
        dict(**FIVE, element_strides=(1, 1, 1, 1, 8)),
        "0 7f00 340 80 9600 2ee000 3a98000 0 3ff 12b 4c 12 4 3f007000 2040620 0",
    ),
    "interleaved by 16 bytes": (
        dict(dims=(64, 30, 8), strides=(128, 3840), box=(8, 4, 2), swizzle=32, interleave=16),
        "0 7f00 2b20 8 f0 0 0 0 3f 1d 7 0 0 7000000 103 0",
    ),
    "interleaved by 32 bytes": (
        dict(dims=(64, 30, 8), strides=(128, 3840), box=(16, 4, 2), swizzle=128, interleave=32),
        "0 7f00 7320 8 f0 0 0 0 3f 1d 7 0 0 f000000 103 0",
    ),
    "swizzle of 32 bytes": (dict(box=(16, 32), swizzle=32), "0 7f00 2310 80 0 0 0 0 3ff 1ff 0 0 0 f000000 1f 0"),
    "swizzle of 64 bytes": (dict(box=(32, 32), swizzle=64), "0 7f00 4310 80 0 0 0 0 3ff 1ff 0 0 0 1f000000 1f 0"),
    "swizzle of 128 bytes and NaN outside":
        (dict(dims=(1024, 64), swizzle=128, fill="nan", l2=3), "0 7f00 6e310 80 0 0 0 0 3ff 3f 0 0 0 3f000000 1f 0"),
    "the widest tensor": (dict(dims=(4294967296, 512)), "0 7f00 310 80 0 0 0 0 ffffffff 1ff 0 0 0 3f000000 1f 0"),
    "the highest tensor": (dict(dims=(1024, 4294967296)), "0 7f00 310 80 0 0 0 0 3ff ffffffff 0 0 0 3f000000 1f 0"),
    "rows on top of each other": (dict(strides=(0,)), "0 7f00 310 0 0 0 0 0 3ff 1ff 0 0 0 3f000000 1f 0"),
    "rows as far apart as can be":
        (dict(strides=(1099511627760,)), "0 7f00 310 ffffffff 0 0 0 f 3ff 1ff 0 0 0 3f000000 1f 0"),
    "the highest box": (dict(box=(64, 256)), "0 7f00 310 80 0 0 0 0 3ff 1ff 0 0 0 3f000000 ff 0"),
    "the widest box": (dict(box=(256, 32)), "0 7f00 310 80 0 0 0 0 3ff 1ff 0 0 0 ff000000 1f 0"),
    "promotion in L2": (dict(l2=1), "0 7f00 20310 80 0 0 0 0 3ff 1ff 0 0 0 3f000000 1f 0"),
    "an address that is just aligned": (dict(address=A + 16), "10 7f00 310 80 0 0 0 0 3ff 1ff 0 0 0 3f000000 1f 0"),
}


@pytest.mark.parametrize(("fields", "words"), MADE_BY_A_DRIVER.values(), ids=MADE_BY_A_DRIVER)
def test_bits_are_those_of_a_driver(fields, words):
    raw = struct.pack("<16I", *(int(word, 16) for word in words.split()))
    m = TensorMap(**TWO | fields)
    assert encode(m)[:64] == raw and encode(m)[64:] == bytes(SIZE - 64)
    assert decode(raw) == m


def a_map(**changes):
    return dict(address=A, dims=(64, 32), strides=(128,), box=(16, 8), dtype="float16") | changes


def test_no_two_fields_share_a_bit():
    used = [bit for field in FIELDS for bit in range(field.shift, field.shift + field.bits)]
    assert len(used) == len(set(used)) and max(used) < 512


def test_every_field_survives_both_directions():
    for dtype in DTYPES:
        for swizzle in SWIZZLES:
            for fill in ("zero", "nan") if DTYPES[dtype].floats else ("zero",):
                box = (16 // DTYPES[dtype].size if DTYPES[dtype].size else 128, 8)
                if DTYPES[dtype].held and swizzle not in (0, 128):
                    continue
                m = TensorMap(
                    **a_map(dtype=dtype, swizzle=swizzle, fill=fill, box=box, dims=(256, 32), strides=(512,), l2=3)
                )
                assert decode(encode(m)) == m
    far = TensorMap(**a_map(dims=(2**32, 1, 7, 9, 2**32), box=(8, 256, 1, 2, 3), element_strides=(1, 8, 2, 3, 4),
                            strides=(2**40 - 16, 0, 2**39, 16)))
    assert decode(encode(far)) == far


def test_garbage_behind_the_first_64_bytes_does_not_matter():
    m = TensorMap(**a_map())
    assert decode(encode(m)[:64] + b"\xee" * 64) == m


def test_the_bits_that_only_the_dsl_sets_are_ignored():
    raw = bytearray(encode(**a_map()))
    raw[8] |= 1 << 1
    raw[10] |= 1 << 5
    assert decode(raw) == TensorMap(**a_map())


IMAGES = dict(dims=(64, 8, 8, 4), strides=(128, 1024, 8192), box=(16,), pixels=32, lower=(0, 0), upper=(0, 0))
BROKEN = {
    "map.rank": dict(dims=(8,) * 6, strides=(16,) * 5, box=(8,) * 6),
    "map.dtype": dict(dtype="float8"),
    "map.lengths": dict(strides=(128, 128)),
    "map.swizzle": dict(swizzle=256),
    "map.interleave": dict(interleave=16),
    "map.fill": dict(fill="nan", dtype="int32"),
    "map.l2": dict(l2=4),
    "map.address": dict(address=A + 8),
    "map.dims": dict(dims=(64, 0)),
    "map.strides": dict(strides=(24,)),
    "map.box": dict(box=(16, 257)),
    "map.inner": dict(box=(4, 8)),
    "map.span": dict(box=(64, 8), swizzle=64),
    "map.element_strides": dict(element_strides=(1, 9)),
    "map.packed": dict(dtype="16u4_align16b", box=(64, 8)),
    "map.pixels": IMAGES | dict(pixels=1025),
    "map.corners": IMAGES | dict(lower=(-129, 0)),
    "map.bounds": IMAGES | dict(upper=(-8, 0)),
    "map.size": dict(box=(256, 256, 2), dims=(512, 512, 4), strides=(1024, 524288)),
}


def test_every_limit_has_a_map_that_breaks_it():
    assert set(BROKEN) == {check.id for check in CHECKS}


@pytest.mark.parametrize("limit", BROKEN)
def test_a_broken_limit_is_named_with_what_was_found(limit):
    with pytest.raises(TensorMapError, match=rf"; found .* \[{limit}\]"):
        TensorMap(**a_map(**BROKEN[limit]))


@pytest.mark.parametrize("changes", [
    dict(dims=(2**32 + 1, 1)), dict(strides=(2**40,)), dict(strides=(-16,)), dict(box=(0, 8)), dict(fill="one"),
    dict(element_strides=(1, 0)),
    dict(address=A + 16, interleave=32, dims=(8, 8, 8), strides=(32, 32), box=(8, 8, 8)),
])
def test_the_far_side_of_each_limit_is_refused(changes):
    with pytest.raises(TensorMapError):
        TensorMap(**a_map(**changes))


@pytest.mark.parametrize(("raw", "says"), [
    (b"\xcd" * SIZE, r"bits .* have no meaning"),
    (bytes(32), "128 bytes; found 32"),
    ((15 << 71).to_bytes(SIZE, "little"), "dtype"),
    ((1 << 64).to_bytes(SIZE, "little"), "im2col of 1 dimensions"),
    ((6 << 68).to_bytes(SIZE, "little"), "7 dimensions"),
    (bytes(SIZE), r"map\.inner"),                                              # a box of one byte
], ids=["no meaning", "short", "dtype", "im2col", "rank", "inner"])
def test_memory_that_holds_no_map_is_refused(raw, says):
    with pytest.raises(TensorMapError, match=says):
        decode(raw)


def test_every_single_bit_changes_the_map_or_is_refused():
    raw = encode(**a_map())
    for bit in range(512):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        unused = any(f.shift <= bit < f.shift + f.bits for f in BOX[2:]) or bit in (65, 85)
        try:
            same = decode(changed) == decode(raw)
        except TensorMapError:
            same = False
        # sizes of dimensions that a map of rank 2 does not have say nothing
        assert not same or unused or 320 <= bit < 416 or 128 <= bit < 240 or 422 <= bit < 431, f"bit {bit} is not read"


def test_a_tensor_fills_in_what_it_knows():
    x = torch.zeros(6, 40, 64, dtype=torch.bfloat16)[1:, :, :32]
    m = TensorMap(x, box=(32, 8, 1), swizzle=64)
    assert (m.address, m.dims, m.strides, m.dtype) == (x.data_ptr(), (32, 40, 5), (128, 5120), "bfloat16")
    assert m.spans() == [(x.data_ptr(), 2 * (4 * 40 * 64 + 39 * 64 + 32))] and m.tensor is x
    assert TensorMap(x, dims=(16, 40, 5), box=(16, 8, 1)).dims == (16, 40, 5)
    assert m.encode() == encode(m) and m == decode(m.encode())
    with pytest.raises(TensorMapError, match="contiguous; found stride 2"):
        TensorMap(x[..., ::2], box=(16, 8, 1))


@pytest.mark.parametrize(("fields", "size"), [
    (dict(box=(16, 4)), 256), (dict(box=(16, 4), element_strides=(2, 1)), 256),
    (dict(box=(16, 4), element_strides=(1, 2)), 128), (dict(box=(16, 5), element_strides=(1, 2)), 192),
    (dict(box=(16, 4), element_strides=(1, 3)), 128),
])
def test_a_box_counts_what_arrives_in_shared_memory(fields, size):
    """An H200 counted so many bytes."""
    assert TensorMap(**a_map(dtype="float32", **fields)).box_bytes == size


def test_rows_lie_a_swizzle_span_apart():
    pitch = lambda **c: TensorMap(**a_map(dtype="float32", **c)).pitch  # noqa: E731
    assert pitch(box=(16, 8)) == 64 == pitch(box=(16, 8), swizzle=64)
    assert pitch(box=(16, 8), swizzle=128) == 128 and pitch(box=(4, 8), swizzle=32) == 32


def test_elements_outside_are_zero_or_that_nan():
    assert TensorMap(**a_map()).fill_bytes == b"\0\0"
    for dtype in ("float16", "bfloat16", "float32", "tfloat32", "float64"):
        m = TensorMap(**a_map(dtype=dtype, fill="nan", box=(8, 8), strides=(512,)))
        assert m.fill_bytes == b"\xf7\x7f" * (m.itemsize // 2)
