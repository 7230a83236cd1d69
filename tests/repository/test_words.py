"""Docstrings are whole sentences, comments speak to people, and names say what they hold."""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kda", "ptxkit", "tests", "benchmarks", "examples", "docs")
FRAGMENT = re.compile(r"(Of|By|As|That|So|To)\b")
COMMENT = re.compile(r"# *(of\b|fmt:)")
NO_NAMES = {"of", "at", "own", "made", "there", "here", "told", "taker"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Words(NamedTuple):
    """What stands in a file, each with its line."""

    fragments: list[tuple[int, str]]         # docstrings and comments that lack their beginning, or say `fmt:`
    bindings: list[tuple[int, str]]          # variables, parameters and fields called by a word that says nothing
    classes: list[tuple[int, str]]


def words_of(code):
    fragments, bindings, classes = [], [], []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, DOCUMENTED) and FRAGMENT.match(said := ast.get_docstring(node) or ""):
            fragments.append((node.body[0].lineno, said.split("\n")[0]))
        if isinstance(node, ast.ClassDef):
            classes.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            bindings.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            bindings.append((node.lineno, node.id if isinstance(node, ast.Name) else node.attr))
    tokens = tokenize.generate_tokens(io.StringIO(code).readline) if COMMENT.search(code) else ()
    for token in tokens:
        if token.type == tokenize.COMMENT and COMMENT.match(token.string):
            fragments.append((token.start[0], token.string))
    return Words(sorted(fragments), sorted(found for found in bindings if found[1] in NO_NAMES), classes)


@functools.cache
def words_in(folder):
    """Return the words of each Python file of a folder."""
    files = [file for file in (ROOT / folder).rglob("*.py") if not {"build", ".venv"} & {*file.parts}]
    assert files
    return {file.relative_to(ROOT).as_posix(): words_of(file.read_text()) for file in files}


@pytest.mark.parametrize("kind", ["fragments", "bindings"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_are_whole_and_a_variable_says_what_it_holds(folder, kind):
    found = [f"{file}:{line}: {said}" for file, words in words_in(folder).items()
             for line, said in getattr(words, kind)]
    assert not found, "\n".join(found)


def test_fragments_are_found():
    code = 'def f():\n    """Of two."""\n    x = 1  # of x\n    y = 2  # fmt: skip\n\n\ndef g():\n    """Offer it."""\n'
    assert [line for line, _ in words_of(code).fragments] == [2, 3, 4]


# class name -> why classes of one name in two modules are one role; siblings, such as backends, need no reason
ONE_ROLE = {
    "Grads": "results of a call, and the kernel that makes them, whose name stands in digests",
    "Stream": "torch.cuda.Stream in a capture has torch's name; the kernel's name stands in digests",
}
SIBLINGS = re.compile(r"kda/backends/\w+/|ptxkit/compile/")


def test_names_that_say_nothing_are_found():
    code = "def f(of):\n    at = 1\n    self.own = [here for here in of]\n    held = at\n    return [x.told]\n"
    assert words_of(code).bindings == [(1, "of"), (2, "at"), (3, "here"), (3, "own")]


C_FILES = {".c", ".h", ".cu", ".cuh"}
NOT_C_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', re.DOTALL)
C_NAME = re.compile(rf"\b(?:{'|'.join(sorted(NO_NAMES))})\b")
# (file, name): the name of a __shared__ array stands in the PTX, and so in its digest
NAMES_IN_DIGESTS = {("kda/backends/sm89/bwd/sums.cu", "of")}


def c_files():
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*"))
            if file.suffix in C_FILES and not {"build", ".venv"} & {*file.parts}]


def c_names(code):
    """Names that say nothing in C or CUDA, outside comments and strings, with their lines."""
    bare = NOT_C_CODE.sub(lambda match: "\n" * match[0].count("\n") or " ", code)
    return [(bare.count("\n", 0, match.start()) + 1, match[0]) for match in C_NAME.finditer(bare)]


def test_a_variable_in_c_and_cuda_says_what_it_holds():
    files = c_files()
    assert {file.suffix for file in files} == C_FILES
    found = [(file.relative_to(ROOT).as_posix(), *name) for file in files for name in c_names(file.read_text())]
    wrong = [f"{file}:{line}: {name}" for file, line, name in found if (file, name) not in NAMES_IN_DIGESTS]
    assert not wrong, "\n".join(wrong)
    assert {(file, name) for file, _, name in found} == NAMES_IN_DIGESTS, "an exception that nothing needs"


def test_names_that_say_nothing_are_found_in_c():
    code = '/* at\n of */ int at = 1; // here\nprintf("%d at \\" of", x->of, at_hand);\nlook(here);\n'
    assert c_names(code) == [(2, "at"), (3, "of"), (4, "here")]


def are_siblings(modules):
    """Tell whether modules belong to backends, or to compilers, beside each other, one to each."""
    parents = [SIBLINGS.match(module) for module in modules]
    first = [parent and (parent[0] if "backends" in parent[0] else module) for parent, module in zip(parents, modules)]
    return all(first) and len({*first}) == len(modules)


def test_a_class_name_stands_in_one_module_but_where_a_reason_is_needed():
    modules = {}
    for file, words in (words_in("kda") | words_in("ptxkit")).items():
        for _, name in words.classes:
            modules.setdefault(name, set()).add(file)
    several = {name: sorted(files) for name, files in modules.items() if len(files) > 1}
    assert {name for name, files in several.items() if not are_siblings(files)} == ONE_ROLE.keys(), several
