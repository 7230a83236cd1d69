"""Every mbarrier and named barrier of a CuTe kernel is one that its configuration declares."""

import re
from collections import Counter

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import digests

from kda.backends.sm90.configs import GROUPS

pytestmark = pytest.mark.compiler


def initialised(ptx):
    """Return how often an mbarrier is initialised with each count."""
    numbers = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    return Counter(int(numbers[register]) for register in re.findall(r"mbarrier\.init\S*\s+\S+, (%r\d+);", ptx))


def declared(config):
    """Return the same of a configuration: each group of warps has pipelines of its own, or a stage of one."""
    found = Counter()
    for pipeline in config.pipelines:
        groups = GROUPS if pipeline.each == "group" and pipeline.stages == 1 else 1
        found[pipeline.count] += groups * pipeline.stages * pipeline.places
    return found


def meetings(ptx):
    """Return the number of threads at each named barrier, beside its id where the PTX has it."""
    found = re.findall(r"\bbar\.(?:sync|arrive)\s+(%r\d+|\d+), (\d+);", ptx)
    return {(int(id_) if id_.isdecimal() else None, int(threads)) for id_, threads in found}


def is_declared(meeting, barriers):
    number, threads = meeting
    ids = {b.id + group * b.ids_per_group for b in barriers if b.threads == threads for group in range(GROUPS)}
    return number in ids or (number is None and bool(ids))


def undeclared(config, ptx):
    """Return what of a kernel's barriers its configuration does not say, or says otherwise."""
    barriers = [meeting.barrier for meeting in config.meetings]
    found = [meeting for meeting in meetings(ptx) if not is_declared(meeting, barriers)]
    counts = initialised(ptx)
    return found + ([counts] if counts != declared(config) else [])


def kernels(backend, long):
    """Return configurations and PTX of one kernel of each name."""
    known = digests.labelled(backend, backend)
    chosen = {label: known[label] for label in digests.of_a_name(backend, long)}
    return {label: (chosen[label].config, ptx) for label, ptx in digests.fetched(chosen).items()}


@pytest.mark.parametrize("backend, long", [
    ("sm100", False), ("sm90", False),
    *(pytest.param(backend, True, marks=pytest.mark.exhaustive) for backend in ("sm100", "sm90")),
])
def test_a_kernel_of_each_name_has_the_barriers_that_its_configuration_declares(backend, long):
    found = {label: undeclared(*kernel) for label, kernel in kernels(backend, long).items() if kernel[0].pipelines}
    assert found and not any(found.values()), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["sm100", "sm90"])
def test_every_kernel_has_the_barriers_that_its_configuration_declares(backend):
    known = {label: recipe for label, recipe in digests.labelled(backend, backend).items() if recipe.config.pipelines}
    found = {label: undeclared(known[label].config, ptx) for label, ptx in digests.fetched(known).items()}
    assert not any(found.values()), {label: words for label, words in found.items() if words}


def test_another_count_is_noticed():
    config, ptx = next(kernel for label, kernel in kernels("sm90", False).items() if ": walk " in label)
    number = re.search(r"mbarrier\.init\S*\s+\S+, (%r\d+);", ptx)[1]
    planted = re.sub(rf"(mov\.b32\s+{number}), \d+;", r"\1, 34;", ptx)
    assert undeclared(config, ptx) == [] and undeclared(config, planted) == [Counter({34: 2, 4: 2})]
    assert undeclared(config, re.sub(r"bar\.sync\s+1, 128;", "bar.sync 1, 64;", ptx)) == [(1, 64)]
