"""What benchmarks/profiled.py makes of ncu's table."""

import pytest

from benchmarks import profiled


def table(*kernels):
    """ncu's lines for some kernels: it says first what it connects to."""
    lines = ["==PROF== Connected to process 7", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for number, found in enumerate(kernels):
        every = dict.fromkeys([*profiled.METRICS.values(), *map(profiled.WAIT.format, profiled.WAITS)], "0") | found
        lines += [f'"{number}","kernel","{name}","x","{value}"' for name, value in every.items()]
    return lines


def wait(reason):
    return profiled.WAIT.format(reason)


def test_a_row_has_a_kernel_its_call_and_the_reasons_for_which_its_warps_wait_most():
    metrics = profiled.METRICS
    fused = {metrics["seconds"]: "311,040", metrics["memory"]: "52.5", wait("barrier"): "1.5", wait("gmma"): "2.25"}
    many = {wait(reason): str(n) for n, reason in enumerate(("wait", "membar", "sleeping", "gmma"), 1)}
    launched = [("forward h64-8k", ["fused"]), ("kept h64-8k", ["fused", "reverse"])]
    first, second, third = profiled.rows(launched, profiled.counted(table(fused, {}, many)))
    assert (first["call"], first["kernel"], first["memory"]) == ("forward h64-8k", "fused", 52.5)
    assert first["seconds"] == pytest.approx(311.04e-6) and first["waits"] == {"wgmma": 2.25, "bar.sync": 1.5}
    assert (second["call"], second["waits"]) == ("kept h64-8k", {})
    assert third["kernel"] == "reverse" and list(third["waits"].values()) == [4, 3, 2]


def test_more_kernels_than_were_launched_belong_to_no_call():
    with pytest.raises(ValueError, match="ncu counted 2 kernels, and 1 were launched"):
        list(profiled.rows([("forward h64-8k", ["fused"])], profiled.counted(table({}, {}))))
