"""Writes kda/__init__.pyi and kda/nn/__init__.pyi, what type checkers read of `import kda` and `kda.nn`.

At run time an unknown keyword is refused by an error that names the one that was meant; a type checker takes
`**unknown` for leave to pass anything.  The stubs therefore repeat the signatures without it, once for each kind of
result.  `python tests/helpers/stub.py --write` writes them anew from the code; a test compares.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KDA, NN = (ROOT / "kda" / folder / "__init__.pyi" for folder in (".", "nn"))
HEAD = '"""What type checkers read of `import {}`; `python tests/helpers/stub.py --write` writes it."""\n'
WIDTH = 120
LAYER, OUTPUTS = "KimiDeltaAttention", "Outputs"
POSITIONAL, KEYWORD = "positional", "keyword"


class Parameter(NamedTuple):
    name: str
    kind: str                                # POSITIONAL or KEYWORD
    type: str | None                         # None for self
    default: str | None                      # None: it must be given

    def __str__(self) -> str:
        typed = self.name if self.type is None else f"{self.name}: {self.type}"
        return typed if self.default is None else f"{typed} = {self.default}"


class Function(NamedTuple):
    parameters: list[Parameter]
    result: str


class Form(NamedTuple):
    """A kind of result, and the flags that it takes: one that is True must be given, one that is False may be."""

    flags: dict[str, bool]
    result: str


# Calls whose result depends on flags; a form without flags is for numbers of results that a checker cannot know.
FORMS = {
    "chunk_kda": (
        Form({"output_final_state": True, "return_intermediate_states": True}, "tuple[Tensor, Tensor, Tensor]"),
        Form({"output_final_state": True, "return_intermediate_states": False}, "tuple[Tensor, Tensor]"),
        Form({"return_intermediate_states": True}, "tuple[Tensor, Tensor | None, Tensor]"),
        Form({"return_intermediate_states": False}, "tuple[Tensor, Tensor | None]"),
        Form({}, "tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]"),
    ),
    "fused_recurrent_kda": (
        Form({"output_final_state": True}, "tuple[Tensor, Tensor]"),
        Form({}, "tuple[Tensor, Tensor | None]"),
    ),
    "fused_recurrent_kda_fwd": (
        Form({"output_final_state": True}, "tuple[Tensor, Tensor]"),
        Form({}, "tuple[Tensor, Tensor | None]"),
    ),
}
# Functions that hand `*args` and `**keywords` on: to which other one, and what that has but they refuse.
HANDED_ON = {
    "chunk_kda_fwd": ("chunk_kda", {"cp_context"}),
    "chunk_kda_bwd": ("chunk_kda", {"cp_context"}),
    "explain": ("chunk_kda", set()),
    "fused_recurrent_kda_fwd": ("fused_recurrent_kda", set()),
}


def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / "kda" / f"{module.replace('.', '/')}.py").read_text())


def functions(body: list[ast.stmt]) -> dict[str, tuple[Function, ast.arguments]]:
    """Return the functions of a module or class as they are written there, less `**unknown`."""
    return {node.name: (Function(parameters(node.args), ast.unparse(node.returns or ast.Constant(None))), node.args)
            for node in body if isinstance(node, ast.FunctionDef)}


def parameters(args: ast.arguments) -> list[Parameter]:
    plain = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
    rows = [*zip(plain, defaults, [POSITIONAL] * len(plain)),
            *zip(args.kwonlyargs, args.kw_defaults, [KEYWORD] * len(args.kwonlyargs))]
    found = [Parameter(arg.arg, kind, arg.annotation and ast.unparse(arg.annotation), default and written(default))
             for arg, default, kind in rows]
    if args.kwarg and args.kwarg.arg == "options":                              # fields of any config
        found.append(Parameter("**options", KEYWORD, "Any", None))
    return found


def written(default: ast.expr) -> str:
    return ast.unparse(default).replace("'", '"')


def with_those_of(args: ast.arguments, other: list[Parameter], refused: set[str]) -> list[Parameter]:
    """Put the parameters of the other function in the place of `*args` and `**keywords`; without `*args` they are
    keywords."""
    first = parameters(args)
    named = {parameter.name for parameter in first}
    return [*first, *(each if args.vararg else each._replace(kind=KEYWORD)
                      for each in other if each.name not in named | refused)]


def formed(parameters: list[Parameter], form: Form) -> list[Parameter]:
    """Give flags their literal types; a flag that must be given is a keyword, and so is what follows it."""
    found, kind = [], POSITIONAL
    for parameter in parameters:
        value = form.flags.get(parameter.name)
        if value is not None:
            parameter = parameter._replace(type=f"Literal[{value}]", default=None if value else parameter.default)
        kind = KEYWORD if value or parameter.kind == KEYWORD else kind
        found.append(parameter._replace(kind=kind))
    return found


def listed(words: list[str], indent: str) -> str:
    """Return words with commas, as many on a line as fit."""
    lines = [indent]
    for word in words:
        if lines[-1] != indent and len(f"{lines[-1]} {word},") > WIDTH:
            lines.append(indent)
        lines[-1] += ("" if lines[-1] == indent else " ") + f"{word},"
    return "\n".join(lines) + "\n"


def definition(name: str, function: Function, before: str = "", indent: str = "", ignored: str = "") -> str:
    words = [str(each) for each in function.parameters if each.kind == POSITIONAL]
    keywords = [str(each) for each in function.parameters if each.kind == KEYWORD]
    star = ["*"] if keywords and not keywords[0].startswith("*") else []
    lines = listed([*words, *star, *keywords], f"{indent}    ")
    return f"{before}{indent}def {name}({ignored}\n{lines}{indent}) -> {function.result}: ...\n"


def exported(names: Iterable[str]) -> str:
    """Return `__all__` in the order that ruff wants: constants, classes, functions."""
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
    return "\n__all__ = [\n" + listed([f'"{name}"' for name in ordered], "    ") + "]\n"


def outputs() -> str:
    """Return the class of what `chunk_kda_fwd` returns; the code's own class has other `saved` for operators."""
    node = next(node for node in tree_of("model/bundles").body if getattr(node, "name", "") == OUTPUTS)
    fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
    fields = [field if not field.startswith("saved: ") else "saved: Kept | None" for field in fields]
    return "\n".join([f"class {OUTPUTS}(NamedTuple):", *(f"    {field}" for field in fields)]) + "\n"


def of_kda() -> str:
    lists = next(node.value for node in tree_of("__init__").body if ast.unparse(node).startswith("_NAMES = "))
    names = ast.literal_eval(lists)
    known = {name: each for module in names for name, each in functions(tree_of(module).body).items()}
    imports, definitions = [], []
    for module, public in names.items():
        open_ended = [name for name in public if name in known and known[name][1].kwarg]
        imports += [f"from .{module} import {name} as {name}" for name in public
                    if name not in (*open_ended, OUTPUTS)]
        for name in open_ended:
            function, args = known[name]
            if name in HANDED_ON:
                other, refused = HANDED_ON[name]
                function = function._replace(parameters=with_those_of(args, known[other][0].parameters, refused))
            definitions += [definition(name, Function(formed(function.parameters, form), form.result), "@overload\n")
                            for form in FORMS.get(name, ())] or [definition(name, function)]
    return "\n".join([
        HEAD.format("kda"),
        "from typing import Any, Literal, NamedTuple, overload\n",
        "import torch",
        "from torch import Tensor\n",
        *(f"from . import {name} as {name}" for name in ("hf", "nn", "parallel", "simulator")),
        *sorted(imports),
        "\n__version__: str" + exported(["__version__", *(name for each in names.values() for name in each)]),
        outputs(),
        *definitions,
    ])


def of_nn() -> str:
    """The stub's layer derives from the layer, which has the attributes and all other methods."""
    imports = [node for node in tree_of("nn/__init__").body if isinstance(node, ast.ImportFrom)]
    layer = next(node for node in tree_of("nn/layer").body if getattr(node, "name", "") == LAYER)
    methods = {name: function for name, (function, _) in functions(layer.body).items()}
    changed = "  # type: ignore[override]"
    return "\n".join([
        HEAD.format("kda.nn"),
        "from collections.abc import Mapping",
        "from typing import Any\n",
        "import torch",
        "from torch import Tensor\n",
        *(ast.unparse(node).replace(LAYER, f"{LAYER} as _Layer") for node in imports),
        exported(alias.name for node in imports for alias in node.names),
        f"class {LAYER}(_Layer):",
        definition("__init__", methods["__init__"], indent="    "),
        definition("__call__", methods["forward"], indent="    "),
        definition("from_checkpoint", methods["from_checkpoint"], "    @classmethod\n", "    "),
        definition("explain", methods["explain"], indent="    ", ignored=changed),
    ])


def stubs() -> dict[Path, str]:
    return {KDA: of_kda(), NN: of_nn()}


def main() -> None:
    differ = [path for path, text in stubs().items() if not path.exists() or path.read_text() != text]
    if "--write" in sys.argv[1:]:
        for path in differ:
            path.write_text(stubs()[path])
    print("\n".join(f"{path.relative_to(ROOT)} has changed" for path in differ) or "no stub changed")
    sys.exit(bool(differ) and "--write" not in sys.argv[1:])


if __name__ == "__main__":
    main()
