"""Tensor copies in im2col mode: which pixels are copied and where they land, by the PTX manual and an H200."""

import itertools

import numpy as np
import pytest
import torch
import transfers as tr
from assembly import kinds, reports

from ptxkit.launches import launch
from ptxkit.tensormap import TensorMap, TensorMapError, decode, encode

pytestmark = pytest.mark.simulated

IMAGES = {3: (3, 9, 16), 4: (3, 7, 9, 16), 5: (3, 5, 7, 9, 16)}  # images, depth, height, width, channels


def image_map(x, lower, upper, channels=8, pixels=32, **more):
    return TensorMap(x, box=(channels,), pixels=pixels, lower=lower, upper=upper, **more)


def braces(numbers):
    return "{" + ", ".join(map(str, numbers)) + "}"


def loading(m, start, offsets, size):
    copy = f"""
    {tr.expect(m.box_bytes)}
    mov.u64 %rd20, map1;
    cvta.param.u64 %rd20, %rd20;
    cp.async.bulk.tensor.{m.rank}d.shared::cta.global.im2col.mbarrier::complete_tx::bytes
        [%r20], [%rd20, {braces(start)}], [%r21], {braces(offsets)};
    """
    body = tr.fill_shared(size) + tr.make_barrier() + tr.by_thread_0(copy) + tr.wait() + tr.store_shared(size)
    return tr.frame(body, maps=1)


def load(m, start, offsets, **options):
    out = torch.zeros(m.pixels * m.pitch, dtype=torch.uint8)
    run = launch(loading(m, start, offsets, len(out)), grid=1, block=tr.THREADS, args=[m, out], **options)
    return out.numpy(), run


def places(m, start):
    """Return the pixels from `start` on, as (image, ..., width): all of the bounding boxes in order, from the first
    one's."""
    sides = [
        range(low, size + up, step)
        for low, up, size, step in zip(m.lower, m.upper, m.dims[1:], m.element_strides[1:])
    ]
    images = range(start[-1], start[-1] + m.pixels * m.element_strides[-1] + 1, m.element_strides[-1])
    every = itertools.product(images, *reversed(sides))
    return itertools.islice(itertools.dropwhile(lambda pixel: pixel != tuple(start[:0:-1]), every), m.pixels)


def copied(x, m, start, offsets):
    """Yield (row, channel, index in the tensor, or None outside of it) of each element."""
    for row, (image, *pixel) in enumerate(places(m, start)):
        pixel = [coordinate + offset for coordinate, offset in zip(pixel, reversed(offsets))]
        for k in range(m.box[0]):
            where = (image, *pixel, start[0] + k)
            yield row, k, where if all(0 <= coordinate < n for coordinate, n in zip(where, x.shape)) else None


def image_of(x, m, start, offsets, size):
    image = np.full(size, tr.FILLER, dtype=np.uint8)
    for row, k, where in copied(x, m, start, offsets):
        element = x[where].view(1).view(torch.uint8).numpy() if where else np.frombuffer(m.fill_bytes, dtype=np.uint8)
        for b in range(m.itemsize):
            image[tr.swizzled(m.swizzle, row * m.pitch + k * m.itemsize + b)] = element[b]
    return image


def agrees(x, m, start, offsets, **options):
    found, run = load(m, start, offsets, **options)
    assert not run.findings
    np.testing.assert_array_equal(found, image_of(x, m, start, offsets, len(found)))


# ---- where pixels lie


@pytest.mark.parametrize("offsets", [(0, 0), (2, 1), (255, 255)])
@pytest.mark.parametrize("start", [(0, -1, -1, 0), (8, 3, 2, 1), (12, 7, 5, 1), (0, 0, 0, 2), (0, 0, 0, 3)])
def test_pixels_follow_each_other_through_the_box_and_then_through_the_next_image(start, offsets):
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    agrees(x, image_map(x, (-1, -1), (-1, -1), pixels=100), start, offsets)


@pytest.mark.parametrize(("lower", "upper"), [((0, 0), (0, 0)), ((0, 0), (-2, -2)), ((-2, -1), (1, 0)),
                                              ((1, 2), (-1, 0)), ((-1, 0), (1, 2)), ((0, 0), (-8, -6))])
def test_each_corner_belongs_to_its_dimension(lower, upper):
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    agrees(x, image_map(x, lower, upper), (0, *lower, 0), (0, 0))
    agrees(x, image_map(x, lower, upper), (4, *lower, 1), (2, 1))


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("pixels", [1, 60])
def test_every_rank_takes_as_many_pixels_as_asked(rank, pixels):
    x = tr.tensor(*IMAGES[rank], dtype=torch.int32)
    k = rank - 2
    m = image_map(x, (-1, 0, -2)[:k], (0, -1, 1)[:k], pixels=pixels)
    agrees(x, m, (0, *m.lower, 0), (0,) * k)
    agrees(x, m, (8, *(2, 3, 1)[:k], 1), (2, 1, 3)[:k])


@pytest.mark.parametrize("steps", [(1, 2, 2, 1), (1, 1, 2, 1), (1, 3, 2, 1), (1, 1, 1, 2), (2, 2, 1, 1)])
def test_element_strides_skip_pixels_and_do_not_change_their_number(steps):
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    m = image_map(x, (-1, -1), (-1, -1), element_strides=steps)
    agrees(x, m, (0, -1, -1, 0), (0, 0))
    agrees(x, m, (0, -1, -1, 0), (1, 1))


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("channels", [4, 8])
def test_a_pixel_is_a_row_of_the_swizzle(swizzle, channels):
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    agrees(x, image_map(x, (0, 0), (0, 0), channels, pixels=20, swizzle=swizzle), (0, 0, 0, 0), (1, 1))


def test_what_lies_outside_of_the_tensor_can_be_nan():
    x = tr.tensor(*IMAGES[4], dtype=torch.bfloat16)
    m = image_map(x, (-1, -1), (-1, -1), fill="nan")
    found, run = load(m, (0, -1, -1, 0), (0, 0))
    assert not run.findings and found.view(np.uint16)[:8].tolist() == [0x7FF7] * 8
    np.testing.assert_array_equal(found, image_of(x, m, (0, -1, -1, 0), (0, 0), len(found)))


@pytest.mark.parametrize("options", tr.SCHEDULES)
def test_a_load_is_clean_under_every_schedule(options):
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    agrees(x, image_map(x, (-1, -1), (-1, -1)), (0, 0, 0, 0), (1, 1), **options)


# ---- stores, reductions, prefetch


def storing(m, start, size, op=""):
    copy = f"""
    mov.u64 %rd20, map1;
    cvta.param.u64 %rd20, %rd20;
    cp{".reduce" if op else ""}.async.bulk.tensor.{m.rank}d.global.shared::cta{op}.im2col_no_offs.bulk_group
        [%rd20, {braces(start)}], [%r20];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    """
    ready = tr.load_shared(size) + "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    return tr.frame(ready + tr.by_thread_0(copy), maps=1)


@pytest.mark.parametrize("op", ["", ".add"])
@pytest.mark.parametrize(("start", "upper"), [((0, 0, 0, 0), (0, 0)), ((8, 3, 2, 1), (-1, -2)),
                                              ((12, 7, 4, 2), (-1, -2))])
def test_a_store_puts_pixels_back_and_leaves_out_what_lies_beyond(start, upper, op):
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    m = image_map(x, (0, 0), upper)
    wanted, source = x.clone(), 10_000 + torch.arange(m.pixels * 8, dtype=torch.int32)
    for row, k, where in copied(x, m, start, (0, 0)):
        if where:
            wanted[where] = source[row * 8 + k] + (wanted[where] if op else 0)
    text = storing(m, start, 4 * source.numel(), op)
    run = launch(text, grid=1, block=tr.THREADS, args=[m, source.view(torch.uint8)])
    assert not run.findings and torch.equal(x, wanted)


def test_a_prefetch_takes_offsets_and_checks_its_map():
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    ahead = """
    mov.u64 %rd20, map1;
    cvta.param.u64 %rd20, %rd20;
    cp.async.bulk.prefetch.tensor.4d.L2.global.im2col [%rd20, {0, 0, 0, 0}], {1, 1};
    """
    for m, found in ((image_map(x, (0, 0), (0, 0)), []), (TensorMap(x, box=(8, 4, 4, 1)), ["tensor-map"])):
        assert kinds(launch(tr.frame(ahead, maps=1), grid=1, block=1, args=[m, x])) == found


# ---- the map's bytes


@pytest.mark.parametrize(("dims", "lower", "upper", "pixels", "corners"), [
    ((16, 9, 3), (-300,), (0,), 32, "07d4fe00001f0000"),
    ((16, 9, 7, 3), (-2, 3), (-1, -1), 32, "07fe03ffff1f0000"),
    ((16, 9, 7, 3), (-1, -1), (-1, -1), 1024, "07ffffffffff0300"),
    ((16, 9, 7, 5, 3), (0, 0, -1), (0, 0, 0), 32, "07007c00001f0000"),
    ((16, 9, 7, 5, 3), (0, 0, 0), (-4, 5, 6), 32, "070000bc181f0000"),
])
def test_the_bytes_are_those_that_driver_580_makes(dims, lower, upper, pixels, corners):
    strides = [4 * int(np.prod(dims[:d])) for d in range(1, len(dims))]
    m = TensorMap(0x7F0000000000, dims, strides, (8,), dtype="uint32", pixels=pixels, lower=lower, upper=upper)
    raw = encode(m)
    assert raw[55:63].hex() == corners and raw[8:10].hex() == f"{16 * (len(dims) - 1) + 1:02x}01"
    assert decode(raw) == m


def test_a_map_in_tile_mode_has_no_pixels():
    raw = bytearray(encode(TensorMap(tr.tensor(16, 16), box=(8, 8))))
    raw[60] = 1
    with pytest.raises(TensorMapError, match="pixels in tile mode"):
        decode(bytes(raw))


# ---- what cannot be


@pytest.mark.parametrize("start", [(0, 8, 0, 0), (0, -2, 0, 0), (0, 0, 6, 0), (0, 0, -2, 0)])
def test_a_start_outside_of_the_bounding_box_is_reported(start):
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    reports(load(image_map(x, (-1, -1), (-1, -1)), start, (0, 0))[1], ["operand"], "bounding box")


def test_a_start_between_16_byte_boundaries_is_reported():
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    reports(load(image_map(x, (-1, -1), (-1, -1)), (2, 0, 0, 0), (0, 0))[1], ["misaligned"], "8 bytes")


@pytest.mark.parametrize("im2col", [False, True])
def test_a_map_of_the_other_mode_is_refused(im2col):
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    m = image_map(x, (0, 0), (0, 0))
    text = loading(m, (0, 0, 0, 0), (0, 0), m.box_bytes)
    if im2col:
        text = text.replace(".im2col", ".tile").replace(", {0, 0};", ";")
    else:
        m = TensorMap(x, box=(8, 4, 4, 1))
    run = launch(text, grid=1, block=tr.THREADS, args=[m, torch.zeros(1024, dtype=torch.uint8)])
    assert "tensor-map" in kinds(run) and "mode" in next(f.says for f in run.findings if f.kind == "tensor-map")


@pytest.mark.parametrize(("change", "name"), [
    ({"pixels": 1025}, "map.pixels"), ({"lower": (0,)}, "map.corners"), ({"lower": (-129, 0)}, "map.corners"),
    ({"upper": (0, 128)}, "map.corners"), ({"upper": (-9, 0)}, "map.bounds"),
    ({"lower": (5, 0), "upper": (-5, 0)}, "map.bounds"),
    ({"box": (8, 4, 4, 1)}, "map.lengths"), ({"box": (3,)}, "map.inner"), ({"pixels": 0}, "map.lengths"),
])
def test_a_map_that_cannot_be_is_refused_by_the_rule(change, name):
    x = tr.tensor(*IMAGES[4], dtype=torch.int32)
    with pytest.raises(TensorMapError, match=name):
        TensorMap(x, **{"box": (8,), "pixels": 32, "lower": (0, 0), "upper": (0, 0)} | change)


def test_two_dimensions_are_too_few():
    with pytest.raises(TensorMapError, match=r"map\.pixels"):
        TensorMap(tr.tensor(16, 16), box=(8,), pixels=32, lower=(), upper=())


LOAD = "cp.async.bulk.tensor.4d.shared::cta.global"
BYTES = "mbarrier::complete_tx::bytes"


@pytest.mark.parametrize(("text", "says"), [
    (f"{LOAD}.im2col.{BYTES} [%r20], [%rd1, {{0, 0, 0, 0}}], [%r21];", "operands"),
    (f"{LOAD}.im2col.{BYTES} [%r20], [%rd1, {{0, 0, 0, 0}}], [%r21], {{0}};", "1 im2col offsets"),
    (f"{LOAD}.im2col.{BYTES} [%r20], [%rd1, {{0, 0, 0}}], [%r21], {{0, 0}};", "3 coordinates"),
    (f"{LOAD}.im2col_no_offs.{BYTES} [%r20], [%rd1, {{0, 0, 0, 0}}], [%r21], {{0, 0}};", "not known here"),
    (f"{LOAD}.im2col::w.{BYTES} [%r20], [%rd1, {{0, 0, 0, 0}}], [%r21], {{0, 0}};", "im2col::w"),
    (f"{LOAD.replace('4d', '2d')}.im2col.{BYTES} [%r20], [%rd1, {{0, 0}}], [%r21], {{}};", ".2d with im2col"),
    ("cp.async.bulk.tensor.4d.global.shared::cta.im2col.bulk_group [%rd1, {0, 0, 0, 0}], [%r20];", "not known here"),
])
def test_forms_that_do_not_exist_are_refused_with_the_line(text, says):
    assert says in tr.refusal(text)
