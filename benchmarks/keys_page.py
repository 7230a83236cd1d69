"""The page of the keys that commands print with --json, from docs/data/json_keys.txt, which tests hold to the commands.

`faults` says where an answer and the table differ.  tests/helpers/json_answers.py asks it of every answer of a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import common

FILE = common.ROOT / "docs" / "data" / "json_keys.txt"
COMMON = "every command"                     # the section whose keys all answers have
BORROWED = {"kda simulate, ptxkit simulate": "kda verify --mutants"}           # a section that has keys of another, too
KINDS = {bool: "bool", int: "int", float: "number", str: "text", type(None): "null", dict: "object", list: "list"}
PAGE = """# What commands print with `--json`

One object, with the keys of this page, which are [public](policy.md): scripts may rely on them. New keys may come.
A command that was called wrongly (exit code 2) may print no object, but text on stderr.
Lists have `[]` behind their key, objects whose keys are names have `{}`; a path with ? is not in every answer. Times
are in seconds and sizes in bytes unless a row says otherwise. `kda bench --save` writes the object of `kda bench`.
"""


class Key(NamedTuple):
    types: frozenset[str]
    meaning: str
    always: bool                             # in every answer whose parent is there


class Section(NamedTuple):
    title: str
    needs: tuple[tuple[str, str | None], ...]        # keys of an answer, and what some of them must be
    keys: Mapping[str, Key]


def read(text: str | None = None) -> list[Section]:
    sections: list[Section] = []
    for line in (FILE.read_text() if text is None else text).splitlines():
        if line.startswith("## "):
            title, condition = re.split(" {2,}", line[3:], maxsplit=1)
            needs = (part.partition(" = ") for part in condition.split(", "))
            sections.append(Section(title, tuple((key, value or None) for key, _, value in needs), {}))
        elif line and line[0] != "#":
            path, types, meaning = re.split(" {2,}", line, maxsplit=2)
            keys = sections[-1].keys
            if path.rstrip("?") in keys:
                raise ValueError(f"{FILE.name} must have each path of a section once; found {path} twice under "
                                 f"{sections[-1].title}. Remove one.")
            found = types.replace("number", "number or int").split(" or ")
            keys[path.replace("?", "")] = Key(frozenset(found), meaning, "?" not in path)  # type: ignore[index]
    return sections


def section_of(answer: Mapping[str, Any], sections: list[Section]) -> Section:
    for section in sections:
        if section.title != COMMON and all(key in answer and value in (None, answer[key])
                                           for key, value in section.needs):
            return section
    raise ValueError(f"{FILE.name} must have a section for the answers of every command; found none for one of "
                     f"{answer.get('command')!r} with the keys {', '.join(answer)}. Write one.")


def faults(answer: Mapping[str, Any], sections: list[Section]) -> tuple[list[str], str, set[str]]:
    """Return where an answer differs from its section, and the section's title with the paths that the answer has."""
    section = section_of(answer, sections)
    others = [each.keys for each in sections if each.title in (COMMON, BORROWED.get(section.title))]
    keys: dict[str, Key] = {path: key for each in (*others, section.keys) for path, key in each.items()}
    seen: set[str] = set()
    return [*_faults(answer, "", keys, seen)], section.title, seen - others[0].keys()


def _faults(value: Any, path: str, keys: Mapping[str, Key], seen: set[str]) -> Iterator[str]:
    known = keys.get(path)
    if known:
        seen.add(path)
        if "any" in known.types:
            return
        if KINDS[type(value)] not in known.types:
            yield f"{path} must be {' or '.join(sorted(known.types))}; found {value!r:.40}"
            return
    if isinstance(value, list):
        for item in value:
            yield from _faults(item, f"{path}[]", keys, seen)
    elif isinstance(value, dict):
        yield from _faults_of_object(value, path, keys, seen)
    elif known is None and not (value is None and f"{path}[]" in keys):          # a list may be null
        yield f"{path} has no row; found {value!r:.40}"


def _faults_of_object(value: dict[str, Any], path: str, keys: Mapping[str, Key], seen: set[str]) -> Iterator[str]:
    if any(each == f"{path}{{}}" or each.startswith(f"{path}{{}}.") for each in keys):
        for item in value.values():
            yield from _faults(item, f"{path}{{}}", keys, seen)
        return
    begin = f"{path}." if path else ""
    children = dict.fromkeys(re.split(r"[.\[{]", each[len(begin) :])[0] for each in keys if each.startswith(begin))
    for name, item in value.items():
        if name not in children:
            yield f"{begin}{name} has no row; found {item!r:.40}"
        else:
            yield from _faults(item, f"{begin}{name}", keys, seen)
    for name in sorted(children.keys() - value.keys()):
        rows = [keys[row] for row in (f"{begin}{name}{tail}" for tail in ("", "[]", "{}")) if row in keys]
        if not rows or rows[0].always:
            yield f"{begin}{name} must be there; it is not"


def page() -> str:
    text = PAGE
    for section in read():
        text += f"\n## {section.title}\n\n| key | type | meaning |\n|---|---|---|\n"
        for path, key in section.keys.items():
            types = " or ".join(sorted(key.types - ({"int"} if "number" in key.types else set()),
                                       key=lambda kind: (kind == "null", kind)))
            text += f"| `{path}`{'' if key.always else ' ?'} | {types} | {key.meaning} |\n"
    return text
