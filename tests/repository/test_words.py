"""Docstrings are whole sentences, and comments speak to people."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kda", "ptxkit", "tests", "benchmarks", "examples", "docs")
FRAGMENT = re.compile(r"(Of|By|As|That|So|To)\b")
COMMENT = re.compile(r"# *(of\b|fmt:)")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(code):
    """Docstrings and comments that lack their beginning, or speak to a formatter: their lines and how they begin."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, DOCUMENTED) and FRAGMENT.match(said := ast.get_docstring(node) or ""):
            found.append((node.body[0].lineno, said.split("\n")[0]))
    tokens = tokenize.generate_tokens(io.StringIO(code).readline) if COMMENT.search(code) else ()
    for token in tokens:
        if token.type == tokenize.COMMENT and COMMENT.match(token.string):
            found.append((token.start[0], token.string))
    return sorted(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_is_half_a_sentence_and_no_comment_begins_with_of(folder):
    files = [file for file in (ROOT / folder).rglob("*.py") if not {"build", ".venv"} & {*file.parts}]
    assert files
    found = [f"{file.relative_to(ROOT)}:{line}: {words}" for file in files
             for line, words in fragments(file.read_text())]
    assert not found, "\n".join(found)


def test_fragments_are_found():
    code = 'def f():\n    """Of two."""\n    x = 1  # of x\n    y = 2  # fmt: skip\n\n\ndef g():\n    """Offer it."""\n'
    assert [line for line, _ in fragments(code)] == [2, 3, 4]
