"""What `kda doctor` knows of a machine, and how it finds out.

The parent reads metadata, files and `nvidia-smi`.  torch, triton and cutlass are imported in children, each of which is
this file run as a script: `python probes.py torch`.  So nothing at the top may import the rest of kda, which a broken
torch could take down, and a segfault, a hang or a failing import is a `Probe`, never an exception.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

DISTRIBUTION = "kimi-delta-attention"
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13",
            "cuda-python", "cuda-bindings", "apache-tvm-ffi", "fla-core", "flash-linear-attention",
            "transformers", "vllm", "sglang", "click", "packaging")
PLUGINS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}     # groups of entry points of engines
ENVIRONMENT = ("KDA_", "CUTE_DSL_", "TRITON_", "CUDA_", "FLA_")  # prefixes of the variables that doctor looks at
TRACE_ARCHS = ("sm_90a", "sm_100a")
TIMEOUTS = {"torch": 60, "triton": 60, "cutlass": 60, "trace": 30, "nvrtc": 60, "smi": 15, "ptxas": 10,
            "backend": 120, "fla": 60}                                         # seconds


@dataclass(frozen=True)
class Probe:
    """One question to a child process."""

    state: str = "skipped"                   # "ok", "absent", "failed", "crashed", or "skipped": not asked
    data: Mapping = field(default_factory=dict)
    says: str = ""                           # last line of its stderr, or how it died
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.state == "ok"


@dataclass(frozen=True)
class GpuFacts:
    name: str
    cc: tuple[int, int]
    sms: int = 0                             # 0: not known
    smem: int = 0                            # bytes one block may ask for; 0: not known
    memory: int = 0                          # bytes
    uuid: str = ""
    mode: str = "Default"                    # compute mode: "Default", "Exclusive_Process", "Prohibited"
    mig: bool = False
    users: tuple[tuple[int, str], ...] = ()  # (pid, name) of processes that compute on it


@dataclass(frozen=True)
class Ptxas:
    path: str
    release: tuple[int, int] | None          # CUDA release; None: it did not say
    by_variable: bool                        # named by CUTE_DSL_PTXAS_PATH; otherwise merely the one on PATH


@dataclass(frozen=True)
class CacheFacts:
    path: str                                # "" without a home directory
    exists: bool = False
    writable: bool = True                    # applies to the folder it would be made in, if absent
    distrusted: str = ""                     # why nothing is read there, and the way out
    free: int | None = None                  # bytes left on the disk
    filesystem: str = ""                     # "ext4", "nfs4"
    files: int = 0
    bytes: int = 0
    unreadable: int = 0                      # files
    stale: int = 0                           # bytes that no key of today names


@dataclass(frozen=True)
class MachineFacts:
    """A machine as far as kda cares; tests make them up."""

    python: tuple[int, int, int] = (3, 11, 0)
    system: tuple[str, str] = ("Linux", "x86_64")
    requires_python: str = ""                # what our metadata says
    requires: tuple[str, ...] | None = None  # its Requires-Dist; None: our distribution is not installed
    versions: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    device_files: bool | None = None         # /dev/nvidia<n> exist; None where GPUs have no such files
    torch: Probe = Probe()
    triton: Probe = Probe()
    cutlass: Probe = Probe()
    trace: Probe = Probe()
    nvrtc: Probe = Probe()
    smi: Probe = Probe()
    smi_gpus: tuple[GpuFacts, ...] = ()
    torch_gpus: tuple[GpuFacts, ...] = ()
    ptxas: tuple[Ptxas, ...] = ()
    cache: CacheFacts = CacheFacts("")
    c_compiler: str | None = None            # its path
    launches: Probe = Probe()                # whether C runs lists of launches, and whether Python.h is there
    fla: Probe = Probe()                     # kda registered in FLA
    families: tuple[str, ...] = ()           # models of transformers that call FLA's chunk_kda
    kda_hf: bool = False                     # whether there is a kda.hf
    plugins: tuple[str, ...] = ()            # engines that find kda among their plug-ins

    @property
    def gpus(self) -> tuple[GpuFacts, ...]:
        """Return those a call could use: torch's word where torch works, otherwise the driver's."""
        return self.torch_gpus if self.torch.ok else self.smi_gpus

    @property
    def gpu_source(self) -> str:
        return "torch" if self.torch.ok else "nvidia-smi"

    @property
    def driver(self) -> str | None:
        return self.smi.data.get("driver")

    @property
    def driver_cuda(self) -> tuple[int, int] | None:
        """Return the newest CUDA that the driver runs."""
        version = self.torch.data.get("driver_cuda") or self.smi.data.get("cuda")
        return tuple(version) if version else None

    @property
    def torch_cuda(self) -> tuple[int, int] | None:
        return release(self.torch.data.get("cuda") or "")


PROBES = ("torch", "triton", "cutlass", "trace", "nvrtc", "smi", "ptxas", "cache", "launches", "fla")


def gather(wanted: Collection[str] = PROBES, answered: Callable[[], None] = lambda: None) -> MachineFacts:
    """Ask everything at once, and say what has answered; what is not wanted stays `skipped`."""
    from ptxkit.compile import c_compiler  # here, as a child must not import kda

    jobs = {name: job for name, job in _jobs().items() if name in wanted}
    requires_python, requires = our_metadata()
    names = {*PACKAGES, *(word for line in requires or () for word in re.findall(r"^[\w.-]+", line))}
    with ThreadPoolExecutor(len(jobs) or 1) as pool:
        futures = {name: pool.submit(job) for name, job in jobs.items()}
        for future in futures.values():
            future.add_done_callback(lambda _: answered())
        probes = {name: future.result() for name, future in futures.items()}
    smi = probes.get("smi", Probe())
    return MachineFacts(
        python=sys.version_info[:3],
        system=(platform.system(), platform.machine()),
        requires_python=requires_python,
        requires=requires,
        versions={name: version for name in sorted(names) if (version := installed(name))},
        env={name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)},
        device_files=device_files(),
        c_compiler=c_compiler.path(),
        smi_gpus=tuple(_gpu(g) for g in smi.data.get("gpus", ())),
        torch_gpus=tuple(_gpu(g) for g in probes.get("torch", Probe()).data.get("gpus", ())),
        families=find_families(),
        kda_hf=importlib.util.find_spec(".hf", "kda") is not None,
        plugins=find_plugins(),
        **probes,
    )


def _jobs() -> dict[str, Callable]:
    children = {name: functools.partial(child, name) for name in CHILDREN}
    others = {"smi": nvidia_smi, "ptxas": find_ptxas, "cache": look_at_cache, "launches": look_at_launches,
              "fla": probe_fla}
    return {**children, "trace": lambda: child("trace", *TRACE_ARCHS), **others}


def _gpu(data: Mapping) -> GpuFacts:
    return GpuFacts(**{**data, "cc": tuple(data["cc"]), "users": tuple(map(tuple, data.get("users", ())))})


def release(text: str) -> tuple[int, int] | None:
    version = re.search(r"(\d+)\.(\d+)", text)
    return (int(version[1]), int(version[2])) if version else None


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def our_metadata() -> tuple[str, tuple[str, ...] | None]:
    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "", None
    return metadata["Requires-Python"] or "", tuple(metadata.get_all("Requires-Dist") or ())


def device_files() -> bool | None:
    if platform.system() != "Linux":
        return None
    return any(re.fullmatch(r"nvidia\d+", name) for name in os.listdir("/dev")) or os.path.exists("/dev/dxg")


# ---------------------------------------------------------------------------------------------- running a child


def run(argv: Sequence[str], timeout: float, cwd: str | None = None) -> Probe:
    """Run a program to its end or its timeout; `data` holds its stdout under "out"."""
    began = time.monotonic()
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   cwd=cwd, env=_child_environment(), text=True, errors="replace")
    except OSError as error:
        return Probe("failed", says=f"{os.path.basename(argv[0])}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        return Probe("crashed", says=f"took longer than {timeout:g} s", seconds=time.monotonic() - began)
    seconds = time.monotonic() - began
    if process.returncode < 0:
        return Probe("crashed", says=f"died with {_signal_name(-process.returncode)}", seconds=seconds)
    if process.returncode > 0:
        says = last_line(err) or last_line(out) or f"exit code {process.returncode}"
        return Probe("failed", says=says, seconds=seconds)
    return Probe("ok", {"out": out}, seconds=seconds)


def run_json(argv: Sequence[str], timeout: float) -> Probe:
    """Return the same for a program whose last line of stdout is a JSON object; {"absent": true} is the state
    "absent"."""
    with tempfile.TemporaryDirectory(prefix="kda-doctor-", ignore_cleanup_errors=True) as folder:
        probe = run(argv, timeout, cwd=folder)
    if not probe.ok:
        return probe
    try:
        data = json.loads(last_line(probe.data["out"]))
    except ValueError:
        return Probe("failed", says="the probe ended without an answer", seconds=probe.seconds)
    return Probe("absent" if data.get("absent") else "ok", data, seconds=probe.seconds)


def child(name: str, *args: str) -> Probe:
    return run_json([sys.executable, os.path.abspath(__file__), name, *args], TIMEOUTS[name])


def probe_backend(name: str) -> Probe:
    return run_json([sys.executable, "-m", "kda.tools.commands.probe_backend", name], TIMEOUTS["backend"])


def probe_fla() -> Probe:
    """Import FLA in a child process, if it is installed: that takes seconds."""
    if importlib.util.find_spec("fla") is None:
        return Probe("absent")
    return run_json([sys.executable, "-m", "kda.tools.commands.probe_fla"], TIMEOUTS["fla"])


FAMILIES = ("kimi_linear", "glm5_next", "bailing_hybrid")  # transformers' families of models that have layers of KDA


def find_families() -> tuple[str, ...]:
    """Return those of them that this transformers has and that call FLA's function, by what their files say."""
    spec = importlib.util.find_spec("transformers")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return tuple(family for family in FAMILIES if any(_calls_fla(folder, family) for folder in folders))


def _calls_fla(folder: str, family: str) -> bool:
    try:
        with open(os.path.join(folder, "models", family, f"modeling_{family}.py"), encoding="utf-8") as file:
            return '"chunk_kda"' in file.read()
    except OSError:
        return False


def find_plugins() -> tuple[str, ...]:
    """Return the engines to which an installed distribution offers kda."""
    def offered(group: str) -> bool:
        return any(point.value.startswith("kda.engines:") for point in importlib.metadata.entry_points(group=group))

    return tuple(engine for engine, group in PLUGINS.items() if offered(group))


def last_line(text: str) -> str:
    from ptxkit.commands.layout import strip_ansi  # here, as a child must not import kda

    lines = [line.strip() for line in strip_ansi(text).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _child_environment() -> dict[str, str]:
    """Let a child import what its parent could, whatever folder it runs in."""
    path = os.pathsep.join(os.path.abspath(entry or ".") for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(process: subprocess.Popen) -> None:
    """Kill a child; one that is stuck in the kernel, or whose own children hold the pipes, is left behind."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=2)


# ---------------------------------------------------------------------------------------------- programs and files

_GPU_FIELDS = "uuid,name,compute_cap,memory.total,compute_mode,mig.mode.current,driver_version"


def nvidia_smi() -> Probe:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Probe("absent")

    def ask(*args: str) -> Probe:
        return run([program, *args], TIMEOUTS["smi"])

    gpus = ask(f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")
    if not gpus.ok:
        return gpus
    apps, banner = ask("--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"), ask()
    return Probe("ok", read_smi(*(p.data.get("out", "") for p in (gpus, apps, banner))), seconds=gpus.seconds)


def read_smi(gpus: str, apps: str, banner: str) -> dict:
    """Return what three answers of nvidia-smi say: the GPUs, who computes on them, and the CUDA that the driver
    runs."""
    users: dict[str, list] = {}
    for uuid, pid, name in (_csv(line, 3) for line in apps.splitlines() if line.count(",") >= 2):
        if pid.isdigit():
            users.setdefault(uuid, []).append((int(pid), os.path.basename(name)))
    cards, driver = [], None
    for line in gpus.splitlines():
        if line.count(",") < 6:
            continue
        uuid, name, cc, memory, mode, mig, driver = _csv(line, 7)
        cards.append({"name": name, "cc": release(cc) or (0, 0), "memory": int(memory) << 20 if memory.isdigit() else 0,
                      "uuid": uuid, "mode": mode, "mig": mig == "Enabled", "users": users.get(uuid, [])})
    cuda = re.search(r"CUDA (?:\w+ )?Version: *(\d+\.\d+)", banner)
    return {"gpus": cards, "driver": driver, "cuda": release(cuda[1]) if cuda else None}


def _csv(line: str, columns: int) -> list[str]:
    return [cell.strip() for cell in line.split(",", columns - 1)]


def find_ptxas() -> tuple[Ptxas, ...]:
    candidates = {os.environ.get("CUTE_DSL_PTXAS_PATH"): True, shutil.which("ptxas"): False}
    return tuple(_ptxas(path, by_variable) for path, by_variable in candidates.items() if path)


def _ptxas(path: str, by_variable: bool) -> Ptxas:
    out = run([path, "--version"], TIMEOUTS["ptxas"]).data.get("out", "")
    said = re.search(r"release (\d+\.\d+)", out)
    return Ptxas(path, release(said[1]) if said else None, by_variable)


def cache_path() -> str:
    if os.environ.get("KDA_CACHE_DIR"):
        return os.path.abspath(os.path.expanduser(os.environ["KDA_CACHE_DIR"]))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "kda") if os.path.isabs(base) else ""


def look_at_cache() -> CacheFacts:
    path = cache_path()
    if not path:
        return CacheFacts("", writable=False)
    from ptxkit.compile import store  # here, as a child must not import kda

    place = store.existing(path)
    size = {"files": 0, "bytes": 0, "unreadable": 0, "stale": 0}
    exists = place == path
    distrusted = _measure(path, size) if exists else ""
    return CacheFacts(path, exists, store.writable(path), distrusted, _free(place), filesystem_of(place), **size)


def look_at_launches() -> Probe:
    from ptxkit.compile import c_compiler, launch_list  # here, as a child must not import kda

    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch else None
    headers = [os.path.join(folder, "include", "torch", "csrc") for folder in folders or ()]
    return Probe("ok", {
        "in_c": launch_list.in_c() is not None, "header": os.path.exists(header),
        "cpp_compiler": c_compiler.path(c_compiler.CPP), "torch_headers": any(map(os.path.isdir, headers)),
    })


def _measure(path: str, size: dict[str, int]) -> str:
    """Count what is there; why nothing of it is read, if that is so."""
    from kda.tools.commands.stale import judge
    from ptxkit.compile.store import Store

    def refuse(error: OSError) -> None:
        size["unreadable"] += 1

    for folder, _, names in os.walk(path, onerror=refuse):
        for name in names:
            file = os.path.join(folder, name)
            try:
                size["bytes"] += os.lstat(file).st_size
                size["files"] += 1
                size["unreadable"] += not os.access(file, os.R_OK)
            except OSError as error:
                refuse(error)
    store, why_stale = Store(path), judge()
    for entry in store.entries():
        size["unreadable"] += entry.about is None
        size["stale"] += entry.bytes if entry.about and why_stale(entry.about) else 0
    return store.distrusted() or ""


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def filesystem_of(path: str, mounts: str = "/proc/mounts") -> str:
    """Return the kind of file system, or "" if it is unknown."""
    try:
        with open(mounts, encoding="utf-8", errors="replace") as file:
            table = [line.split()[1:3] for line in file]
    except OSError:
        return ""
    real = os.path.join(os.path.realpath(path), "")
    prefixes = [(len(point), kind) for point, kind in table if real.startswith(os.path.join(point, ""))]
    return max(prefixes, default=(0, ""))[1]


# ---------------------------------------------------------------------------------------------- inside a child


def child_torch() -> dict:
    import torch

    number = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    driver = [number // 1000, number % 1000 // 10] if number else None
    gpus: list[dict] = []
    data = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "driver_cuda": driver, "why": ""}
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError, OSError) as error:
        return {**data, "why": str(error).partition("\n")[0]}
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        gpus.append({
            "name": p.name, "cc": [p.major, p.minor], "sms": p.multi_processor_count, "memory": p.total_memory,
            "smem": getattr(p, "shared_memory_per_block_optin", 0), "uuid": f"GPU-{getattr(p, 'uuid', '')}",
        })
    return data


def child_triton() -> dict:
    import triton
    import triton.language

    data = {"version": triton.__version__, "driver": True, "why": ""}
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # its kind depends on the version of Triton
        data |= {"driver": False, "why": str(error).partition("\n")[0]}
    return data


def child_cutlass() -> dict:
    import cutlass
    import cutlass.cute

    return {"version": getattr(cutlass, "__version__", "")}


def child_trace(*archs: str) -> dict:
    os.environ |= {"CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": os.getcwd()}       # read once, at the import
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    @cute.kernel
    def add_one(x):
        thread, _, _ = cute.arch.thread_idx()
        x[thread] = x[thread] + cutlass.Float32(1.0)

    @cute.jit
    def launch(x):
        add_one(x).launch(grid=[1, 1, 1], block=[32, 1, 1])

    built, ptx = [], None
    began = time.monotonic()
    for arch in archs:
        cute.compile(launch, make_fake_compact_tensor(cutlass.Float32, (32,)), options=f"--gpu-arch={arch}")
        files = [name for name in os.listdir() if arch in name]
        if not any(name.endswith(".cubin") and os.path.getsize(name) for name in files):
            raise RuntimeError(f"no machine code was written for {arch}")
        built.append(arch)
        for name in files:
            if name.endswith(".ptx"):
                with open(name) as file:
                    ptx = re.search(r"^\.version (\d+)\.(\d+)", file.read(), re.MULTILINE)
    return {"built": built, "ptx": [int(ptx[1]), int(ptx[2])] if ptx else None, "seconds": time.monotonic() - began}


def child_nvrtc() -> dict:
    try:
        from cuda.bindings import nvrtc
    except ModuleNotFoundError:
        return {"absent": True}
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:                         # cuda-python is there, libnvrtc is not
        return {"version": None, "why": str(error).partition("\n")[0]}
    return {"version": [major, minor]}


CHILDREN = {"torch": child_torch, "triton": child_triton, "cutlass": child_cutlass, "trace": child_trace,
            "nvrtc": child_nvrtc}
IMPORTS = {"trace": "cutlass", "nvrtc": "cuda"}


def main(name: str, *args: str) -> None:
    folder = os.path.dirname(os.path.abspath(__file__))   # scripts are found in it, top-level modules must not be
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    absent = importlib.util.find_spec(IMPORTS.get(name, name)) is None
    print("\n" + json.dumps({"absent": True} if absent else CHILDREN[name](*args)))


if __name__ == "__main__":
    main(*sys.argv[1:])
