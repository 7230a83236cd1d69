"""Findings as SARIF 2.1.0, which code hosts show at the lines of a change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..findings import KINDS, Finding, Place
from ..mutation.table import Outcome, frames
from . import places

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
SURVIVED = "mutant-survived"
LEVELS = {"error": "error", "note": "note"}


def log(findings: Iterable[Finding], survivors: Iterable[Outcome], version: str, home: Path) -> dict[str, Any]:
    """The log of one run; files inside `home` are named relative to it."""
    results = [_of_finding(each, home) for each in findings] + [_of_survivor(each, home) for each in survivors]
    used = dict.fromkeys(result["ruleId"] for result in results)
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "kda simulate", "version": version, "rules": [*map(_rule, used)]}},
                "originalUriBaseIds": {"SRCROOT": {"uri": home.as_uri() + "/"}},
                "columnKind": "unicodeCodePoints",
                "results": results,
            }
        ],
    }


def _rule(name: str) -> dict[str, Any]:
    says = "a synchronising instruction was weakened, and nothing noticed it" if name == SURVIVED else name
    known = [kind.says for kind in KINDS.values() if kind.id == name and "{" not in kind.says]
    return {"id": name, "shortDescription": {"text": known[0] if known else says.replace("-", " ")}}


def _of_finding(finding: Finding, home: Path) -> dict[str, Any]:
    times = f", {finding.count} times" if finding.count > 1 else ""
    text = f"{finding.says}{times} (kernel {finding.kernel}, at {finding.place.ptx})"
    result = _result(finding.kind, LEVELS.get(finding.grade, "warning"), text, finding.kernel,
                     places.of(finding.place, home), home)  # fmt: skip
    if finding.other:
        result["relatedLocations"] = [_related(finding.other, finding.kernel, home)]
    return result


def _of_survivor(outcome: Outcome, home: Path) -> dict[str, Any]:
    mutant = outcome.mutant
    source = " < ".join(f"{at.file}:{at.line}" for at in frames(mutant.loc)) or None
    text = f"nothing notices this mutant: {mutant.mutation}, of {mutant.instruction} (kernel {mutant.kernel})"
    at = places.line_of(source, mutant.line, home)
    return _result(SURVIVED, "warning", text, mutant.kernel, at, home)


def _result(rule: str, level: str, text: str, kernel: str, at: places.Line, home: Path) -> dict[str, Any]:
    where = places.shown(at.file, home) if at.file else "PTX"
    print_ = hashlib.sha256(f"{rule} {kernel} {where} {text.partition(' (kernel')[0]}".encode()).hexdigest()[:32]
    return {
        "ruleId": rule,
        "level": level,
        "message": {"text": text},
        "locations": [_location(at, kernel, home)],
        "partialFingerprints": {"kdaSimulate/v1": print_},
    }


def _related(place: Place, kernel: str, home: Path) -> dict[str, Any]:
    return _location(places.of(place, home), kernel, home) | {"message": {"text": f"and here: {place.ptx}"}}


def _location(at: places.Line, kernel: str, home: Path) -> dict[str, Any]:
    logical = {"logicalLocations": [{"fullyQualifiedName": kernel, "kind": "function"}]}
    if at.file is None:                      # a kernel without lines of a source
        return logical
    path = Path(at.file).resolve()
    inside = path.is_relative_to(home)
    artifact = {"uri": places.shown(at.file, home), "uriBaseId": "SRCROOT"} if inside else {"uri": path.as_uri()}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": at.line}}} | logical
