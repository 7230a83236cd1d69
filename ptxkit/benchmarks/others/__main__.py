"""Runs kernels of public projects, unmodified, under the simulator, and checks their results.

    python -m ptxkit.benchmarks.others --sources FOLDER [--only TEXT] [--write ptxkit/docs/data/kernels_of_others.json]

FOLDER holds checkouts, which are cloned there where they are missing, and packages: the error for one that is missing
names the command that installs it. A file per project has its cases, and `cases.py` the versions.
Kernels in CUDA C++ need nvcc. Each case calls a project's kernel or its host function on CPU tensors and compares the
result with torch's.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import subprocess
import time
import traceback

import torch

from .cases import CASES, PACKAGES, PROJECTS
from .page import row_of, text


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
    """Return (correct?, findings by kind, warp instructions, seconds)."""
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
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="put what ran instead of its projects' rows")
    args = parser.parse_args()
    rows = collections.defaultdict(list)
    for project, kernel, arch, function in CASES:
        if args.only not in f"{project} {kernel}":
            continue
        fetched(args.sources, project)
        correct, kinds, instructions, seconds = outcome(project, kernel, arch, function, args.sources)
        rows[project].append([kernel, arch, correct, instructions, [*kinds]])
        print(f"{project:13} {row_of(*rows[project][-1])}  {seconds:.1f} s", flush=True)
    if args.write:
        new = {project: {"version": PROJECTS[project].version, "rows": rows_of} for project, rows_of in rows.items()}
        args.write.write_text(text(json.loads(args.write.read_text()) | new))


if __name__ == "__main__":
    main()
