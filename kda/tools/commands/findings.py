"""The checks of `kda doctor`: functions of made-up or gathered `MachineFacts` to an answer.

None means healthy with nothing to tell; an answer of status "ok" is healthy and tells what `-v` shows.  Checks stand
in the order in which they are printed, each with the probes that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from kda.errors import nearest
from kda.routing.capability import Capability
from kda.routing.dispatch import backend_names, backends_of_gpu, capabilities
from ptxkit.compile.target import code_for

from .probes import GpuFacts, MachineFacts, Probe, Ptxas, release

GIB = 1 << 30
REQUIRES_PYTHON = ">=3.10,<3.14"                          # for a checkout that is not installed
WITH_COMPILERS = (("Linux", "x86_64"), ("Linux", "aarch64"))     # where pyproject.toml asks for compilers
LOWEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}      # CUDA major -> driver that runs all of its minors
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse.", "9p", "afs", "wekafs")
FULL_DISK = 256 << 20
GET_A_C_COMPILER = "apt-get install gcc libc6-dev   (or set CC)"


class Diagnosis(NamedTuple):
    id: str
    status: str                              # "ok", "info", "warn", "fail", "crash"
    says: str
    fix: tuple[str, ...] = ()


Answer = tuple[str, ...]                     # a check's: status, what it says, and what fixes it


class Examination(NamedTuple):
    id: str
    title: str
    needs: tuple[str, ...]                   # probes
    look: Callable[[MachineFacts], Answer | None]

    def __call__(self, facts: MachineFacts) -> Diagnosis:
        """Return the finding, also where the check itself breaks or has nothing to tell."""
        try:
            status, says, *fix = self.look(facts) or ("ok", "")
            return Diagnosis(self.id, status, says, tuple(fix))
        except Exception as error:
            why = f"the check itself broke: {type(error).__name__}: {error}"
            return Diagnosis(self.id, "crash", why, ("report it with the output of `kda doctor --paste`",))


CHECKS: dict[str, Examination] = {}


def check(id: str, title: str, *needs: str):
    def register(look: Callable[[MachineFacts], Answer | None]):
        CHECKS[id] = Examination(id, title, needs, look)
        return look

    return register


# ---------------------------------------------------------------------------------------------- Python and packages


@check("python.version", "Python is one that kda supports")
def python_version(f: MachineFacts) -> Answer | None:
    wanted, found = f.requires_python or REQUIRES_PYTHON, ".".join(map(str, f.python))
    if SpecifierSet(wanted).contains(found):
        return "ok", f"{found}, kda needs {wanted}"
    return "fail", f"{found}, but kda needs {wanted}", "uv venv --python 3.12"


@check("deps.pins", "installed packages are the versions that kda asks for")
def deps_pins(f: MachineFacts) -> Answer | None:
    if f.requires is None:
        return "info", "kda is not installed, it runs from a checkout: no pins to compare with"
    wanted = [r for r in _requirements(f) if not r.url]
    wrong = [r for r in wanted if not _satisfied(r, f)]
    if not wrong:
        return "ok", f"{len(wanted)} requirements hold"
    found = [f.versions.get(canonicalize_name(r.name), "is missing") for r in wrong]
    says = [f"{r.name} {version}, kda needs {_specifier(r)}" for r, version in zip(wrong, found, strict=True)]
    return "fail", "; ".join(says), *(f"pip install '{_spelled(r)}'" for r in wrong)


def _requirements(f: MachineFacts) -> list[Requirement]:
    """Return the requirements that hold on this platform, without extras."""
    environment = {"extra": "", "platform_system": f.system[0], "platform_machine": f.system[1]}
    all_of_them = map(Requirement, f.requires or ())
    return [r for r in all_of_them if r.marker is None or r.marker.evaluate(environment)]


def _satisfied(r: Requirement, f: MachineFacts) -> bool:
    version = f.versions.get(canonicalize_name(r.name))
    return version is not None and r.specifier.contains(version, prereleases=True)


def _specifier(r: Requirement) -> str:
    return str(r.specifier) or "any version"


def _spelled(r: Requirement) -> str:
    extras = f"[{','.join(sorted(r.extras))}]" if r.extras else ""
    return f"{r.name}{extras}{r.specifier}"


def _install(f: MachineFacts, package: str, extra: str = "") -> str:
    """Return `pip install` of what we ask for, else of what is there, else of the newest."""
    ours = [r for r in _requirements(f) if canonicalize_name(r.name) == package]
    version = f.versions.get(package)
    package_found = f"{package}{extra}=={version}" if version else f"{package}{extra}"
    wanted = _spelled(ours[0]) if ours else package_found
    return f"pip install {'--force-reinstall ' if version else ''}'{wanted}'"


# ---------------------------------------------------------------------------------------------- GPU and driver


@check("gpu.visible", "torch sees a GPU", "torch", "smi")
def gpu_visible(f: MachineFacts) -> Answer | None:
    if f.gpus:
        first, count = f.gpus[0], len(f.gpus)
        known = {"SMs": first.sms, "GiB": f"{first.memory / GIB:.1f}" if first.memory else 0}
        numbers = "".join(f", {value} {unit}" for unit, value in known.items() if value)
        says = f"{count} device{'s' * (count > 1)}, {first.name}, compute capability {_dotted(first.cc)}{numbers}"
        return "ok", f"{says}   ({f.gpu_source})"
    says, *fix = next(answer for holds, *answer in _NO_GPU if holds(f))
    return "warn", says.format(f=f, **_no_gpu_words(f)), *fix


def _no_gpu_words(f: MachineFacts) -> dict[str, str]:
    return {
        "hidden": repr(f.env.get("CUDA_VISIBLE_DEVICES")),
        "torch": f"torch {f.torch.data.get('version', '')}".strip(),
        "gpu": f.smi_gpus[0].name if f.smi_gpus else "",
        "why": f.torch.data.get("why") or "torch names no reason",
    }


_CUDA_TORCH = "install a CUDA build of torch (its install page names the command)"

# (when, says, fix...): the first that holds is the cause
_NO_GPU = (
    (lambda f: f.env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
     "CUDA_VISIBLE_DEVICES is {hidden}: it hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
    (lambda f: f.torch.ok and not f.torch_cuda and f.smi_gpus,
     "{torch} has no CUDA in it and cannot use the {gpu}", _CUDA_TORCH),
    (lambda f: f.torch.ok and not f.torch_cuda,
     "no CUDA device, and {torch} could not use one",
     "nothing to do if this machine has no GPU", f"otherwise {_CUDA_TORCH}"),
    (lambda f: f.device_files is False,
     "no /dev/nvidia*: no GPU, or a container that was started without it",
     "nothing to do if this machine has no GPU", "otherwise start it with `docker run --gpus all ...`"),
    (lambda f: f.smi.state in ("failed", "crashed"),
     "the driver does not answer: nvidia-smi {f.smi.says}",
     "run `nvidia-smi`; if it fails too, reload the driver or restart the machine"),
    (lambda f: f.torch.ok, "no CUDA device: {why}", "run `nvidia-smi`, and `kda doctor driver.version`"),
    (lambda f: True,
     "no CUDA device that torch or nvidia-smi could name", "fix torch.import first, or run `nvidia-smi`"),
)


@check("gpu.capability", "a backend has kernels for this GPU", "torch", "smi")
def gpu_capability(f: MachineFacts) -> Answer | None:
    if not f.gpus:
        return _nothing_to_see("no GPU")
    cc, takers = f.gpus[0].cc, backends_with_kernels(f.gpus[0].cc, capabilities())
    if takers:
        return "ok", f"{_dotted(cc)} has kernels in {', '.join(takers)}"
    says = f"{_dotted(cc)} ({f.gpus[0].name}) has no backend with kernels"
    return "warn", says, "backend='reference' runs there, slowly; auto never picks it on a GPU"


def backends_with_kernels(cc: tuple[int, int], backends: tuple[Capability, ...]) -> list[str]:
    return [b.backend for b in backends if code_for(cc, b.archs)]


@check("gpu.busy", "nobody else computes on the GPU", "torch", "smi")
def gpu_busy(f: MachineFacts) -> Answer | None:
    if not f.gpus:
        return _nothing_to_see("no GPU")
    if not f.smi_gpus:
        return _nothing_to_see("nvidia-smi does not answer")
    gpu = next((g for g in f.smi_gpus if g.uuid == f.gpus[0].uuid), f.smi_gpus[0])
    says, fix = [], []
    if gpu.users:
        says.append("also used by " + ", ".join(f"pid {pid} ({name})" for pid, name in gpu.users))
        fix.append(_free_gpu(f.smi_gpus) or f"wait for pid {gpu.users[0][0]} before `kda bench`")
    if gpu.mig:
        says.append("a MIG slice: fewer SMs and less bandwidth than the whole GPU")
        fix.append("compare `kda bench` only with runs on the same slice")
    if gpu.mode != "Default":
        says.append(f"compute mode {gpu.mode}: a second process cannot use it")
        fix.append("sudo nvidia-smi -c DEFAULT")
    return ("warn", f"{gpu.name} is {'; '.join(says)}", *fix) if says else None


def _free_gpu(gpus: tuple[GpuFacts, ...]) -> str:
    return next((f"export CUDA_VISIBLE_DEVICES={i}" for i, g in enumerate(gpus) if not g.users), "")


@check("driver.version", "the driver runs the CUDA of torch and of the DSL", "torch", "smi")
def driver_version(f: MachineFacts) -> Answer | None:
    if not f.driver_cuda:
        return _nothing_to_see("no driver answers")
    major = f.driver_cuda[0]
    says = f"{f.driver or 'driver'}, runs CUDA up to {_dotted(f.driver_cuda)}"
    majors = {"torch": f.torch_cuda and f.torch_cuda[0], "cutlass-dsl": _dsl_cuda(f)}
    needs = {who: cuda for who, cuda in majors.items() if cuda}
    if all(cuda <= major for cuda in needs.values()):
        return "ok", says
    newest = max(needs.values())
    wants = ", ".join(f"{who} needs CUDA {cuda}" for who, cuda in needs.items() if cuda > major)
    fix = [f"install driver {LOWEST_DRIVER.get(newest, f'for CUDA {newest}')} or newer"]
    fix += [f"or a torch built for CUDA {major} (its install page names the command)"] * (needs.get("torch", 0) > major)
    fix += [f"or `pip install 'nvidia-cutlass-dsl[cu{major}]'`"] * (needs.get("cutlass-dsl", 0) > major)
    return "fail", f"{says}; {wants}", *fix


def _dsl_cuda(f: MachineFacts) -> int | None:
    """Return the oldest CUDA major that the installed libraries of the DSL are made for."""
    return next((cuda for cuda in (12, 13) if f"nvidia-cutlass-dsl-libs-cu{cuda}" in f.versions), None)


# ---------------------------------------------------------------------------------------------- imports


@check("torch.import", "torch can be imported", "torch")
def torch_import(f: MachineFacts) -> Answer | None:
    if f.torch.ok:
        sees = "sees the GPU" if f.torch_gpus else "sees no GPU"
        return "ok", f"{f.torch.data.get('version')}, {sees}"
    if f.torch.state == "absent":
        return "fail", "torch is not installed: nothing can run", _install(f, "torch")
    return _broken(f.torch, "torch", f, _install(f, "torch"))


@check("cutlass.import", "CuTe DSL can be imported", "cutlass", "torch", "smi")
def cutlass_import(f: MachineFacts) -> Answer | None:
    if f.cutlass.ok:
        return "ok", _version(f.cutlass, f, "nvidia-cutlass-dsl")
    if f.cutlass.state == "absent":
        without = "backends written in CuTe DSL can be neither built nor run"
        return _not_there("nvidia-cutlass-dsl", without, f, _extra(f))
    return _broken(f.cutlass, "cutlass", f, _install(f, "nvidia-cutlass-dsl", _extra(f)))


@check("cutlass.trace", "CuTe DSL builds a small kernel, without a GPU", "trace", "cutlass")
def cutlass_trace(f: MachineFacts) -> Answer | None:
    if f.trace.ok:
        built, seconds = " and ".join(f.trace.data.get("built", ())), f.trace.data.get("seconds", 0.0)
        version = _version(f.cutlass, f, "nvidia-cutlass-dsl")
        return "ok", f"{version} built a probe for {built} in {seconds:.1f} s".strip()
    if f.trace.state == "absent":
        return "info", "not tried: nvidia-cutlass-dsl is not installed"
    if f.cutlass.state in ("failed", "crashed"):
        return "info", "not tried to the end: cutlass.import failed"
    fix = ["unset " + name for name in ("CUTE_DSL_PTXAS_PATH", "CUTE_DSL_ARCH") if name in f.env]
    says = "building a probe " + _how(f.trace)
    return _status(f.trace), says, *fix, _install(f, "nvidia-cutlass-dsl", _extra(f))


@check("triton.import", "Triton can be imported, and finds the GPU that torch finds", "triton", "torch", "smi")
def triton_import(f: MachineFacts) -> Answer | None:
    if f.triton.state == "absent":
        return _not_there("triton", "backends written in Triton cannot run", f)
    if not f.triton.ok:
        return _broken(f.triton, "triton", f, *_triton_fix(f.triton.says, f))
    version, why = _version(f.triton, f, "triton"), reworded(f.triton.data.get("why") or "")
    if f.torch_gpus and not f.triton.data.get("driver", True):
        return "fail", f"{version} was imported, but finds no GPU: {why}", *_triton_fix(why, f)
    return "ok", version


@check("nvrtc.library", "CUDA C++ kernels can be built: there is a libnvrtc", "nvrtc", "torch", "smi")
def nvrtc_library(f: MachineFacts) -> Answer | None:
    without = "the float32 kernels of sm89 can be neither built nor simulated"
    if f.nvrtc.state == "absent":
        return _not_there("cuda-python", without, f)
    if not f.nvrtc.ok:
        return _broken(f.nvrtc, "cuda.bindings", f, _install(f, "cuda-python"))
    if f.nvrtc.data.get("version"):
        return "ok", _dotted(tuple(f.nvrtc.data["version"]))
    old = f.versions.get("cuda-bindings", "").startswith("12.")
    fix = f"pip install nvidia-cuda-nvrtc{'-cu12' * old}   (a CUDA build of torch and a CUDA toolkit contain it)"
    return "warn", f"libnvrtc is not installed: {without}", fix


def _triton_fix(why: str, f: MachineFacts) -> tuple[str, ...]:
    mount = "mount the driver (`docker run --gpus all`), or install the package that has libcuda.so.1"
    return *([mount] if "libcuda" in why or "driver" in why else []), _install(f, "triton")


REWORDED = ((r"\d+ active drivers \(.*", "no GPU driver visible to Triton"),)


def reworded(message: str) -> str:
    """Return what another package says, in words that help."""
    for pattern, words in REWORDED:
        message = re.sub(pattern, words, message)
    return message


def _not_there(package: str, without: str, f: MachineFacts, extra: str = "") -> Answer:
    """A missing package hurts where there is a GPU for it to run on."""
    if f.system not in WITH_COMPILERS:
        where = " ".join(f.system)
        return "info", f"{package} is not installed and is not needed on {where}: {without}"
    status, fix = "warn" if f.gpus else "info", _install(f, package, extra)
    return status, f"{package} is not installed: {without}", fix


def _broken(probe: Probe, module: str, f: MachineFacts, *fix: str) -> Answer:
    version = f.versions.get({"cutlass": "nvidia-cutlass-dsl", "cuda.bindings": "cuda-bindings"}.get(module, module))
    installed = f"{version} is installed; " if version else ""
    return _status(probe), f"{installed}importing {module} {_how(probe)}", *fix


def _status(probe: Probe) -> str:
    return "crash" if probe.state == "crashed" else "fail"


def _how(probe: Probe) -> str:
    return probe.says if probe.state == "crashed" else f"failed: {reworded(probe.says)}"


def _version(probe: Probe, f: MachineFacts, package: str) -> str:
    return f.versions.get(package) or probe.data.get("version") or ""


def _extra(f: MachineFacts) -> str:
    cuda = f.torch_cuda or f.driver_cuda
    return f"[cu{cuda[0]}]" if cuda else ""


# ---------------------------------------------------------------------------------------------- tools


@check("cuda_python.skew", "cuda-python fits the driver", "torch", "smi")
def cuda_python_skew(f: MachineFacts) -> Answer | None:
    package = next((name for name in ("cuda-bindings", "cuda-python") if name in f.versions), None)
    installed = release(f.versions[package]) if package else None
    if package is None or installed is None:
        return _nothing_to_see("cuda-python is not installed")
    if not f.driver_cuda:
        return _nothing_to_see("no driver answers")
    says = f"{package} {f.versions[package]}, driver for CUDA {_dotted(f.driver_cuda)}"
    if installed[0] <= f.driver_cuda[0]:
        return "ok", says
    return "warn", says, f"pip install '{package}=={f.driver_cuda[0]}.*'"


# PTX that a ptxas reads, by CUDA release, where it is not simply four majors behind
_PTX_OF_CUDA = {(12, 6): (8, 5), (12, 7): (8, 6), (12, 8): (8, 7), (12, 9): (8, 8)}


def ptx_read_by(cuda: tuple[int, int]) -> tuple[int, int]:
    return _PTX_OF_CUDA.get(cuda, (cuda[0] - 4, cuda[1]))


@check("ptxas.version", "the ptxas that CuTe DSL is told to use reads what it writes", "ptxas", "trace")
def ptxas_version(f: MachineFacts) -> Answer | None:
    written = f.trace.data.get("ptx")
    named = next((p for p in f.ptxas if p.by_variable), None)
    if named and named.release is None:
        return "warn", f"CUTE_DSL_PTXAS_PATH={named.path} is no ptxas that runs", _UNSET_PTXAS
    tool = named or next(iter(f.ptxas), None)
    if tool is None or tool.release is None:
        return "ok", "no other ptxas, cutlass-dsl has its own"
    if not written:
        return _nothing_to_see("cutlass.trace wrote no PTX to compare with")
    return _compare(tool, tool.release, (written[0], written[1]))


_UNSET_PTXAS = "unset CUTE_DSL_PTXAS_PATH"


def _compare(tool: Ptxas, release: tuple[int, int], written: tuple[int, int]) -> Answer:
    reads = ptx_read_by(release)
    says = f"{tool.path} {_dotted(release)} reads PTX <= {_dotted(reads)}, cutlass-dsl writes {_dotted(written)}"
    if reads >= written:
        return "ok", says
    if not tool.by_variable:
        return "info", f"{says}; it is not used, cutlass-dsl has its own"
    return "warn", says, _UNSET_PTXAS, f"or name the ptxas of CUDA {written[0] + 4}.{written[1]} or newer"


# variable -> (status when set, what it does now)
VARIABLES = {
    "CUTE_DSL_ARCH": ("warn", "CuTe DSL builds for it, whatever the device is"),
    "CUTE_DSL_NO_CACHE": ("warn", "CuTe DSL builds every kernel anew in each process"),
    "CUTE_DSL_PTXAS_PATH": ("warn", "CuTe DSL assembles with it, not with its own ptxas"),
    "TRITON_INTERPRET": ("warn", "Triton kernels are interpreted on the CPU: slow, and bfloat16 ties round up"),
    "KDA_VLLM": ("info", "0: vLLM runs without kda"),
    "KDA_SGLANG": ("info", "0: SGLang runs without kda"),
    "KDA_BACKEND": ("info", "calls without backend= use this backend or fail"),
    "KDA_CACHE_DIR": ("info", "built kernels are kept there"),
    "KDA_QUIET": ("info", "nothing is said of kernels that are built, nor of progress"),
}
_OFF = {"KDA_QUIET": "0", "TRITON_INTERPRET": "0", "CUTE_DSL_NO_CACHE": "0"}


@check("env.overrides", "no variable changes what runs")
def env_overrides(f: MachineFacts) -> Answer | None:
    names = [n for n in f.env if (n in VARIABLES or n.startswith("KDA_")) and f.env[n] not in ("", _OFF.get(n))]
    overrides = [_override(name, f.env[name]) for name in sorted(names)]
    if not overrides:
        return None
    status = next((word for word in ("fail", "warn") if word in [t[0] for t in overrides]), "info")
    fix = [fix for level, _, fix in overrides if level != "info"]
    return status, "; ".join(says for _, says, _ in overrides), *fix


def _override(name: str, value: str) -> tuple[str, str, str]:
    """Return the status of an environment variable, what it does, and a fix."""
    if name not in VARIABLES:
        near = nearest(name[4:], [n[4:] for n in VARIABLES if n.startswith("KDA_")])       # all begin alike
        return "warn", f"{name}: no such variable{f', did you mean KDA_{near}?' if near else ''}", f"unset {name}"
    backends = ["auto", *backend_names()]
    if name == "KDA_BACKEND" and value not in backends:
        _, builders = backends_of_gpu(value)                                   # the nearest of h100 would be sm100
        near = builders[0] if builders else nearest(value, backends)
        fix = f"export KDA_BACKEND={near}" if near else f"unset KDA_BACKEND   (or one of {', '.join(backends)})"
        return "fail", f"KDA_BACKEND={value}: no such backend, every call fails", fix
    status, does = VARIABLES[name]
    return status, f"{name}={value}: {does}", f"unset {name}"


# ---------------------------------------------------------------------------------------------- files, others


@check("cache.dir", "built kernels can be kept", "cache")
def cache_dir(f: MachineFacts) -> Answer | None:
    c, elsewhere = f.cache, "export KDA_CACHE_DIR=/local/path"
    remote = c.filesystem.startswith(NETWORK_FILESYSTEMS)
    if not c.path:
        return "fail", "there is no home directory to keep built kernels in", elsewhere
    size = f"{in_bytes(c.bytes)}, {c.files} file{'s' * (c.files != 1)}" if c.exists else "not there yet"
    for broken, status, why in (
        (not c.writable, "fail", "cannot be written" if c.exists else "cannot be made"),
        (c.free is not None and c.free < FULL_DISK, "fail", f"is on a full disk, {in_bytes(c.free or 0)} left"),
        (remote, "warn", f"is on a network disk ({c.filesystem}): slow, and locks may not hold"),
    ):
        if broken:
            return status, f"{c.path} {why}", elsewhere
    return "ok", f"{c.path}, {size}"


@check("cache.trust", "nobody else can put code into the cache", "cache")
def cache_trust(f: MachineFacts) -> Answer | None:
    if not f.cache.distrusted:
        return None
    why, _, way_out = f.cache.distrusted.partition("; ")
    fix = way_out.replace("`", "").split(", or ")
    return "fail", f"{why}: nothing is read or kept there, each process builds anew", *fix


@check("cache.stale", "cache files are readable, and stale kernels total under 1 GiB", "cache")
def cache_stale(f: MachineFacts) -> Answer | None:
    c, clean = f.cache, "kda cache clean"
    if c.unreadable:
        return "warn", f"{c.unreadable} unreadable in {c.path}", clean
    if c.stale > GIB:
        return "warn", f"{c.path} holds {in_bytes(c.stale)} built from other source or by another compiler", clean
    return None


@check("simulator.compiler", "kernels can be simulated without their GPU")
def simulator_compiler(f: MachineFacts) -> Answer | None:
    if f.c_compiler:
        return "ok", f"kda.simulator is built with {f.c_compiler}"
    says = "there is no C compiler: kda.simulator, and with it `kda selftest --arch`, cannot be built"
    return "warn", says, GET_A_C_COMPILER


@check("launches.compiler", "C gives the launches of a call to the driver", "launches", "torch", "smi")
def launches_compiler(f: MachineFacts) -> Answer | None:
    if f.launches.data.get("in_c"):
        return "ok", f"lists of launches run in C, built with {f.c_compiler}"
    status, instead = "warn" if f.gpus else "info", "Python runs lists of launches, and a call costs the host more"
    if not f.c_compiler:
        return status, f"there is no C compiler: {instead}", GET_A_C_COMPILER
    if not f.launches.data.get("header"):
        return status, f"Python.h is not installed: {instead}", "apt-get install python3-dev"
    return status, f"{f.c_compiler} cannot build them: {instead}", "export CC=gcc"


@check("calls.compiler", "calls run in C++", "launches", "torch", "smi")
def calls_compiler(f: MachineFacts) -> Answer | None:
    status, instead = "warn" if f.gpus else "info", "calls run in Python, and a step costs the host about twice as much"
    if not (compiler := f.launches.data.get("cpp_compiler")):
        return status, f"there is no C++ compiler: {instead}", "apt-get install g++   (or set CXX)"
    if not f.launches.data.get("torch_headers"):
        return status, f"this torch has no headers: {instead}", "pip install --force-reinstall torch"
    if not f.launches.data.get("in_c"):
        return status, f"no C gives launches to the driver, so {instead}", "see launches.compiler"
    return "ok", f"calls run in C++, which {compiler} builds in the background of the first call"


def _nothing_to_see(why: str) -> Answer:
    return "info", f"not looked at: {why}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def in_bytes(number: int) -> str:
    if number >= GIB:
        return f"{number / GIB:.1f} GiB"
    return f"{number / (1 << 20):.0f} MiB" if number >= 1 << 20 else f"{number / (1 << 10):.0f} KiB"
