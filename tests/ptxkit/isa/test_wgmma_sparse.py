"""wgmma.mma_async.sp: a product whose A has two zeros in every four neighbours, and metadata that says where."""

import pytest
import torch
from assembly import kinds
from test_matrix_sparse import BITS, codes, lanes_of, sparse, whole_numbers
from test_wgmma import DEPTH, decode, run
from test_wgmma import multiply as multiply_bits

from ptxkit.ptx import PtxError

pytestmark = pytest.mark.simulated

TYPES = [
    ("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
    ("f32", "e4m3", "e5m2"), ("f16", "e5m2", "e4m3"), ("s32", "s8", "u8"), ("s32", "u8", "s8"),
]


def case(types, columns, seed=1):
    """Return (A with its zeros [64][k], the half that is not zero, metadata [64][chunks], B [columns][k])."""
    _, of_a, of_b = types
    g, k = torch.Generator().manual_seed(seed), 2 * DEPTH[of_a]
    a, half, metadata = (torch.cat(x) for x in zip(*(sparse(k, of_a, g) for _ in range(4))))
    return a, half, metadata, whole_numbers((columns, k), of_b, g)


def multiply(types, half, metadata, b, selector=0, **options):
    """Return D [64][columns] and the Run."""
    of_d, of_a, of_b = types
    words = [word for w in range(4) for word in lanes_of(metadata[16 * w : 16 * w + 16], BITS[of_a], selector)]
    scale = f"%e0, {selector}, 1"
    options = dict(scale=scale, sparse=".sp", given={"e": [words]}) | options
    out, result = multiply_bits(types, codes(half, of_a), codes(b, of_b), **options)
    return decode(out, of_d), result


@pytest.mark.parametrize("types", TYPES, ids=".".join)
@pytest.mark.parametrize("in_registers", [False, True])
def test_the_product_is_that_of_the_matrix_with_its_zeros(types, in_registers):
    a, half, metadata, b = case(types, 32)
    out, result = multiply(types, half, metadata, b, in_registers=in_registers)
    assert not result.findings and torch.equal(out.double(), a @ b.T)
    assert result.counters["tensor_flops"] == 2 * 64 * 32 * DEPTH[types[1]]


@pytest.mark.parametrize("columns", [8, 40, 256])
@pytest.mark.parametrize(("swizzle", "trans"), [("64", (0, 0)), ("none", (0, 0)), ("128", (1, 1)), ("32", (1, 1))])
def test_any_layout_and_number_of_columns_will_do(swizzle, trans, columns):
    types = ("f32", "bf16", "bf16")
    a, half, metadata, b = case(types, columns, seed=2)
    out, result = multiply(types, half, metadata, b, swizzle=swizzle, trans=trans)
    assert not result.findings and torch.equal(out.double(), a @ b.T)


@pytest.mark.parametrize("types", [("f32", "f16", "f16"), ("f32", "tf32", "tf32"), ("s32", "s8", "s8")], ids=".".join)
def test_the_selector_names_the_lanes_whose_metadata_counts(types):
    a, half, metadata, b = case(types, 16, seed=3)
    selectors = 1 if BITS[types[1]] == 8 else 2
    for selector in range(selectors):
        out, result = multiply(types, half, metadata, b, selector=selector)
        assert not result.findings and torch.equal(out.double(), a @ b.T)
    with pytest.raises(PtxError, match="sp-sel must be one of"):
        multiply(types, half, metadata, b, selector=selectors)


def test_metadata_of_one_index_twice_is_found():
    types = ("f32", "f16", "f16")
    _, half, metadata, b = case(types, 16)
    metadata[5, 2] = 0b0101
    _, result = multiply(types, half, metadata, b)
    assert "operand" in kinds(result) and "both indices are the same" in str(result.findings)


def test_a_row_of_b_must_fit_into_its_swizzle():
    types = ("f32", "f16", "f16")
    _, half, metadata, b = case(types, 16)
    _, result = multiply(types, half, metadata, b, swizzle="32")
    assert "descriptor" in kinds(result) and "too narrow" in str(result.findings)


def test_a_dense_depth_is_refused():
    name = "wgmma.mma_async.sp.sync.aligned.m64n8k16.f32.f16.f16"
    text = f"{name} {{%d0, %d1, %d2, %d3}}, %rd20, %rd21, %e0, 0, 1, 1, 1, 0, 0;"
    with pytest.raises(PtxError, match="m64nNk32"):
        run(b"0", text, 4)
