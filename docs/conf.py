"""The documentation site: `python -m sphinx -W docs build/docs`.

Links to pages of ptxkit need its site, too: `python -m sphinx -W ptxkit/docs build/docs/ptxkit`.
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "ptxkit" / "docs"))

import shared
import written

globals().update(shared.settings("kda", "kimi-delta-attention"))
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

default_role = "code"                        # docstrings quote code as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_rtype = False
napoleon_use_admonition_for_examples = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 100


def unquoted(app, what, name, thing, options, signature, returns):
    """Return types that are written as text, without its quotes."""
    return signature and re.sub(r": '([^']*)'", r": \1", signature), returns


def setup(app):
    app.connect("builder-inited", written.write)
    app.connect("source-read", shared.adapt)
    app.connect("autodoc-process-signature", unquoted)
