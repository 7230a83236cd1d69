"""Every kernel of a call, packed, with tokens of nobody: what compute-sanitizer looks at.

    compute-sanitizer --tool memcheck|racecheck python -m benchmarks.sanitized [BACKEND] [OPTIONS]

racecheck (CUDA 13.0) reports hazards of the Hopper kernels that are none, of four kinds:
- one lane arrives on an mbarrier for its warp, which met before: what the other lanes did counts as not ordered;
- a warp has passed more barriers than another one: from then on a barrier of both counts as no order, as if barriers
  were told apart by their number alone;
- in clusters of four and in `stream` the warp INVERSE passes fewer barriers than its group, and the one that stores o
  passes none: what they read, or write, counts as not ordered;
- there, copies of 16 bytes arrive on the mbarrier that says that a tile is there: then it seems to order nothing.
`--followed`: the kernels in a form without these hazards, but those of the third kind. All lanes arrive, and who
arrives for another warp waits for it, too, which orders no more than the mbarrier on which that one arrives. LOAD waits
for its copies and arrives itself.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import kda
from kda.backends.sm90 import launch, plan
from kda.model.force import forcing
from kda.tools.verify.cases import Case, make_inputs
from kda.tools.verify.definition import leaves_of

from . import common


def changes() -> dict[str, dict[str, str]]:
    """Return what followed.txt says: file of kda/backends -> its texts -> what stands there instead."""
    changed: dict[str, dict[str, str]] = {}
    for change in Path(__file__).with_name("followed.txt").read_text().split("@@ ")[1:]:
        name, _, texts = change.partition("\n")
        old, new = texts.removesuffix("\n").split("\n-->\n")
        changed.setdefault(name, {})[old] = new
    return changed


FOLLOWED = changes()


def follow(folder: Path) -> None:
    """Kernels of the Hopper backend come from a copy in `folder`, as FOLLOWED says."""
    copy, backends = folder / "followed", Path(launch.__file__).parents[1]
    for part in ("sm90", "common"):
        shutil.copytree(backends / part, copy / part)
    for name, changes in FOLLOWED.items():
        text = (copy / name).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {name}"
            text = text.replace(old, new)
        (copy / name).write_text(text)
    sys.path.insert(0, str(folder))

    def kernel(config):
        build = importlib.import_module(f"{copy.name}.{plan.KERNELS[type(config)]}").build
        (kernel,) = build(config, plan.TARGET).kernels.values()
        return kernel

    launch.kernel = functools.cache(kernel)


def main() -> None:
    parser = common.parser(__spec__, __doc__, json=False)
    parser.add_argument("backend", nargs="?", default="triton")
    parser.add_argument("--followed", action="store_true", help="Hopper's kernels in a form that racecheck follows")
    parser.add_argument("--backwards", action="store_true", help="steps of Hopper's own backward alone")
    parser.add_argument("--forwards", action="store_true", help="forwards alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.followed:
            follow(Path(folder))
        if args.backwards:
            backwards_of_hopper("cuda")
            torch.cuda.synchronize()
        else:
            calls(args.backend, args.forwards)


MANY = dict(lengths=(650, 0, 165), padding=5, H=1, HV=3)
# Steps of Hopper's own backward: drawn inputs, SMs that are prescribed, chunks of a segment, CTAs of a cluster of the
# one kernel that keeps; without them kernels are apart.
STEPS = {
    "packed, one item after another": (dict(lengths=(100, 0, 65), padding=70, H=1, HV=2), 1, None, None),
    "packed, any gate": (dict(lengths=(65, 0, 30), padding=20, H=1, HV=2, gate="softplus"), 1, None, None),
    "a batch": (dict(B=2, T=100, H=2), None, None, None),
    "packed, cut into segments": (dict(lengths=(300, 0, 1, 65), padding=20, H=1), None, 4, None),
    "cut into segments": (dict(T=290, H=1), None, 4, None),
    "one kernel, clusters of two": (MANY, None, None, 2),
    "the same, walks shared out": (MANY, 6, None, 2),
    "one kernel, clusters of four, walks shared out": (MANY, 10, None, 4),
    "one kernel, any gate": (MANY | dict(gate="softplus"), None, None, 4),
    "one kernel, CTAs alone": (MANY | dict(K=64, V=64), None, None, 1),
    "CTAs alone, walks shared out": (MANY | dict(K=64, V=64), 4, None, 1),
}


def backwards_of_hopper(device: str) -> None:
    for name, (words, sms, segment, ctas) in STEPS.items():
        case = make_inputs(**dict(K=128, V=128, gate="bounded") | words, device=device)
        for saved in (False, "states", True):
            form = "two kernels" if ctas is None else "one kernel"
            with forcing(form=form, ctas=ctas, segment_chunks=segment, sms=sms):
                step(case, "sm90", disable_recompute=saved)
            print(f"{name}, disable_recompute={saved}", flush=True)


def step(case: Case, backend: str, **options: bool) -> None:
    o, ht = kda.chunk_kda(**case.keywords | leaves_of(case.keywords), **options, backend=backend)
    torch.autograd.backward((o, ht), (case.do, case.dht))


FORMS: dict[str, dict[str, Any]] = {         # other plans of a forward than those above -> what is prescribed
    "one kernel, clusters of two": dict(form="one kernel", ctas=2),
    "one kernel, clusters of four": dict(form="one kernel", ctas=4),
    "one kernel, clusters of four, two of which share all walks": dict(form="one kernel", ctas=4, clusters=2),
    "one kernel, CTAs alone": dict(form="one kernel", ctas=1),
    "one kernel, CTAs alone, two of which share all walks": dict(form="one kernel", ctas=1, clusters=2),
    "some CTAs make tiles and others walk": dict(form="stream", segments=1),
    "some CTAs make tiles and others walk, two segments": dict(form="stream", segments=2),
}


def calls(backend: str, forwards: bool) -> None:
    with forcing(form="two kernels"):
        dtype = "float32" if backend == "sm89" else "bfloat16"
        for gate, D in (("bounded", 128), ("softplus", 128), ("bounded", 64)):
            case = make_inputs((100, 0, 65), padding=70, H=1, HV=2, K=D, V=D, dtype=dtype, gate=gate, device="cuda")
            kda.chunk_kda_fwd(**case.keywords, backend=backend)
            if not forwards:
                step(case, backend)
        if backend != "sm89":                                                  # cut into segments
            case = make_inputs(T=4200, H=1, K=128, V=128, gate="bounded", device="cuda")
            kda.chunk_kda_fwd(**case.keywords, backend=backend)
    if backend == "sm90":
        if not forwards:
            backwards_of_hopper("cuda")
        for gate in ("bounded", "softplus"):
            for name, prescribed in FORMS.items():
                V = 64 if "alone" in name else 128
                case = make_inputs((650, 0, 165), padding=5, H=1, HV=3, K=128, V=V, gate=gate, device="cuda")
                with forcing(**prescribed):
                    kda.chunk_kda_fwd(**case.keywords, backend=backend)
                    torch.cuda.synchronize()
                print(f"{name}, {gate} gate", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
