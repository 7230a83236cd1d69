"""`kda doctor` with made-up machines, and once with the real one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kda.routing.capability import Capability, Rule
from kda.tools.commands import doctor, findings, probes, ran
from kda.tools.commands.findings import CHECKS, Examination
from kda.tools.commands.probes import CacheFacts, GpuFacts, MachineFacts, Probe, Ptxas
from ptxkit.commands.layout import strip_ansi
from ptxkit.commands.render import Screen
from ptxkit.compile import launch_list, recipes
from ptxkit.compile.target import TARGETS

ROOT = Path(__file__).resolve().parents[4]
H200 = GpuFacts("NVIDIA H200", (9, 0), 132, 227 << 10, 140 << 30, "GPU-1")
SMI = Probe("ok", {"driver": "580.95.05", "cuda": (13, 0)})
TORCH = Probe("ok", {"version": "2.13.0+cu130", "cuda": "13.0", "driver_cuda": [13, 0], "why": ""})
CPU_TORCH = Probe("ok", {"version": "2.13.0+cpu", "cuda": None, "why": "Torch not compiled with CUDA enabled"})
TRACE = Probe("ok", {"built": ["sm_90a", "sm_100a"], "ptx": [9, 4], "seconds": 0.2})
IN_CPP = {"in_c": True, "header": True, "cpp_compiler": "/usr/bin/g++", "torch_headers": True}
HEALTHY = MachineFacts(
    python=(3, 12, 1),
    requires_python=">=3.10",
    requires=("torch>=2.8", "triton>=3.4; platform_system == 'Linux'", "nvidia-cutlass-dsl[cu13]==4.8.1",
              "pytest; extra == 'dev'"),
    versions={
        "torch": "2.13.0+cu130", "triton": "3.9.0",
        "nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
        "cuda-bindings": "13.0.1", "fla-core": "0.6.0", "transformers": "5.23.0", "vllm": "0.33.0",
        "sglang": "0.5.23",
    },
    device_files=True,
    torch=TORCH,
    triton=Probe("ok", {"version": "3.9.0", "driver": True, "why": ""}),
    cutlass=Probe("ok", {"version": "4.8.1"}),
    trace=TRACE,
    nvrtc=Probe("ok", {"version": [13, 0]}),
    smi=SMI,
    smi_gpus=(H200,),
    torch_gpus=(H200,),
    ptxas=(Ptxas("/opt/cuda/bin/ptxas", (13, 4), False),),
    cache=CacheFacts("/home/a/.cache/kda", True, True, "", 1 << 40, "ext4", 38, 212 << 20),
    c_compiler="/usr/bin/gcc",
    launches=Probe("ok", IN_CPP),
    fla=Probe("ok", {"version": "0.6.0", "asked": {"chunk_kda": ["kda", "flash_kda"]}}),
    families=("kimi_linear", "glm5_next"),
    plugins=("vllm", "sglang"),
)
VLLM = {"versions": {"vllm": "0.33.0"}, "plugins": ("vllm",)}
SGLANG = {"versions": {"sglang": "0.5.23"}, "plugins": ("sglang",)}
NO_GPU = {"smi_gpus": (), "torch_gpus": (), "smi": Probe("absent"), "device_files": False}
CPU_ONLY = {**NO_GPU, "torch": CPU_TORCH}
BROKEN = Probe("failed", says="ImportError: libcuda.so.1: cannot open shared object file")
DEAD = Probe("crashed", says="died with SIGSEGV")
SLOW = Probe("crashed", says="took longer than 30 s")
ABSENT = Probe("absent", {"absent": True})
UNASKED = Probe("ok", {"version": "0.6.0", "asked": {"chunk_kda": ["flash_kda"]}})
NO_FLA = {"fla": ABSENT, "versions": {"transformers": "5.23.0"}}
TURING = (dataclasses.replace(H200, cc=(7, 5)),)
IN_PYTHON = Probe("ok", IN_CPP | {"in_c": False})
NO_NVRTC = Probe("ok", {"version": None, "why": "Failed to dlopen libnvrtc"})


def made_up(**changes) -> MachineFacts:
    return dataclasses.replace(HEALTHY, **changes)


def versions(**changes) -> dict:
    return {"versions": {**HEALTHY.versions, **{name.replace("_", "-"): v for name, v in changes.items()}}}


def cache(**changes) -> dict:
    return {"cache": dataclasses.replace(HEALTHY.cache, **changes)}


def smi_gpu(**changes) -> dict:
    return {"smi_gpus": (dataclasses.replace(H200, **changes), dataclasses.replace(H200, uuid="GPU-2"))}


# check, what is different on this machine, status, words that its finding says or advises
CASES = [
    ("python.version", {"python": (3, 9, 2)}, "fail", "3.9.2, but kda needs >=3.10"),
    ("python.version", {"python": (3, 9, 2), "requires_python": ""}, "fail", "uv venv"),
    ("deps.pins", {"requires": None}, "info", "checkout"),
    ("deps.pins", versions(nvidia_cutlass_dsl="4.5.0"), "fail", "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'"),
    ("deps.pins", {"versions": {"torch": "2.13.0+cpu"}}, "fail", "triton is missing, kda needs >=3.4"),
    ("gpu.visible", {**NO_GPU, "env": {"CUDA_VISIBLE_DEVICES": ""}}, "warn", "unset CUDA_VISIBLE_DEVICES"),
    ("gpu.visible", CPU_ONLY, "warn", "no CUDA device, and torch 2.13.0+cpu could not use one"),
    ("gpu.visible", {**CPU_ONLY, "smi_gpus": (H200,), "smi": SMI}, "warn", "cannot use the NVIDIA H200"),
    ("gpu.visible", NO_GPU, "warn", "docker run --gpus all"),
    ("gpu.visible", {**NO_GPU, "device_files": True, "smi": BROKEN}, "warn", "the driver does not answer"),
    ("gpu.visible", {**NO_GPU, "device_files": True, "smi": SLOW}, "warn", "took longer than"),
    ("gpu.visible", {**NO_GPU, "device_files": None}, "warn", "torch names no reason"),
    ("gpu.visible", {**NO_GPU, "device_files": None, "torch": BROKEN}, "warn", "fix torch.import first"),
    ("gpu.capability", {"torch_gpus": (dataclasses.replace(H200, cc=(7, 5)),)}, "warn", "7.5 (NVIDIA H200) has no"),
    ("gpu.capability", CPU_ONLY, "info", "no GPU"),
    ("gpu.busy", CPU_ONLY, "info", "no GPU"),
    ("gpu.busy", {"smi_gpus": ()}, "info", "nvidia-smi does not answer"),
    ("gpu.busy", smi_gpu(users=((42, "python"),)), "warn", "export CUDA_VISIBLE_DEVICES=1"),
    ("gpu.busy", {"smi_gpus": (dataclasses.replace(H200, users=((42, "python"),)),)}, "warn", "pid 42 (python)"),
    ("gpu.busy", smi_gpu(mig=True), "warn", "MIG slice"),
    ("gpu.busy", smi_gpu(mode="Exclusive_Process"), "warn", "nvidia-smi -c DEFAULT"),
    ("driver.version", {**CPU_ONLY}, "info", "no driver"),
    ("driver.version", {"torch": Probe("ok", {**TORCH.data, "driver_cuda": [12, 4]})}, "fail", "driver 580.65 or"),
    ("driver.version", {"torch": BROKEN, "smi": Probe("ok", {"driver": "550.54", "cuda": [12, 4]})}, "fail",
     "pip install 'nvidia-cutlass-dsl[cu12]'"),
    ("torch.import", {"torch": ABSENT}, "fail", "torch is not installed"),
    ("torch.import", {"torch": BROKEN}, "fail",
     "2.13.0+cu130 is installed; importing torch failed: ImportError: libcuda.so.1"),
    ("torch.import", {"torch": DEAD}, "crash", "importing torch died with SIGSEGV"),
    ("cutlass.import", {"cutlass": ABSENT}, "warn", "not installed"),
    ("cutlass.import", {"cutlass": ABSENT, **CPU_ONLY}, "info", "neither built nor run"),
    ("cutlass.import", {"cutlass": ABSENT, "system": ("Darwin", "arm64")}, "info", "not needed on Darwin arm64"),
    ("cutlass.import", {"cutlass": ABSENT, "system": ("Linux", "aarch64")}, "warn", "is not installed"),
    ("cutlass.import", {"cutlass": BROKEN, "requires": ()}, "fail", "'nvidia-cutlass-dsl[cu13]==4.8.1'"),
    ("cutlass.import", {"cutlass": SLOW}, "crash", "took longer than 30 s"),
    ("cutlass.trace", {"trace": ABSENT}, "info", "not installed"),
    ("cutlass.trace", {"trace": BROKEN, "cutlass": BROKEN}, "info", "cutlass.import failed"),
    ("cutlass.trace", {"trace": BROKEN, "env": {"CUTE_DSL_PTXAS_PATH": "/bin/false"}}, "fail",
     "unset CUTE_DSL_PTXAS_PATH"),
    ("cutlass.trace", {"trace": SLOW}, "crash", "building a probe took longer than 30 s"),
    ("triton.import", {"triton": ABSENT}, "warn", "not installed"),
    ("triton.import", {"triton": ABSENT, **CPU_ONLY}, "info", "cannot run"),
    ("triton.import", {"triton": BROKEN}, "fail", "mount the driver"),
    ("triton.import", {"triton": DEAD}, "crash", "died with SIGSEGV"),
    ("triton.import",
     {"triton": Probe("ok", {"driver": False, "why": "0 active drivers ([]). There should only be one."})}, "fail",
     "no GPU driver visible to Triton"),
    ("nvrtc.library", {"nvrtc": ABSENT}, "warn", "cuda-python is not installed"),
    ("nvrtc.library", {"nvrtc": ABSENT, **CPU_ONLY}, "info", "neither built nor simulated"),
    ("nvrtc.library", {"nvrtc": NO_NVRTC, **CPU_ONLY}, "warn", "pip install nvidia-cuda-nvrtc   ("),
    ("nvrtc.library", {"nvrtc": NO_NVRTC, **versions(cuda_bindings="12.9.1")}, "warn", "nvidia-cuda-nvrtc-cu12"),
    ("nvrtc.library", {"nvrtc": BROKEN}, "fail", "13.0.1 is installed; importing cuda.bindings failed"),
    ("cuda_python.skew", versions(cuda_bindings="14.1.0"), "warn", "pip install 'cuda-bindings==13.*'"),
    ("cuda_python.skew", CPU_ONLY, "info", "no driver"),
    ("cuda_python.skew", {"versions": {}}, "info", "not installed"),
    ("ptxas.version", {"ptxas": (Ptxas("/x/ptxas", (13, 0), True),)}, "warn", "reads PTX <= 9.0, cutlass-dsl writes"),
    ("ptxas.version", {"ptxas": (Ptxas("/x/ptxas", None, True),)}, "warn", "is no ptxas that runs"),
    ("ptxas.version", {"ptxas": (Ptxas("/x/ptxas", (12, 9), False),)}, "info", "it is not used"),
    ("ptxas.version", {"trace": ABSENT}, "info", "not looked at"),
    ("env.overrides", {"env": {"TRITON_INTERPRET": "1"}}, "warn", "bfloat16 ties round up"),
    ("env.overrides", {"env": {"CUTE_DSL_ARCH": "sm_90a"}}, "warn", "CuTe DSL builds for it"),
    ("env.overrides", {"env": {"CUTE_DSL_NO_CACHE": "1"}}, "warn", "unset CUTE_DSL_NO_CACHE"),
    ("env.overrides", {"env": {"CUTE_DSL_PTXAS_PATH": "/x"}}, "warn", "assembles with it"),
    ("env.overrides", {"env": {"KDA_CACHE_DIR": "/x"}}, "info", "built kernels are kept there"),
    ("env.overrides", {"env": {"KDA_BACKEND": "reference"}}, "info", "use this backend or fail"),
    ("env.overrides", {"env": {"KDA_BACKEND": "refrence"}}, "fail", "export KDA_BACKEND=reference"),
    ("env.overrides", {"env": {"KDA_BACKEND": "h100"}}, "fail", "export KDA_BACKEND=sm90"),
    ("env.overrides", {"env": {"KDA_BACKEND": "x", "KDA_BAKEND": "x"}}, "fail", "unset KDA_BAKEND"),
    ("env.overrides", {"env": {"KDA_BAKEND": "reference"}}, "warn", "did you mean KDA_BACKEND?"),
    ("cache.dir", cache(path="", writable=False), "fail", "no home directory"),
    ("cache.dir", cache(writable=False), "fail", "cannot be written"),
    ("cache.dir", cache(writable=False, exists=False), "fail", "cannot be made"),
    ("cache.dir", cache(free=1 << 20), "fail", "is on a full disk, 1 MiB left"),
    ("cache.dir", cache(filesystem="nfs4"), "warn", "export KDA_CACHE_DIR=/local/path"),
    ("cache.trust", cache(distrusted="/c belongs to user 7; set X"), "fail", "/c belongs to user 7: nothing"),
    ("cache.trust", cache(distrusted="/c is open (mode 0777); `chmod go-w /c`, or set X"), "fail", "chmod go-w /c"),
    ("cache.stale", cache(unreadable=3), "warn", "3 unreadable"),
    ("cache.stale", cache(stale=3 << 30), "warn", "holds 3.0 GiB"),
    ("cache.stale", cache(bytes=3 << 30), "ok", ""),
    ("simulator.compiler", {"c_compiler": None}, "warn", "apt-get install gcc"),
    ("launches.compiler", {"launches": IN_PYTHON, "c_compiler": None}, "warn", "apt-get install gcc"),
    ("launches.compiler", {"launches": IN_PYTHON}, "warn", "/usr/bin/gcc cannot build them: Python runs lists"),
    ("launches.compiler", {"launches": IN_PYTHON, **CPU_ONLY}, "info", "a call costs the host more"),
    ("launches.compiler", {"launches": Probe("ok", {"in_c": False})}, "warn", "apt-get install python3-dev"),
    ("calls.compiler", {"launches": Probe("ok", IN_CPP | {"cpp_compiler": None})}, "warn", "apt-get install g++"),
    ("calls.compiler", {"launches": Probe("ok", IN_CPP | {"torch_headers": False})}, "warn", "has no headers"),
    ("calls.compiler", {"launches": IN_PYTHON}, "warn", "see launches.compiler"),
    ("calls.compiler", {"launches": Probe("ok", {}), **CPU_ONLY}, "info", "twice as much"),
    ("models.fla", NO_FLA, "info", "pip install fla-core"),
    ("models.fla", {"fla": BROKEN}, "warn", "`import kda.fla` failed: ImportError: libcuda.so.1"),
    ("models.fla", {"fla": DEAD}, "warn", "`import kda.fla` died with SIGSEGV"),
    ("models.fla", {"fla": Probe("ok", {"asked": {}})}, "warn", "unset FLA_DISABLE_BACKEND_DISPATCH"),
    ("models.fla", {"fla": UNASKED, "env": {"FLA_KDA": "0"}}, "warn", "FLA_KDA=0: FLA does not ask kda"),
    ("models.fla", {"torch_gpus": TURING}, "info", "they stay with FLA's own kernels"),
    ("models.fla", CPU_ONLY, "ok", "use kda, by reference"),
    ("models.vllm", {"versions": {}}, "info", "vllm is not installed"),
    ("models.vllm", VLLM | CPU_ONLY, "ok", "after `vllm serve ...` Kimi-Linear in vLLM use kda, by reference"),
    ("models.vllm", VLLM | {"env": {"KDA_VLLM": "0"}}, "warn", "unset KDA_VLLM"),
    ("models.vllm", VLLM | {"plugins": ()}, "warn", "vllm does not find kda among its plug-ins"),
    ("models.vllm", VLLM | {"versions": {"vllm": "0.30.1"}}, "warn", "kda is tested with vllm 0.33 and newer"),
    ("models.vllm", VLLM | {"torch_gpus": TURING}, "info", "they stay with vllm"),
    ("models.sglang", SGLANG | CPU_ONLY, "ok", "after `--linear-attn-prefill-backend kda"),
    ("models.transformers", {"versions": {}}, "info", "transformers is not installed"),
    ("models.transformers", {"families": ()}, "info", "pip install --upgrade transformers"),
    ("models.transformers", {"fla": BROKEN}, "warn", "`import kda.fla` failed"),
    ("models.transformers", NO_FLA, "info", "run in plain torch: fla-core is not installed"),
    ("models.transformers", {**CPU_ONLY, **NO_FLA, "kda_hf": True}, "ok", "after `import kda.hf; kda.hf.use()` kimi"),
    ("models.transformers", {**NO_FLA, "kda_hf": True, "torch_gpus": TURING}, "info", "run in plain torch"),
]

OLD_GPU = Capability("old", 1, "", archs=("sm90", "sm120"))


@pytest.fixture(autouse=True)
def a_backend_has_kernels_for_hopper(monkeypatch):
    monkeypatch.setattr(findings, "capabilities", lambda: (OLD_GPU,))


@pytest.mark.parametrize("id", CHECKS)
def test_a_healthy_machine_passes(id):
    assert CHECKS[id](HEALTHY).status == "ok", CHECKS[id](HEALTHY)


@pytest.mark.parametrize(("id", "changes", "status", "words"), CASES)
def test_a_check_names_what_is_wrong(id, changes, status, words):
    finding = CHECKS[id](made_up(**changes))
    assert finding.id == id and finding.status == status
    assert words in "\n".join([finding.says, *finding.fix])


def test_a_variable_that_is_near_no_other_gets_no_suggestion():
    assert CHECKS["env.overrides"](made_up(env={"KDA_SIMULATED": "1"})).says == "KDA_SIMULATED: no such variable"


def test_every_check_has_an_unhealthy_machine_among_the_cases():
    assert {id for id, *_ in CASES} == set(CHECKS)


def test_whatever_warns_or_fails_says_what_to_do():
    for _, changes, *_ in CASES:
        for check in CHECKS.values():
            finding = check(made_up(**changes))
            assert finding.fix or finding.status in ("ok", "info"), finding


def test_a_check_that_breaks_is_a_crash_of_its_own():
    finding = Examination("x", "", (), lambda facts: 1 / 0)(HEALTHY)
    assert finding.status == "crash" and "ZeroDivisionError" in finding.says and finding.fix


def test_the_gpu_line_says_where_its_numbers_come_from():
    assert CHECKS["gpu.visible"](HEALTHY).says.endswith("132 SMs, 140.0 GiB   (torch)")
    by_smi = CHECKS["gpu.visible"](made_up(torch=BROKEN, torch_gpus=()))
    assert by_smi.status == "ok" and by_smi.says.endswith("(nvidia-smi)")


# ---------------------------------------------------------------------------------------------- probes


def test_a_child_that_segfaults_becomes_a_crash():
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    probe = probes.run([sys.executable, "-c", kill], 300)
    assert (probe.state, probe.says) == ("crashed", "died with SIGSEGV")
    finding = CHECKS["torch.import"](made_up(torch=probe))
    line = doctor.finding_lines(Screen(), [finding])[0]
    assert line == "  [☠] torch.import  2.13.0+cu130 is installed; importing torch died with SIGSEGV"


def test_a_child_that_hangs_is_ended_and_says_how_long_it_had():
    probe = probes.run([sys.executable, "-c", "import time; time.sleep(600)"], 0.2)
    assert (probe.state, probe.says) == ("crashed", "took longer than 0.2 s")


def test_a_child_that_raises_shows_its_last_line_without_colour():
    probe = probes.run([sys.executable, "-c", r"raise ImportError('\x1b[31mno libcuda\x1b[0m')"], 300)
    assert (probe.state, probe.says) == ("failed", "ImportError: no libcuda")


def test_a_program_that_is_not_there_is_a_failure():
    assert probes.run(["/no/such/program"], 5).state == "failed"


def test_a_package_that_is_not_there_is_absent(monkeypatch):
    monkeypatch.setitem(probes.TIMEOUTS, "no_such_package", 20)
    assert probes.child("no_such_package").state == "absent"


def test_nvidia_smi_is_read():
    gpus = (
        "GPU-1, NVIDIA H200, 9.0, 143771, Default, Disabled, 580.95.05\n"
        "GPU-2, NVIDIA GB10, 12.1, [N/A], Default, [N/A], 580.95.05\n"
    )
    data = probes.read_smi(gpus, "GPU-2, 42, /usr/bin/python\n", "| Driver Version: 580.95.05   CUDA Version: 13.0 |")
    assert (data["driver"], data["cuda"]) == ("580.95.05", (13, 0))
    first, second = map(probes._gpu, data["gpus"])
    assert first == GpuFacts("NVIDIA H200", (9, 0), memory=143771 << 20, uuid="GPU-1")
    assert second.users == ((42, "python"),) and second.memory == 0


@pytest.mark.parametrize("module", [None, sys])
def test_the_launches_of_a_call_run_in_c_where_its_module_was_built(module, monkeypatch):
    monkeypatch.setattr(launch_list, "in_c", lambda: module)
    assert probes.look_at_launches().data["in_c"] == (module is not None)


def test_calls_run_in_cpp_where_there_is_a_compiler_for_it_and_torch_has_headers(monkeypatch, tmp_path):
    seen = probes.look_at_launches().data
    assert seen["torch_headers"] and seen["cpp_compiler"] == shutil.which("g++")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probes.importlib.util, "find_spec", lambda name: None)
    seen = probes.look_at_launches().data
    assert not seen["torch_headers"] and seen["cpp_compiler"] is None


def test_the_cache_is_where_the_variables_say(monkeypatch, tmp_path):
    monkeypatch.delenv("KDA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert probes.cache_path() == str(tmp_path / "kda")
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kernel").write_bytes(b"12345")
    cache = probes.look_at_cache()
    assert (cache.exists, cache.writable, cache.distrusted, cache.files, cache.bytes) == (True, True, "", 1, 5)


def test_a_cache_that_is_a_file_or_has_no_home_cannot_be_used(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "file" / "kda"))
    assert not probes.look_at_cache().writable
    for name in ("KDA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert probes.look_at_cache() == CacheFacts("", writable=False)


def test_the_file_system_of_the_deepest_mount_counts(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw\nserver:/x /mnt nfs4 rw\n")
    assert probes.filesystem_of("/mnt/kda", str(mounts)) == "nfs4"
    assert probes.filesystem_of("/mntx", str(mounts)) == "ext4"
    assert probes.filesystem_of("/", str(tmp_path / "no such file")) == ""


# ---------------------------------------------------------------------------------------------- backends

NEEDS_HOPPER = Rule("swift.arch", lambda p, h: h.cc == (9, 0), "needs 9.0, found {h.cc}", "use another GPU")
NO_BACKWARD = Rule("swift.backward", lambda p, h: p.direction == "forward", "has no backward", "backend='reference'")
NOT_BY_AUTO = Rule("plain.auto", lambda p, h: not p.is_gpu, "auto never takes {p.device} there", "name it")
SWIFT = Capability("swift", 10, "", rules=(NEEDS_HOPPER, NO_BACKWARD), archs=("sm90",))
PLAIN = Capability("plain", 1000, "", auto_rules=(NOT_BY_AUTO,))
RAN = Probe("ok", {"ok": True, "seconds": 0.31, "says": "agrees"})
WRONG = Probe("ok", {"ok": False, "seconds": 0.31, "says": "error 3.0 in dq"})


@pytest.fixture
def machine(monkeypatch):
    """A machine that a test makes up: its facts and what the live calls of its backends do."""

    def make(facts: MachineFacts = HEALTHY, **live: Probe):
        backends = (SWIFT, PLAIN)
        monkeypatch.setattr("kda.routing.dispatch.capabilities", lambda: backends)
        monkeypatch.setattr(doctor, "capabilities", lambda: backends)
        monkeypatch.setattr(findings, "capabilities", lambda: backends)
        monkeypatch.setattr(probes, "gather", lambda wanted, answered: facts)
        monkeypatch.setattr(probes, "probe_backend", lambda name: live.get(name, RAN))

    return make


def kda_doctor(*args: str):
    return CliRunner().invoke(doctor.command, args)


def test_a_healthy_machine_prints_the_header_the_backends_and_one_sentence(machine):
    machine()
    result = kda_doctor()
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert re.fullmatch(r"kda \S+  python 3.12.1  linux x86_64  NVIDIA H200", lines[0])
    assert lines[1] == "[✓] Everything kda needs is here."
    assert lines[3:6] == [
        "Backends  usable  forward  backward  evidence        why",
        "* swift   usable  yes      -         executed 0.3 s  backward: swift.backward: has no backward",
        "  plain   usable  yes      yes       executed 0.3 s  plain.auto: auto never takes cuda:0 there",
    ]
    assert "No kernels yet for sm80, sm86, sm89, sm100, sm103, sm110, sm120, sm121." in lines
    assert not any("[" in line for line in lines[2:])


def test_verbose_prints_every_check(machine):
    machine()
    printed = kda_doctor("-v").stdout
    assert all(f" {id} " in printed for id in CHECKS) and "backend.swift" in printed


def test_without_a_gpu_the_report_warns_and_auto_picks_for_cpu_tensors(machine):
    machine(made_up(**CPU_ONLY))
    result = kda_doctor()
    assert result.exit_code == 0 and kda_doctor("--strict").exit_code == 1
    assert "[!] gpu.visible" in result.stdout and "on CPU tensors" in result.stdout
    assert "* plain   usable  yes      yes       executed 0.3 s" in result.stdout.splitlines()
    assert re.search(r"^  swift   no +- +- +- +swift.arch: needs 9.0, found None$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(("call", "mark", "why"), [
    (WRONG, "[✗]", "error 3.0 in dq"), (BROKEN, "[✗]", "libcuda.so.1"), (DEAD, "[☠]", "died with SIGSEGV"),
])
def test_a_backend_that_is_wrong_or_dies_is_a_finding_and_not_usable(machine, call, mark, why):
    machine(swift=call)
    result = kda_doctor()
    assert result.exit_code == 1
    assert f"{mark} backend.swift  a small call" in result.stdout and why in result.stdout
    assert re.search(r"^\* swift +no .* failed +backend.swift failed", result.stdout, re.MULTILINE)


def test_no_backend_is_usable_when_torch_is_broken(machine):
    machine(made_up(torch=DEAD, torch_gpus=()))
    result = kda_doctor()
    assert result.exit_code == 1 and "[☠] torch.import" in result.stdout
    assert result.stdout.count("torch.import failed (above)") == 2 and "executed" not in result.stdout


def test_require_needs_a_usable_backend(machine):
    machine(made_up(**CPU_ONLY))
    assert kda_doctor("--require", "plain").exit_code == 0
    result = kda_doctor("--require", "swift")
    assert result.exit_code == 1 and "swift is required and not usable: swift.arch" in result.stdout
    assert "Everything kda needs" not in result.stdout
    result = kda_doctor("--require", "swfit")
    assert result.exit_code == 2 and "Did you mean 'swift'?" in result.stderr


def test_a_problem_prints_every_reason_and_exits_with_0(machine):
    machine(made_up(**CPU_ONLY))
    result = kda_doctor("--problem", "K=64 float32 cuda backward")
    assert result.exit_code == 0
    assert "no backend accepts chunk backward" in result.stdout
    for reason in ("swift.arch: ", "swift.backward: ", "plain.auto: "):
        assert reason in result.stdout
    assert kda_doctor("--problem", "K=x").exit_code == 2


@pytest.mark.parametrize("word, meant", [
    ("packd", "packed"), ("k=64", "K=64"), ("fp23", "fp32"), ("dtyp=float32", "dtype=float32"), ("wombat", None),
])
def test_a_misspelt_word_of_a_problem_is_answered_with_the_nearest(word, meant):
    result = kda_doctor("--problem", f"K=64 {word}")
    text = " ".join(result.stderr.split())
    assert result.exit_code == 2 and f"{word!r} is not a known word." in text and "Known: bfloat16, " in text
    assert f"Did you mean {meant!r}?" in text if meant else "Did you mean" not in text


def test_one_check_can_be_run_again(machine):
    machine(made_up(triton=BROKEN))
    result = kda_doctor("triton.import")
    assert result.exit_code == 1 and "triton.import" in result.stdout and "Backends" not in result.stdout
    assert kda_doctor("torch.import").exit_code == 0
    assert "backend.plain" in kda_doctor("backend.plain").stdout
    result = kda_doctor("tirton.import")
    assert result.exit_code == 2 and "Did you mean 'triton.import'?" in result.stderr


def test_json_is_one_object_with_stable_words_and_no_colour(machine):
    machine(made_up(triton=BROKEN))
    result = kda_doctor("--json", "--color", "always")
    data = json.loads(result.stdout)
    assert "\\u001b" not in result.stdout and "\x1b" not in result.stdout
    assert (data["schema"], data["command"], data["exit"]) == (1, "doctor", 1) and result.exit_code == 1
    assert (data["host"]["gpu"], data["host"]["cc"], data["host"]["sms"]) == ("NVIDIA H200", [9, 0], 132)
    assert {f["id"]: f["status"] for f in data["findings"]}["triton.import"] == "fail"
    assert {f["id"] for f in data["findings"]} == {*CHECKS, "backend.swift", "backend.plain"}
    swift, plain = data["backends"]
    assert (swift["name"], swift["usable"], swift["auto"], swift["evidence"]) == ("swift", True, True, "executed")
    assert plain["rejections"] == []


SWIFT_RAN = {
    "compilers": {"swift": "Triton 3.7.1"}, "paths": {"sm90: forward, of a test": []},
    "kernels": {"swift sm90": {"bfloat16": {"chain 0": "a", "chain 1": "b"}}, "swift sm100": {}},
    "runs": [{"case": "one", "path": "sm90: forward, of a test", "host": "other code", "outcome": "ok", "codes": ["a"],
              "card": "H100", "date": "2026-11-28"}],
}


def test_on_a_gpu_doctor_says_how_much_of_what_it_runs_has_run_on_one(machine, monkeypatch):
    monkeypatch.setattr(ran.Ledger, "read", classmethod(lambda cls: cls(SWIFT_RAN)))
    monkeypatch.setitem(recipes.COMPILERS, "triton", ("Triton", lambda: "3.7.1"))
    machine()
    assert re.search(r"^  swift, sm90 +1 of 2 +0 of 0 +H100 +2026-11-28$", kda_doctor().stdout, re.MULTILINE)
    assert json.loads(kda_doctor("--json").stdout)["ran"] == [
        {"backend": "swift", "arch": "sm90", "kernels": [1, 2], "paths": [0, 0], "cards": ["H100"],
         "last": "2026-11-28", "why": ""}
    ]
    assert "1 of 2" in kda_doctor("--paste").stdout
    monkeypatch.setitem(recipes.COMPILERS, "triton", ("Triton", lambda: "3.9.0"))
    other = "the ledger has kernels of Triton 3.7.1; here they are built by Triton 3.9.0"
    assert re.search(rf"^  swift, sm90 +0 of 2 +0 of 0 +- +- +{other}$", kda_doctor().stdout, re.MULTILINE)


def test_without_a_gpu_doctor_does_not_say_what_ran(machine):
    machine(made_up(**CPU_ONLY))
    assert "Ran on a GPU" not in kda_doctor().stdout and json.loads(kda_doctor("--json").stdout)["ran"] == []


def test_the_models_that_would_use_kda_have_a_table_of_their_own(machine):
    installed = {name: found for name, found in made_up().versions.items() if name not in ("vllm", "sglang")}
    machine(made_up(versions=installed))
    assert kda_doctor().stdout.splitlines()[9:12] == [
        "Models                 use kda  after           by                    which, or why not",
        "  fla-core 0.6.0       yes      import kda.fla  swift, backward none  calls of fla.ops.kda",
        "  transformers 5.23.0  yes      import kda.fla  swift, backward none  kimi_linear, glm5_next",
    ]
    fla, transformers = json.loads(kda_doctor("--json").stdout)["models"]
    assert fla == {
        "package": "fla-core", "version": "0.6.0", "models": "calls of fla.ops.kda", "uses_kda": True,
        "line": "import kda.fla", "forward": "swift", "backward": None, "why": "", "fix": [],
    }
    assert transformers["models"] == "kimi_linear, glm5_next" and transformers["version"] == "5.23.0"
    assert "import kda.fla" in kda_doctor("--paste").stdout


@pytest.mark.parametrize("gpu", [True, False])
def test_layers_and_models_of_fla_are_named_where_they_are_installed_and_a_gpu_is_there(machine, gpu):
    versions = {**made_up().versions, "flash-linear-attention": "0.6.0"}
    machine(made_up(versions=versions, **({} if gpu else CPU_ONLY)))
    fla = next(way for way in json.loads(kda_doctor("--json").stdout)["models"] if way["package"] == "fla-core")
    assert fla["models"] == ("FLA's layers and models" if gpu else "calls of fla.ops.kda")


def test_without_fla_and_transformers_there_is_no_table_of_models(machine):
    machine(made_up(fla=ABSENT, versions={}))
    assert "Models" not in kda_doctor().stdout
    assert [way["version"] for way in json.loads(kda_doctor("--json").stdout)["models"]] == [None, None]
    assert "Models" not in kda_doctor("torch.import").stdout


def test_the_families_of_transformers_are_found_without_importing_it(monkeypatch, tmp_path):
    for family, text in (("kimi_linear", '@hub("chunk_kda", "fla")'), ("glm5_next", "pass")):
        folder = tmp_path / "transformers" / "models" / family
        folder.mkdir(parents=True)
        (folder / f"modeling_{family}.py").write_text(text)
    (tmp_path / "transformers" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert probes.find_families() == ("kimi_linear",)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert probes.find_families() == () and probes.probe_fla().state == "absent"


def test_colour_only_repeats_what_the_words_say(machine):
    machine(made_up(triton=BROKEN), swift=WRONG)
    assert strip_ansi(kda_doctor("--color", "always").stdout) == kda_doctor("--color", "never").stdout


def test_paste_leaves_home_and_host_out(machine, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    monkeypatch.setattr("platform.node", lambda: "deepthought.example")
    machine(made_up(env={"KDA_CACHE_DIR": "/home/jane/kda", "KDA_X": "deepthought"}))
    printed = kda_doctor("--paste").stdout
    assert "jane" not in printed and "deepthought" not in printed and "~/kda" in printed
    assert "580.95.05" in printed and "2.13.0+cu130" in printed and "* swift" in printed


def test_every_arch_is_either_declared_or_said_to_be_missing():
    assert doctor.archs_without_kernels([SWIFT]) == [name for name in TARGETS if name != "sm90"]
    assert doctor.archs_without_kernels([Capability("later", 1, "", archs=("sm89",))]) == ["sm80", "sm86"]
    assert doctor.archs_without_kernels([Capability("all", 1, "", archs=tuple(TARGETS))]) == []


def test_the_list_and_the_docs_name_the_same_checks():
    listed = [line.split()[0] for line in kda_doctor("--list").stdout.splitlines()]
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE) == listed
    assert list(json.loads(kda_doctor("--list", "--json").stdout)["checks"]) == [*CHECKS]


# ---------------------------------------------------------------------------------------------- the real machine

BAN = """
import os, runpy, sys

sys.argv = ["/usr/bin/kda", *sys.argv[1:]]
try:
    runpy.run_module("kda", run_name="__main__", alter_sys=True)
finally:
    if imported := {"torch", "triton", "cutlass"} & sys.modules.keys():
        print(*imported, "was imported by the parent", file=sys.stderr, flush=True)
        os._exit(3)
"""


def run_kda(*args: str, **env: str):
    path = os.pathsep.join([env.pop("first", ""), str(ROOT)]).strip(os.pathsep)
    env = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **env}
    argv = [sys.executable, "-c", BAN, *args]
    return subprocess.run(argv, check=False, capture_output=True, encoding="utf-8", timeout=600, env=env)


@pytest.mark.exhaustive
def test_the_real_machine_gets_a_report_from_a_parent_that_never_imports_torch():
    ran = run_kda("doctor", "--json")
    assert ran.returncode in (0, 1), ran.stderr
    data = json.loads(ran.stdout)
    assert {f["id"] for f in data["findings"]} >= set(CHECKS)
    assert {f["id"]: f["status"] for f in data["findings"]}["torch.import"] == "ok"


@pytest.mark.parametrize(("source", "status", "says"), [
    ("raise ImportError('libc10.so: cannot open')", "fail", "libc10.so"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crash", "SIGSEGV"),
])
def test_a_torch_that_raises_or_segfaults_still_gets_a_report(tmp_path, source, status, says):
    (tmp_path / "torch.py").write_text(source)
    ran = run_kda("doctor", "torch.import", "--json", first=str(tmp_path))
    assert ran.returncode == 1, ran.stderr
    (finding,) = json.loads(ran.stdout)["findings"]
    assert finding["status"] == status and says in finding["says"] and finding["fix"]


def test_output_that_cannot_be_utf8_is_plain_and_needs_no_home():
    ran = run_kda("doctor", "python.version", "cache.dir", "--color", "never", PYTHONIOENCODING="ascii", HOME="")
    assert "[ok] python.version" in ran.stdout and ran.stdout.isascii()


def test_a_reader_that_leaves_early_changes_neither_the_exit_code_nor_stderr():
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "kda", "doctor", "--list"]
    ran = subprocess.run(argv, check=False, stdout=write, stderr=subprocess.PIPE, env=env, text=True)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_small_live_call_runs_on_one_thread(monkeypatch, capsys):
    """On a busy machine it took twelve times as long on two."""
    from kda.tools.commands import probe_backend

    threads = torch.get_num_threads()
    monkeypatch.setattr(probe_backend, "probe", lambda name: {"backend": name, "threads": torch.get_num_threads()})
    try:
        torch.set_num_threads(2)
        probe_backend.main("reference")
    finally:
        torch.set_num_threads(threads)
    assert json.loads(capsys.readouterr().out) == {"backend": "reference", "threads": 1}
