"""The order of matrix products: the manual keeps two of them in order only with one accumulator and one shape."""

import dataclasses

import pytest
import tensor_core as tc
import torch
from assembly import SEEDS

from ptxkit.launches import launch

pytestmark = pytest.mark.simulated

N, K = 32, 16
ANOTHER = "smem+24"                                                            # barrier
WAIT_BETWEEN = f"""
    mbarrier.init.shared::cta.b64 [{ANOTHER}], 1;
    fence.mbarrier_init.release.cluster;
    {tc.commit().replace(tc.BARRIER, ANOTHER)}
    {tc.WAIT.replace("waiting", "between").replace(tc.BARRIER, ANOTHER)}
"""


@dataclasses.dataclass(frozen=True)
class Product:
    """One product: where D lies, and A if that is in tensor memory too."""

    d: int = 0
    m: int = 128
    n: int = N
    a: int | None = None
    name: str = "bf16"
    accumulate: int = 1

    def ptx(self, operands):
        where = dict(d=f"%r8+{self.d}", a="%rd10" if self.a is None else f"[%r8+{self.a}]")
        descriptors = 0 if self.a is not None else operands[0].descriptor, operands[1].descriptor
        number = tc.idesc(self.name, self.name, self.m, self.n)
        return tc.mma(tc.TYPES[self.name][0], descriptors, number, accumulate=self.accumulate, **where)


def two(first, second, between="", **options):
    """Return (cells afterwards, the Run) of two products of the same operands."""
    operands = tc.operands("bf16", 128, 64)
    issue = first.ptx(operands) + between + second.ptx(operands)
    cells = tc.float_bits(torch.randint(-8, 9, (1, 128, 64), generator=torch.Generator().manual_seed(5)).double())
    out = torch.zeros_like(cells)
    text = tc.source(issue, 64, 0x8000)
    result = launch(text, grid=1, block=128, args=[tc.image_of(*operands), cells, out], **options)
    return out, result


def orders(run, grade):
    """Return what is said of the order of products; the kernel has no fences, which is said as well."""
    return [each for each in run.findings + run.notes if each.kind == "tcgen05-order" and each.grade == grade]


UPPER = 16 << 16  # the other lanes of an M of 64
PLAIN = Product()
KEPT = {
    "one accumulator and one shape": (PLAIN, PLAIN),
    "one that is begun again": (PLAIN, Product(accumulate=0)),
    "accumulators beside each other": (PLAIN, Product(d=N, n=16)),
    "accumulators in different lanes": (Product(m=64), Product(d=UPPER, m=64, n=16)),
    "what both read": (Product(a=48), Product(d=N, a=48, n=16)),
}
NOT_KEPT = {
    "another N": (PLAIN, Product(n=16)),
    "another M": (PLAIN, Product(m=64)),
    "another K": (PLAIN, Product(name="tf32")),
    "another place": (PLAIN, Product(d=16)), "D is begun again with another N": (PLAIN, Product(n=16, accumulate=0)),
    "D is A of the next": (PLAIN, Product(d=N, a=8)), "A is D of the next": (Product(d=N, a=8), PLAIN),
}


GRADES = pytest.mark.parametrize(("strict", "grade"), [(False, "note"), (True, "error")])


@tc.UNDER_ANY_SCHEDULE
@pytest.mark.parametrize("products", KEPT.values(), ids=KEPT)
def test_products_that_do_not_meet_and_those_that_are_alike_need_nothing(products, schedule):
    out, result = two(*products, strict=True, **schedule)
    assert not orders(result, "error") and torch.equal(out, two(*products)[0])


@pytest.mark.parametrize("schedule", [{}, {"early": True}, {"schedule": 3}], ids=str)
@GRADES
@pytest.mark.parametrize("products", NOT_KEPT.values(), ids=NOT_KEPT)
def test_products_that_meet_are_found_unless_the_earlier_one_has_been_waited_for(products, strict, grade, schedule):
    (found,) = orders(two(*products, strict=strict, **schedule)[1], grade)
    assert "in order only with one accumulator and one shape" in found.says and "tcgen05.commit" in found.advice
    assert "tcgen05.mma" in found.place.ptx and "tcgen05.mma" in found.other.ptx and found.place != found.other
    out, result = two(*products, WAIT_BETWEEN, strict=strict, **schedule)
    assert not orders(result, grade) and torch.equal(out, two(*products)[0])


def test_the_finding_says_what_meets_what():
    (found,) = orders(two(*NOT_KEPT["D is A of the next"])[1], "note")
    says = "A of M=128 N=32 K=16, columns 456 to 463, meets D of M=128 N=32 K=16 with D at 0x1c0"
    assert found.says.startswith(says)


@pytest.mark.parametrize("name", ["D is begun again with another N", "D is A of the next", "A is D of the next"])
def test_a_strict_schedule_shows_what_relies_on_an_order_as_other_bits(name):
    """Hardware keeps it, so schedules that are not strict do.  Sums of products are the same in any order here."""
    products = NOT_KEPT[name]
    for strict, differ in ((False, False), (True, True)):
        found = [two(*products, strict=strict, schedule=seed)[0] for seed in SEEDS]
        assert any(not torch.equal(out, two(*products)[0]) for out in found) == differ
