"""Which models of this environment would use kda, after which line, and why the others would not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packaging.version import Version

from kda.model.problem import Problem
from kda.routing.dispatch import weigh
from ptxkit.commands.render import Screen

from .findings import Answer, check
from .hosts import default_device, host_for
from .probes import MachineFacts

INSTALL_FLA = "pip install fla-core   (then `import kda.fla` before the model runs)"
# As transformers calls chunk_kda, with the head dims of all checkpoints that are known.
CALL = Problem(g_dtype="float32", qk_l2norm=True, final_state=True)


@dataclass(frozen=True)
class ModelsWay:
    """The way from the models of a package to kda."""

    package: str
    status: str                              # the status of its finding
    version: str = ""                        # "": not installed
    models: str = ""                         # names of those that have KDA
    line: str = ""                           # after which they use kda; "": they do not
    forward: str | None = None               # the backend that takes their calls
    backward: str | None = None
    why: str = ""                            # why they do not
    fix: tuple[str, ...] = ()

    @property
    def uses_kda(self) -> bool:
        return bool(self.line)

    @property
    def takers(self) -> str:
        if self.forward == self.backward or not self.uses_kda:
            return self.forward or ""
        return f"{self.forward}, backward {self.backward or 'none'}"

    def answer(self) -> Answer:
        used = f"{self.package} {self.version}: after `{self.line}` {self.models} use kda, by {self.takers}"
        return self.status, used if self.uses_kda else self.why, *self.fix

    def as_json(self) -> dict:
        fields = dataclasses.asdict(self) | {"uses_kda": self.uses_kda, "fix": list(self.fix)}
        return {"version": self.version or None, **{k: v for k, v in fields.items() if k not in ("status", "version")}}


def ways(f: MachineFacts) -> tuple[ModelsWay, ...]:
    """Return the ways of FLA, transformers and each installed engine; none if FLA was not looked for."""
    if f.fla.state == "skipped":
        return ()
    engines = (way_of_engine(f, engine) for engine in ENGINES if f.versions.get(engine.package))
    return (way_of_fla(f), way_of_transformers(f), *engines)


def way_of_fla(f: MachineFacts) -> ModelsWay:
    def refused(status: str, why: str, *fix: str) -> ModelsWay:
        return ModelsWay("fla-core", status, version, models, why=why, fix=fix)

    version, models = "", "calls of fla.ops.kda"
    if f.versions.get("flash-linear-attention") and f.torch_gpus:
        models = "FLA's layers and models"
    if f.fla.state == "absent":
        return refused("info", "fla-core is not installed: no model calls kda through it", INSTALL_FLA)
    version = f.fla.data.get("version") or f.versions.get("fla-core") or "of an unknown version"
    if not f.fla.ok:
        return refused("warn", f"`import kda.fla` {'failed: ' * (f.fla.state == 'failed')}{f.fla.says}",
                       "pip install 'fla-core>=0.5.2'")
    order = f.fla.data.get("asked", {})
    if not order:
        return refused("warn", "FLA_DISABLE_BACKEND_DISPATCH=1: FLA asks no backend, kda included",
                       "unset FLA_DISABLE_BACKEND_DISPATCH")
    if "kda" not in order["chunk_kda"]:
        return refused("warn", f"FLA_KDA={f.env.get('FLA_KDA', '0')}: FLA does not ask kda", "unset FLA_KDA")
    forward, backward = takers(f)
    if forward is None:
        return refused("info", "no backend of kda accepts their calls on this device: they stay with FLA's own kernels",
                       "kda doctor --problem 'g=float32'")
    return ModelsWay("fla-core", "ok", version, models, "import kda.fla", forward, backward)


def way_of_transformers(f: MachineFacts) -> ModelsWay:
    version, models = f.versions.get("transformers", ""), ", ".join(f.families)
    by_fla = way_of_fla(f)
    way = ModelsWay("transformers", "info", version, models)
    if not version:
        return dataclasses.replace(way, why="transformers is not installed")
    if not models:
        why = f"transformers {version} has no model that calls FLA's chunk_kda"
        fix = "pip install --upgrade transformers   (for Kimi-Linear and others)"
        return dataclasses.replace(way, why=why, fix=(fix,))
    if f.fla.state != "absent":                                                # transformers then calls FLA
        return dataclasses.replace(by_fla, package=way.package, version=version, models=models)
    forward, backward = takers(f)
    if f.kda_hf and forward:
        line = "import kda.hf; kda.hf.use()"
        return dataclasses.replace(way, status="ok", line=line, forward=forward, backward=backward)
    why = f"{models} of transformers {version} run in plain torch: fla-core is not installed"
    return dataclasses.replace(way, why=why, fix=(INSTALL_FLA,))


class Engine(NamedTuple):
    """An inference engine that kda is a plug-in of."""

    package: str
    switch: str
    oldest: str                              # oldest version that tests cover
    models: str
    line: str                                # after which kda serves them


ENGINES = (
    Engine("vllm", "KDA_VLLM", "0.33", "Kimi-Linear in vLLM", "vllm serve ..."),
    Engine("sglang", "KDA_SGLANG", "0.5.23", "models with KDA in SGLang",
           "--linear-attn-prefill-backend kda --linear-attn-decode-backend kda"),
)


def way_of_engine(f: MachineFacts, engine: Engine) -> ModelsWay:
    version = f.versions.get(engine.package, "")

    def refused(status: str, why: str, *fix: str) -> ModelsWay:
        return ModelsWay(engine.package, status, version, engine.models, why=why, fix=fix)

    if not version:
        return refused("info", f"{engine.package} is not installed")
    if f.env.get(engine.switch) == "0":
        return refused("warn", f"{engine.switch}=0: {engine.package} runs without kda", f"unset {engine.switch}")
    if engine.package not in f.plugins:
        why = "kda was installed before it had any, or is on the path without being installed"
        return refused("warn", f"{engine.package} does not find kda among its plug-ins: {why}",
                       "pip install --force-reinstall --no-deps .")
    if Version(version) < Version(engine.oldest):
        return refused("warn", f"kda is tested with {engine.package} {engine.oldest} and newer, found {version}",
                       f"pip install '{engine.package}>={engine.oldest}'")
    forward = takers(f)[0]
    if forward is None:
        return refused("info", f"no backend of kda accepts their calls on this device: they stay with {engine.package}")
    return ModelsWay(engine.package, "ok", version, engine.models, engine.line, forward, forward)


def takers(f: MachineFacts) -> tuple[str | None, str | None]:
    """Return the backends of a model's calls, forward and backward."""
    device = default_device(f)
    calls = (dataclasses.replace(CALL, device=device, direction=way) for way in ("forward", "backward"))
    forward, backward = (weigh(call, host_for(device, f)).backend for call in calls)
    return forward, backward


def lines(screen: Screen, ways: Sequence[ModelsWay]) -> list[str]:
    def cells(way: ModelsWay) -> tuple[str, ...]:
        package = f"  {way.package} {way.version}".rstrip()
        return package, "yes" if way.uses_kda else "no", way.line or "-", way.takers or "-", way.why or way.models

    header = ("Models", "use kda", "after", "by", "which, or why not")
    return screen.table([cells(way) for way in ways], header) if ways else []


for id, title, way, *needs in (
    ("fla", "models that call FLA would use kda", way_of_fla, "fla"),
    ("transformers", "models of transformers would use kda", way_of_transformers, "fla"),
    ("vllm", "models of vLLM would use kda", lambda f: way_of_engine(f, ENGINES[0])),
    ("sglang", "models of SGLang would use kda", lambda f: way_of_engine(f, ENGINES[1])),
):
    check(f"models.{id}", title, *needs, "torch", "smi")(lambda f, way=way: way(f).answer())
