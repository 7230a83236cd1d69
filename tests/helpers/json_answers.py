"""Answers of commands under --json, each of which must have the keys of docs/data/json_keys.txt."""

import json

import pytest

from benchmarks import keys_page
from ptxkit.commands.render import Screen

SECTIONS = keys_page.read()


@pytest.fixture(autouse=True)
def documented(monkeypatch):
    """Compare every answer of this test with the table."""
    emit = Screen.emit_json

    def checked(screen, answer):
        found = json.loads(json.dumps(answer))
        if "schema" in found:                # the answer of a command
            faults, title, _ = keys_page.faults(found, SECTIONS)
            assert faults == [], f"docs/data/json_keys.txt, {title}"
        emit(screen, answer)

    monkeypatch.setattr(Screen, "emit_json", checked)
