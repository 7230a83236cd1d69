"""Correct kernels find nothing under any schedule; a fault planted in one never goes unnoticed."""

import collections
import json

import pytest
from planted import FAULTS, FILE, KERNELS, source, table, verdict

pytestmark = pytest.mark.simulated

SCHEDULES = range(20)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_correct_kernel_is_correct_and_clean_under_twenty_schedules(name, early):
    for seed in SCHEDULES:
        run, right = KERNELS[name][1](source(name), schedule=seed, early=early, strict=True)
        assert not run.findings, f"schedule {seed}:\n" + "\n".join(map(str, run.findings[:3]))
        assert right, f"schedule {seed}: a wrong answer"


@pytest.mark.simulated_only
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kernel}: {f.says}".replace(" ", "-"))
def test_a_planted_fault_is_noticed_under_every_schedule(fault):
    for seed in range(3):
        assert verdict(fault, schedule=seed), f"schedule {seed}: {fault.says} went unnoticed"


def test_there_are_faults_of_every_family():
    families = collections.Counter(fault.family for fault in FAULTS)
    assert len(FAULTS) >= 40 and min(families.values()) >= 3, families


def test_the_verdicts_on_file_are_those_of_this_code():
    assert json.loads(FILE.read_text()) == table(), "python tests/helpers/planted.py writes the file"
