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
RULES = dict(line.split(": ", 1) for line in Path(__file__).with_name("rules.txt").read_text().splitlines())


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
