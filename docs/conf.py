"""The documentation site: `python -m sphinx -W docs build/docs`."""

import importlib.metadata
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent

project = "kda"
author = "the kda authors"
copyright = "the kda authors, Apache-2.0"
release = version = importlib.metadata.version("kimi-delta-attention")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]
highlight_language = "none"                  # a block without a tag is not Python
smartquotes_action = "D"                     # dashes alone: quotes in messages are as they are printed
pygments_dark_style = "github-dark"          # underlines no module, which would look like a link
html_theme = "furo"
html_title = f"kda {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4                     # links to headings, as GitHub names them

default_role = "code"                        # docstrings quote code as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_rtype = False
napoleon_use_admonition_for_examples = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

LINK = re.compile(r"\[([^\]\[]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def adapt(app, docname, source):
    """Makes links that leave docs/ downloads: of a folder, plain text."""
    folder = (HERE / docname).parent

    def outside(link):
        target = (folder / link[2]).resolve()
        if HERE in target.parents:
            return link[0]
        return link[1] if target.is_dir() else f"[{link[1]}](path:{link[2]})"

    source[0] = LINK.sub(outside, source[0])


def unquoted(app, what, name, thing, options, signature, returns):
    """Types that are written as text, without its quotes."""
    return signature and re.sub(r": '([^']*)'", r": \1", signature), returns


def setup(app):
    app.connect("source-read", adapt)
    app.connect("autodoc-process-signature", unquoted)
