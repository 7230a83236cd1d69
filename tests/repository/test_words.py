"""Docstrings are whole sentences, comments speak to people, and names say what they hold."""

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


def python_files(*folders):
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return [file for file in files if not {"build", ".venv"} & {*file.parts}]


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
    files = python_files(folder)
    assert files
    found = [f"{file.relative_to(ROOT)}:{line}: {words}" for file in files
             for line, words in fragments(file.read_text())]
    assert not found, "\n".join(found)


def test_fragments_are_found():
    code = 'def f():\n    """Of two."""\n    x = 1  # of x\n    y = 2  # fmt: skip\n\n\ndef g():\n    """Offer it."""\n'
    assert [line for line, _ in fragments(code)] == [2, 3, 4]


NO_NAMES = {"of", "at", "own", "made", "there", "here", "told", "taker"}
# class name -> why classes of one name in two modules are one role; siblings, such as backends, need no reason
ONE_ROLE = {
    "Grads": "results of a call, and the kernel that makes them, whose name stands in digests",
    "Stream": "torch.cuda.Stream in a capture has torch's name; the kernel's name stands in digests",
}
SIBLINGS = re.compile(r"kda/backends/\w+/|ptxkit/compile/")


def bindings(code):
    """Variables, parameters and fields that are called by a word which says nothing, with their lines."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        else:
            continue
        if name in NO_NAMES:
            found.append((node.lineno, name))
    return sorted(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_variable_says_what_it_holds(folder):
    found = [f"{file.relative_to(ROOT)}:{line}: {name}" for file in python_files(folder)
             for line, name in bindings(file.read_text())]
    assert not found, "\n".join(found)


def test_names_that_say_nothing_are_found():
    code = "def f(of):\n    at = 1\n    self.own = [here for here in of]\n    held = at\n    return [x.told]\n"
    assert bindings(code) == [(1, "of"), (2, "at"), (3, "here"), (3, "own")]


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


def classes(files):
    """Return class name -> modules that define one."""
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add(file.relative_to(ROOT).as_posix())
    return found


def are_siblings(modules):
    """Tell whether modules belong to backends, or to compilers, beside each other, one to each."""
    parents = [SIBLINGS.match(module) for module in modules]
    first = [parent and (parent[0] if "backends" in parent[0] else module) for parent, module in zip(parents, modules)]
    return all(first) and len({*first}) == len(modules)


def test_a_class_name_stands_in_one_module():
    several = {name: sorted(modules) for name, modules in classes(python_files("kda", "ptxkit")).items()
               if len(modules) > 1 and not are_siblings(sorted(modules)) and name not in ONE_ROLE}
    assert not several


def test_every_reason_for_a_class_name_is_needed():
    several = {name for name, modules in classes(python_files("kda", "ptxkit")).items()
               if len(modules) > 1 and not are_siblings(sorted(modules))}
    assert set(ONE_ROLE) == several
