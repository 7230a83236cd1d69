"""What the documentation sites of this repository share: their look, and links from a page to what is not of its site.

The sites are built into each other's folder, so that a link from a page of one to a page of another holds.
"""

import importlib.metadata
import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
SITES = {ROOT / "docs": ".", ROOT / "ptxkit" / "docs": "ptxkit"}         # sources -> folder within the built site
ROOT_PAGES = {ROOT / f"{name}.md": ROOT / "docs" / f"{name.lower()}.md"
              for name in ("README", "CONTRIBUTING", "CHANGELOG")}               # that the site has, too
LINK = re.compile(r"\[([^\]\[]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")

SETTINGS = {
    "exclude_patterns": ["build"],
    "highlight_language": "none",            # a block without a tag is not Python
    "smartquotes_action": "D",               # dashes alone: quotes in messages are as they are printed
    "pygments_dark_style": "github-dark",    # underlines no module, which would look like a link
    "html_theme": "furo",
    "html_theme_options": {"navigation_with_keys": True},
    "html_static_path": [str(ROOT / "ptxkit" / "docs" / "static")],
    "html_css_files": ["site.css"],
    "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 4,               # links to headings, as GitHub names them
    "myst_url_schemes": {"http": None, "https": None, "site": "{{path}}#{{fragment}}"},
}


def settings(project, distribution):
    """Return what conf.py of a site assigns, for a package and the name under which it is installed."""
    release = importlib.metadata.version(distribution)
    named = {"project": project, "author": f"the {project} authors", "copyright": f"the {project} authors, Apache-2.0"}
    icon = {"name": "repository", "url": repository(), "html": "repository", "class": ""}
    look = SETTINGS["html_theme_options"] | {"footer_icons": [icon]}
    titled = {"release": release, "version": release, "html_title": f"{project} {release}", "html_theme_options": look}
    return SETTINGS | named | titled


def repository():
    """Return the address of the repository."""
    return re.search(r'^Repository = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def write(pages):
    """Write the pages (file -> function that returns its text) that are not as they should be."""
    for file, page in pages.items():
        text = page()
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def adapt(app, docname, source):
    """Make a link that leaves the site a link to a page of another site, a download or, to a folder, plain text."""
    sources = pathlib.Path(app.srcdir).resolve()
    folder = (sources / docname).parent

    def outside(link):
        target = (folder / link[2]).resolve()
        if sources in target.parents:
            return link[0]
        target = ROOT_PAGES.get(target, target)
        for other, built in SITES.items():
            if other in target.parents and target.suffix == ".md":
                page = pathlib.Path(built, target.relative_to(other)).with_suffix(".html")
                folder_in_site = pathlib.Path(SITES[sources], docname).parent
                return f"[{link[1]}](site:{os.path.relpath(page, folder_in_site)}{link[3] or ''})"
        return link[1] if target.is_dir() else f"[{link[1]}](path:{link[2]})"

    source[0] = LINK.sub(outside, source[0])
