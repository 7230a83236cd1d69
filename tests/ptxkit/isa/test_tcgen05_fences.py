"""tcgen05.fence and tcgen05.wait::ld, where compilers leave them out: a note, and an error for a strict launch."""

import pytest
import tensor_core as tc
from assembly import kinds, reports

from ptxkit.findings import SimulationError
from ptxkit.launches import launch

pytestmark = pytest.mark.simulated

BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%x100}, [%r9];"
USED = "add.u32 %x101, %x100, 1;"
FREE = "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 64;"
A, B = tc.operands("bf16", 128, 32)
ADDED = tc.mma("f16", (A.descriptor, B.descriptor), tc.idesc("bf16", "bf16", 128, 32), accumulate=1)
# Warps allocate, store, multiply, load and free in turn, with all the fences that order them.
FENCED = dict(
    sync=f"bar.sync 0; {AFTER}", stored=tc.STORED + BEFORE, wait=tc.WAIT + AFTER, end=f"{BEFORE} bar.sync 0; {FREE}"
)


def run(text, **options):
    cells = tc.pattern(1, 64)
    return launch(text, grid=1, block=128, args=[tc.image_of(A, B), cells, cells.clone()], **options)


def without(text, what, number=0):
    """Return the same but for one of its fences."""
    pieces = text.split(what)
    assert len(pieces) > number + 1
    return what.join(pieces[: number + 1]) + what.join(pieces[number + 1 :])


def product(**parts):
    """[C + A @ B^T], where C are the cells, as numbers of float32."""
    text = tc.source(ADDED, 64, 0x8000, **FENCED | parts)
    return text.replace("bar.sync 0;", f"bar.sync 0; {AFTER}", 1)


@tc.UNDER_ANY_SCHEDULE
def test_what_is_fenced_has_neither_errors_nor_notes(schedule):
    result = run(product(), strict=True, **schedule)
    assert not result.findings and not result.notes


NEEDED = {
    "after the allocation": (AFTER, 0, AFTER, "tcgen05.st"),
    "before the barrier ahead of the product": (BEFORE, 0, BEFORE, "tcgen05.mma"),
    "after the barrier ahead of the product": (AFTER, 1, AFTER, "tcgen05.mma"),
    "after the wait for the commit": (AFTER, 2, AFTER, "tcgen05.ld"),
    "before the barrier ahead of the end": (BEFORE, 1, BEFORE, "@%p1 tcgen05.dealloc"),
}


@tc.UNDER_ANY_SCHEDULE
@pytest.mark.parametrize(("fence", "number", "says", "instruction"), NEEDED.values(), ids=NEEDED)
def test_each_fence_is_missed(fence, number, says, instruction, schedule):
    text = without(product(), fence, number)
    result = run(text, strict=True, **schedule)
    assert kinds(result) == ["tcgen05-fence"] and not result.notes
    for finding in result.findings:
        assert says.rstrip(";") in finding.says and finding.place.ptx.startswith(instruction)
        assert finding.grade == "error"
    result = run(text, **schedule)
    assert not result.findings and {note.grade for note in result.notes} == {"note"}


def test_a_note_never_raises_and_an_error_does():
    text = without(product(), AFTER, 2)
    result = run(text, raises=True)
    assert result.notes and "note: tcgen05-fence: " in result.report()
    with pytest.raises(SimulationError, match="tcgen05-fence"):
        run(text, raises=True, strict=True)


@tc.UNDER_ANY_SCHEDULE
def test_who_only_hands_on_what_it_knows_needs_no_fence(schedule):
    """Warp 3 waits for the commit and meets the others, who load: of theirs alone a fence is asked."""
    wait = f"setp.ne.u32 %p7, %r2, 3; @%p7 bra known; {tc.WAIT} known: bar.sync 2; " + AFTER
    text = product(wait=wait, load=LOAD + tc.LOADED)
    result = run(text, strict=True, **schedule)
    assert not result.findings
    reports(run(without(text, AFTER, 2), strict=True, **schedule), ["tcgen05-fence"])


@tc.UNDER_ANY_SCHEDULE
@pytest.mark.parametrize(("then", "expected"), [(tc.LOADED, []), (USED, ["tcgen05-fence", "tcgen05-wait"])],
                         ids=["wait", "use"])
def test_a_use_of_what_was_loaded_orders_nothing_but_itself(then, expected, schedule):
    """The product overwrites what the load has read."""
    text = product(stored=tc.STORED + LOAD + then + BEFORE)
    result = run(text, strict=True, **schedule)
    assert kinds(result) == expected
    assert all("tcgen05.wait::ld" in finding.says for finding in result.findings)


@tc.UNDER_ANY_SCHEDULE
def test_a_loaded_register_is_used_behind_the_wait_alone(schedule):
    correct, early = (product(stored=tc.STORED + LOAD + then + BEFORE) for then in (tc.LOADED + USED, USED + tc.LOADED))
    assert not run(correct, strict=True, **schedule).findings
    result = run(early, strict=True, **schedule)
    assert kinds(result) == ["tcgen05-wait"] and not result.notes
    for finding in result.findings:
        assert finding.place.ptx.startswith("add.u32") and finding.other.ptx.startswith("tcgen05.ld")
    result = run(early, **schedule)
    assert not result.findings and {note.kind for note in result.notes} == {"tcgen05-wait"}


@tc.UNDER_ANY_SCHEDULE
@pytest.mark.parametrize(("between", "expected"), [
    (f"{BEFORE} bar.sync 1; {AFTER}", None), (f"bar.sync 1; {AFTER}", BEFORE), (f"{BEFORE} bar.sync 1;", AFTER),
])
def test_products_of_two_warps_make_one_pipeline_behind_fences(between, expected, schedule):
    texts = tc.TWO_ISSUERS.format(one=ADDED.replace("1, 0;", "0, 0;"), between=between, two=ADDED)
    text = product().replace("@!%p3 bra issued;\n    " + ADDED, texts)
    assert "first:" in text
    result = run(text, strict=True, **schedule)
    assert kinds(result) == (["tcgen05-fence"] if expected else [])
    assert all(expected.rstrip(";") in finding.says for finding in result.findings)
