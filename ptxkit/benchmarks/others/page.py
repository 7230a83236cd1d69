"""The page of what ran: a row for each case, with the verdict of a person on each finding."""

import json

from .cases import NOT_RUN, PROJECTS

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
INTRODUCTION = """These kernels are unmodified; `python -m ptxkit.benchmarks.others` calls them on CPU tensors of small
sizes and compares the results with torch's. "Correct" means that they agree. Wrong results and findings have the
verdict of a person who read the kernel: *true* is an error of the kernel, which hardware may mask; *harmless* is
none. `python -m ptxkit.benchmarks.others.published` says what the clock predicts of FlashInfer's, whose times on a B200
are published."""


def verdict(kernel, what):
    return next((said for (part, kind), said in VERDICTS.items() if part in kernel and kind == what), "not read yet")


def page(projects):
    """Return the page of what is on file: project -> its version, and rows of a kernel each."""
    lines = ["# Kernels by others, under the simulator", "", INTRODUCTION]
    for project, (title, version, *_) in PROJECTS.items():
        if project in projects and projects[project]["version"] == version:
            lines += ["", f"## {title}, {version}", "", "| kernel | arch | correct | warp instructions | findings |"]
            lines += ["|---|---|---|---|---|", *(row_of(*row) for row in projects[project]["rows"])]
    lines += ["", "## Not run, and why", "", "| project | kernels | why |", "|---|---|---|"]
    lines += [f"| {PROJECTS[project].title} | {kernels} | {why} |" for project, kernels, why in NOT_RUN]
    return "\n".join(lines) + "\n"


def row_of(kernel, arch, correct, instructions, kinds):
    if correct == "NO":
        correct = f"no: {verdict(kernel, 'NO')}"
    return f"| {kernel} | {arch} | {correct} | {instructions:,} | {findings(kernel, kinds)} |"


def findings(kernel, kinds):
    return "; ".join(f"{kind}: {verdict(kernel, kind)}" for kind in kinds) or "none"


def text(projects):
    """Return the file's text, a line for each kernel."""
    def lines(rows):
        return ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)

    parts = [f'"{project}": {{"version": "{part["version"]}", "rows": [\n{lines(part["rows"])}\n]}}'
             for project, part in projects.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"
