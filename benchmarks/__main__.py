"""Writes every page and table that comes from results on record, or from what is counted and predicted.  No GPU:

    python -m benchmarks                          what differs from the pages
    python -m benchmarks write                    write them anew
    python -m benchmarks write --only sm90        those whose name or page has this word

`WRITERS` names them, from those that take seconds to the clock's, which take longest.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kda.tools.verify.ledger import FILE

from . import common, evidence, hopper_tables, notebook, picture, predicted, predicted_pairs
from .counted import figures

Texts = Mapping[Path, str]


def counted(page: str) -> Texts:
    return {figures.DOCS / page: figures.renewed(page)}


WRITERS: dict[str, Callable[[], Texts]] = {  # name -> what files should say
    "picture": picture.texts,
    "tables of sm90": hopper_tables.texts,
    "ledger": lambda: evidence.texts(evidence.rows_of(FILE)),
    **{f"counted {page}": functools.partial(counted, page) for page in dict.fromkeys(f.page for f in figures.FIGURES)},
    "notebook": notebook.texts,
    "pairs of predicted configurations": predicted_pairs.texts,
    "predicted": predicted.all_texts,
}


def differences(file: Path, text: str) -> list[str]:
    """Return what is said now and what should be said, line by line."""
    name, before = str(file.relative_to(common.ROOT)), file.read_text()
    return [*difflib.unified_diff(before.splitlines(), text.splitlines(), name, "now", "", "", 0, "")]


def main() -> None:
    parser = common.parser(__spec__, __doc__, json=False)
    parser.add_argument("write", nargs="?", choices=["write"], help="write the files")
    parser.add_argument("--only", metavar="WORD", default="")
    args = parser.parse_args()
    asked = {name: texts for name, texts in WRITERS.items() if args.only in name}
    if not asked:
        parser.error(f"--only must be a word of {', '.join(map(repr, WRITERS))}; found {args.only!r}")
    torch.set_num_threads(1)
    differs = False
    for name, texts in asked.items():
        for file, text in texts().items():
            lines = differences(file, text)
            print("\n".join([f"{name}: {len(lines)} lines differ", *lines]), flush=True)
            differs |= bool(lines)
            if args.write:
                file.write_text(text)
    sys.exit(differs and not args.write)


if __name__ == "__main__":
    main()
