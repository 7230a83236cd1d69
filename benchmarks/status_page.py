"""The page of the project's status: what is stable, what ran on which GPU, and what each backend accepts.

docs/written.py writes it, from the changelog, the ledger and the backends' declarations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from kda.routing.capability import Capability
from kda.tools.verify.ledger import FAILED, RAN, Known, Ledger, cards, host_code, last_date
from ptxkit.compile.target import TARGETS, code_for, parse

from . import common
from .evidence_cases import MORE_TESTS
from .ledger_page import table

CALLS = {                                    # the first words of a host path -> what a user calls it
    "forward": "`chunk_kda` without gradients", "step": "`chunk_kda`, a training step",
    "backward alone": "`chunk_kda_bwd`", "decode_step": "`decode_step`", "recurrent": "`fused_recurrent_kda`",
    "fused_recurrent_kda": "`fused_recurrent_kda`", "chunk_kda from and to slots": "`chunk_kda` on slots of a pool",
    "prefill from and to slots": "`chunk_kda` on slots of a pool", "nn.KimiDeltaAttention": "`kda.nn`, the layer",
    "two GPUs of one host": "`kda.parallel`, two GPUs",
    **dict.fromkeys((path.partition(": ")[2] for path in MORE_TESTS), "its own tests, beside those of calls"),
}
STABLE = (                                   # what, how stable it is, where that is said
    ("functions and classes in `kda.__all__`, `kda.nn`, `kda.parallel`; the arguments of FLA 0.6.0", "public"),
    ("commands, their options, exit codes and `--json` [keys](json.md)", "public"),
    ("ids of [errors](errors.md); the variables `KDA_BACKEND`, `KDA_CACHE_DIR`, `KDA_QUIET`, `KDA_VLLM`, `KDA_SGLANG`",
     "public"),
    ("`ptxkit`: names in `ptxkit.__all__`, its fixture and options for pytest", "public"),
    ("plug-ins for vLLM and SGLang", "public switches; tested on a CPU, not on a GPU"),
    ("which backend runs a call, the last bits of its results, files in the cache", "internal: may change at any time"),
    ("programs in `examples` and `benchmarks`", "not installed: may change at any time"),
)
LIMITS = (
    "A `g` that holds decays must be at most 0. Values of tensors are not checked ([tutorial](tutorial.md)).",
    "There are no second derivatives, and forward-mode AD does not pass through kernels ([FLA](fla.md)).",
    "With few heads a GPU waits for the host, unless a CUDA graph replays the call\n"
    "  ([host time](results/reference.md#host-time)).",
    "Quantised weights are not read ([layer](layer.md)).",
    "`kda.parallel` cannot tell calls apart that differ in q, k, v, g and beta alone ([several GPUs](parallel.md)).",
    "The simulator's clock was compared with an H200 alone ([its error](results/clock.md#its-error)).",
)

PAGE = """# Status

Version {version}. Before 1.0 a MINOR version may remove what an earlier one has deprecated
([policy](policy.md)).

## What is stable

| part | state |
|---|---|
{stable}

## What ran on which GPU

*Ran* means: on that GPU, with the code that is here, within [budgets](numerics.md) of float64
([evidence](results/evidence.md)). *Simulated* means: on a CPU, from the kernels' PTX, and on no GPU. A call also counts
by the code on the host that runs it: *changed since* says that this code is newer than the run. Times on the pages of
[results](results/index.md) name their GPU, and may be of older code.

{gpus}

{calls}

Kernels by the digest of their code, of the calls that the ledger lists; `kda explain` counts those of any call:

{kernels}

## What each backend accepts

`kda.explain` and `kda doctor --problem` say the same of a call.

{rules}

## Other limits

{limits}
"""


def page(ledger: Ledger, capabilities: Sequence[Capability], changelog: str) -> str:
    known = [each for each in capabilities if each.archs]
    parts = {
        "stable": "\n".join(f"| {' | '.join(row)} |" for row in STABLE),
        "gpus": table("| GPUs | backends, the first that accepts a call | ran on one of them |", gpus(ledger, known)),
        "calls": table("| backend or part | call | ways to run it that ran, of all | on | last |", calls(ledger)),
        "kernels": table("| backend | built for | ran, of all | on | last |", kernels(ledger)),
        "rules": table("| backend | how it limits a call |", rules(known)),
        "limits": "\n".join(f"- {text}" for text in LIMITS),
    }
    return PAGE.format(version=version(changelog), **parts)


def version(changelog: str) -> str:
    """Return the first heading of the changelog: "0.1.0, not released yet"."""
    found = re.search(r"^## (.+)$", changelog, re.MULTILINE)
    if not found:
        raise ValueError("CHANGELOG.md must have a heading for each version, such as `## 0.1.0`; found none. Add one.")
    return found[1]


def gpus(ledger: Ledger, capabilities: Iterable[Capability]) -> Iterator[str]:
    """Yield a row for each family of GPUs; what ran on one of the ledger's cards ran on its family."""
    ran: dict[str, set[str]] = {}
    for run in ledger.runs:
        if run["outcome"] == "ok":
            ran.setdefault(parse(run["card"]).name, set()).add(run["card"])
    for name, target in TARGETS.items():
        backends = [f"`{each.backend}`" for each in capabilities if accepts(each, target.cc)]
        cards = ", ".join(sorted(ran.get(name, ())))
        yield f"| {target.examples} | {', '.join(backends)} | {cards or 'none: simulated'} |"


def accepts(capability: Capability, cc: tuple[int, int]) -> bool:
    return code_for(cc, capability.archs) is not None


def calls(ledger: Ledger) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[Known]] = {}
    for path in ledger.paths():
        backend, _, words = path.name.partition(": ")
        kinds.setdefault((backend, CALLS[words.partition(",")[0]]), []).append(path)
    for (backend, call), paths in kinds.items():
        ran = [path for path in paths if path.state == RAN]
        counts = f"{len(ran)} of {len(paths)}" if ran else state(paths)
        runs = [path for path in paths if path.run]
        on = sorted({path.run["card"] for path in runs if path.run})
        last = max((path.run["date"] for path in runs if path.run), default="-")
        yield f"| `{backend}` | {call} | {counts} | {', '.join(on) or '-'} | {last} |"


def state(paths: Sequence[Known]) -> str:
    """Return what is to be said of paths of which none ran whole with today's code."""
    if any(path.state == FAILED for path in paths):
        return "failed"
    if any(path.run and path.run["host"] == host_code(path.name) for path in paths):
        return "in part"
    return "changed since" if any(path.run for path in paths) else "simulated"


def kernels(ledger: Ledger) -> Iterator[str]:
    for group in ledger.groups:
        known = [*ledger.kernels(group)]
        ran = sum(each.state == RAN for each in known)
        backend, arch = group.split()
        yield (f"| `{backend}` | {arch} | {f'{ran} of {len(known)}' if ran else 'simulated'} "
               f"| {', '.join(cards(known)) or '-'} | {last_date(known) or '-'} |")


def rules(capabilities: Iterable[Capability]) -> Iterator[str]:
    for each in capabilities:
        texts = [asked(rule.why) for rule in each.rules if not rule.id.endswith((".gpu", ".installed"))]
        yield f"| `{each.backend}` | {'; '.join(texts)} |"


def asked(why: str) -> str:
    """Return a reason without what it says of the call that was found: `needs bfloat16 q, got {p.dtype}`."""
    return re.split(r"[,;] (?:got|found|this call)|; requested", why)[0].replace("|", "\\|")


def read_changelog() -> str:
    return (common.ROOT / "CHANGELOG.md").read_text()
