"""The documentation site: `python -m sphinx -W ptxkit/docs build/docs/ptxkit`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import from_data
import shared

globals().update(shared.settings("ptxkit", "ptxkit"))
extensions = ["myst_parser"]


def setup(app):
    app.connect("builder-inited", from_data.write)
    app.connect("source-read", shared.adapt)
