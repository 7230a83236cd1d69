"""Findings as SARIF 2.1.0, which code hosts show at the lines of a change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .. import application
from ..findings import ENDED, Finding
from ..mutation.sources import text_of
from ..mutation.table import Outcome
from . import places

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
SURVIVED = "mutant-survived"
# kinds of findings, in a few words
RULES = {
    "out-of-bounds": "an access outside of all memory of the launch",
    "freed": "a launch with an address of memory that has been freed",
    "misaligned": "an address that is not a multiple of the size of its access",
    "uninitialised": "a read of memory that was never written",
    "race-write-write": "two writes that nothing orders",
    "race-write-read": "a read that nothing orders after a write",
    "race-read-write": "a write that nothing orders after a read",
    "race-lanes": "conflicting accesses of two lanes of a warp without a barrier in between",
    "race-grids": "a dependent launch that does not wait for the kernel ahead of it",
    "proxy": "a copy or matrix product without fence.proxy.async after ordinary writes",
    "barrier": "a barrier that is used wrongly",
    "mbarrier": "an mbarrier that is used wrongly",
    "mbarrier-overwritten": "an mbarrier whose memory was written as data",
    "mbarrier-fence": "an mbarrier whose initialisation was not published",
    "deadlock": "no warp can go on",
    "livelock": "warps go on without progress",
    "diverged": "an .aligned instruction that not all lanes of a warp reached",
    "lane": "an exchange between lanes with a lane that does not take part",
    "tmem": "tensor memory that is used wrongly",
    "tmem-leak": "tensor memory that was not deallocated",
    "tcgen05-fence": "a missing tcgen05.fence",
    "tcgen05-wait": "a missing tcgen05.wait::ld",
    "wgmma-fence": "a missing wgmma.fence",
    "register-in-flight": "a register that an asynchronous operation still uses",
    "group": "a wait for groups that does not cover what is used after it",
    "descriptor": "a descriptor of a matrix or an instruction that is invalid",
    "tensor-map": "a tensor map that is invalid, or does not fit its copy",
    "operand": "an operand that is invalid",
    "peer-exited": "an access to shared memory of a CTA that may have ended",
    "race-streams": "two launches in different streams touch the same memory, with no order between them",
    "copy-at-exit": "a copy out of shared memory that its CTA does not wait for before it ends",
    "too-many-instructions": "a launch that did not end within its limit",
    "unsupported": "something that is not simulated",
    SURVIVED: "a synchronising instruction was weakened, and nothing noticed",
}


def log(findings: Iterable[Finding], survivors: Iterable[Outcome], version: str, home: Path) -> dict[str, Any]:
    """Return the log of one run; files inside `home` are named relative to it."""
    driver = {"name": f"{application.current().name} simulate", "version": version}
    results = [_of_finding(each, home) for each in findings] + [_of_survivor(each, home) for each in survivors]
    used = dict.fromkeys(result["ruleId"] for result in results)
    rules = [{"id": name, "shortDescription": {"text": RULES[name]}} for name in used]
    run = {
        "tool": {"driver": driver | {"rules": rules}},
        "originalUriBaseIds": {"SRCROOT": {"uri": home.as_uri() + "/"}},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _of_finding(finding: Finding, home: Path) -> dict[str, Any]:
    times = f", {finding.count} times" if finding.count > 1 else ""
    ended = f"; {ENDED}" if finding.ended else ""
    text = f"{finding.says}{times}{ended} (kernel {finding.kernel}, at {finding.place.ptx})"
    result = _result(finding.kind, finding.grade, text, finding.kernel, places.line_of_place(finding.place, home), home)
    if other := finding.other:
        location = _location(places.line_of_place(other, home), finding.kernel, home)
        result["relatedLocations"] = [location | {"message": {"text": f"and here: {other.ptx}"}}]
    return result


def _of_survivor(outcome: Outcome, home: Path) -> dict[str, Any]:
    mutant = outcome.mutant
    text = f"nothing notices this mutant: {mutant.mutation}, of {mutant.instruction} (kernel {mutant.kernel})"
    return _result(SURVIVED, "warning", text, mutant.kernel, places.line_of_mutant(mutant, home), home)


def _result(rule: str, level: str, text: str, kernel: str, line: places.PageLine, home: Path) -> dict[str, Any]:
    return {
        "ruleId": rule,
        "level": level,
        "message": {"text": text},
        "locations": [_location(line, kernel, home)],
        "partialFingerprints": {f"{application.current().name}Simulate/v1": _fingerprint(rule, kernel, line, home)},
    }


def _fingerprint(rule: str, kernel: str, line: places.PageLine, home: Path) -> str:
    """Return a fingerprint that stays when lines move: it is made of the line's text, not of its number."""
    lines = text_of(line.file).splitlines() if line.file else []
    text = lines[line.line - 1].strip() if 0 < line.line <= len(lines) else str(line.line)
    named = rule, kernel, places.shown(line.file, home) if line.file else "", text
    return hashlib.sha256(os.fsencode("\n".join(named))).hexdigest()[:32]


def _location(line: places.PageLine, kernel: str, home: Path) -> dict[str, Any]:
    logical = {"logicalLocations": [{"fullyQualifiedName": kernel, "kind": "function"}]}
    if line.file is None:                      # a kernel without lines of a source
        return logical
    path = Path(line.file).resolve()
    artifact = {"uri": path.as_uri()}
    if path.is_relative_to(home):
        artifact = {"uri": quote(os.fsencode(places.shown(line.file, home))), "uriBaseId": "SRCROOT"}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line.line}}} | logical
