"""Runs kernels of public projects, unmodified, under the simulator, checks their results, and writes a page.

    python benchmarks/kernels_of_others.py --sources FOLDER [--only TEXT] [--page ptxkit/docs/kernels_of_others.md]

FOLDER holds checkouts, which are cloned there where they are missing, and packages: the error for one that is missing
names the command that installs it. `others/` has the cases, a file per project, and `others/cases.py` the versions.
Kernels in CUDA C++ need nvcc. Each case calls a project's kernel or its host function on CPU tensors and compares the
result with torch's.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import subprocess
import sys
import time
import traceback

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import others  # noqa: F401  registers the cases
from others.cases import CASES, NOT_RUN, PACKAGES, PROJECTS

COPIES = "harmless: warps that hold copies of a block read it, and do not store"
VERDICTS = {  # (part of a kernel's name, finding, or "NO": a wrong result) -> what reading the kernel says
    ("fp16ScalarProduct", "NO"): "the kernel starts at threadIdx + blockDim + blockIdx, where * is meant",
    ("simple_wmma_bf16gemm", "NO"): "the kernel reads tile (k, n) of B where (n, k) is meant",
    ("MultiStageLargeChunk", "NO"): "the kernel reads B by A's offsets: its own test has constant matrices",
    ("MultiStageLargeChunk", "race-write-write"): "true: `<=` starts a fifth copy into four buffers",
    ("MultiStageLargeChunk", "race-read-write"): "true, for the same reason",
    ("reduceSinglePass<", "race-write-read"): "true by the memory model: no fence between the ticket and the reads",
    ("reduceSinglePass<", "race-write-write"): "true by the memory model, for the same reason",
    ("layernorm_backward_kernel10", "race-write-read"): "true by the memory model: no fence between sums and counter",
    ("fused_classifier", "NO"): "what is left of a row is stepped by 1, where the number of threads is meant",
    ("fused_classifier", "race-lanes"): "true: two threads read and overwrite the same element, for that reason",
    ("cross_entropy, forward and backward", "race-read-write"): COPIES,
    ("rope", "race-read-write"): COPIES,
    ("rope", "race-write-read"): COPIES,
    ("lightning_attn", "NO"): "K is weighted before its load has landed (correct where loads land early)",
    ("lightning_attn", "uninitialised"): "true, for that reason: no wait for K's load",
    ("lightning_attn", "race-read-write"): "true, for that reason",
    ("lightning_attn", "race-write-read"): "true by the manual: tcgen05.commit publishes products, not a tcgen05.st",
    ("FlatKernelTma", "NO"): "O's stage is given back before its store has read it (correct where stores run early)",
    ("FlatKernelTma", "race-write-read"): "true, for that reason: no cp.async.bulk.wait_group.read",
    ("FlatKernelTma", "proxy"): "true: the inverse goes from stmatrix to wgmma without fence.proxy.async",
    ("FlatKernelTma", "uninitialised"): "harmless: what lies above the diagonal is read, and masked",
    ("chunk_kda, forward", "race-lanes"): "true by the memory model: lanes overwrite what others of their warp read",
    ("Marlin,", "uninitialised"): "harmless: fragments are loaded a step ahead, and the last ones are not used",
    ("Marlin,", "race-read-write"): "harmless, for the same reason: sums go where those fragments were",
    ("Marlin,", "race-lanes"): "harmless, for the same reason",
    ("educational_h100/level_05", "race-read-write"): "true: no barrier between the products and the next tile",
    ("educational_b200/level_09", "race-write-write"): "true: the first warpgroup gives tensor memory back alone",
    ("educational_b200/level_09", "race-read-write"): "true, for that reason: the second one may still read",
    ("bf16_h100_gemm", "mbarrier"): "true by the manual: every lane of a warp initialises the same mbarriers",
    ("fwd_attend_ker<64, true>", "peer-exited"): "true: nothing waits for tiles that a causal CTA does not use",
}


def fetched(folder, name):
    packages = folder / "packages"
    missing = [f"{package}=={version}" for package, version in PACKAGES.items()
               if not (packages / f"{package.replace('-', '_')}-{version}.dist-info").is_dir()]
    if missing:
        raise SystemExit(f"packages are missing: pip install --no-deps --target {packages} {' '.join(missing)}")
    project = PROJECTS[name]
    for beside in project.beside:
        fetched(folder, beside)
    if project.url and not (folder / name).exists():
        subprocess.run(["git", "clone", project.url, folder / name], check=True)
        subprocess.run(["git", "-C", folder / name, "checkout", project.version], check=True)


def outcome(project, kernel, arch, function, folder):
    """(correct?, findings by kind, warp instructions, seconds)."""
    torch.manual_seed(0)
    began = time.time()
    try:
        correct, runs = function(folder)
    except Exception as error:
        traceback.print_exc()
        return f"did not run: {str(error).splitlines()[0][:120]}", {}, 0, 0.0
    kinds = collections.Counter(f.kind for r in runs for f in r.findings)
    instructions = sum(r.counters["warp_instructions"] for r in runs)
    return "yes" if correct else "NO", dict(kinds), instructions, time.time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--page", type=pathlib.Path)
    asked = parser.parse_args()
    rows = []
    for project, kernel, arch, function in CASES:
        if asked.only not in f"{project} {kernel}":
            continue
        fetched(asked.sources, project)
        correct, kinds, instructions, seconds = outcome(project, kernel, arch, function, asked.sources)
        said = "; ".join(f"{kind}: {verdict(kernel, kind)}" for kind in kinds) or "none"
        if correct == "NO":
            correct = f"no: {verdict(kernel, 'NO')}"
        rows.append((project, f"| {kernel} | {arch} | {correct} | {instructions:,} | {said} |"))
        print(f"{project:13} {kernel:60} {arch:8} {correct:4} {said}  {seconds:.1f} s", flush=True)
    if asked.page:
        asked.page.write_text(page(rows, asked.page.read_text() if asked.page.exists() else ""))


def verdict(kernel, what):
    return next((said for (part, kind), said in VERDICTS.items() if part in kernel and kind == what), "not read yet")


def page(rows, before=""):
    """The page anew; sections of projects without rows stay as they were before."""
    kept = dict(section.split("\n", 1) for section in before.split("\n## ")[1:])
    lines = ["# Kernels by others, under the simulator", "", INTRODUCTION]
    for project, (title, version, *_) in PROJECTS.items():
        lines_of_project, heading = [line for p, line in rows if p == project], f"{title}, {version}"
        if lines_of_project:
            lines += ["", f"## {heading}", "", "| kernel | arch | correct | warp instructions | findings |"]
            lines += ["|---|---|---|---|---|", *lines_of_project]
        elif heading in kept:
            lines += ["", f"## {heading}", kept[heading].rstrip("\n")]
    lines += ["", "## Not run, and why", "", "| project | kernels | why |", "|---|---|---|"]
    lines += [f"| {PROJECTS[project].title} | {kernels} | {why} |" for project, kernels, why in NOT_RUN]
    return "\n".join(lines) + "\n"


INTRODUCTION = """Written by `benchmarks/kernels_of_others.py`. The kernels are unmodified; the script calls them on
CPU tensors of small sizes and compares the results with torch's. "Correct" means that they agree. Wrong results and
findings have the verdict of a person who read the kernel: *true* is an error of the kernel, which hardware may mask;
*harmless* is none."""

if __name__ == "__main__":
    main()
