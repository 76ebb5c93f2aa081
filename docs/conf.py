"""Settings of Sphinx, which makes the pages and the reference of the public names: ``./run.sh docs``."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "ms_gradaccum"
author = "the authors of ms_gradaccum"
(release,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "ms_gradaccum" / "__init__.py").read_text(), re.M)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
html_theme = "alabaster"
html_theme_options = {"description": "Gradient accumulation for MindSpore", "page_width": "70em"}
html_show_sourcelink = False

# Links to headings, as GitHub and Gitee name them; links to files that are no pages, see `link_to_checkout`.
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "checkout": {"url": "{{path}}#{{fragment}}"}}

# Sections of MindSpore's docstrings that napoleon does not know. Their texts are paragraphs and lists as they are.
napoleon_custom_sections = ["Inputs", "Outputs", "Supported Platforms"]
napoleon_numpy_docstring = False
# The section Attributes describes the fields of a tuple; autodoc would describe them once more.
napoleon_use_ivar = True
# Types are in the sections.
napoleon_attr_annotations = False
autodoc_typehints = "none"


def link_to_checkout(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links to what is no page, such as a sample, lead from the built page into the checkout."""
    built = (Path(app.outdir) / page).parent

    def replace(match: re.Match[str]) -> str:
        target = ((DOCS / page).parent / match[1]).resolve()
        return match[0] if target.is_relative_to(DOCS) else f"](checkout:{os.path.relpath(target, built)}"

    source[0] = re.sub(r"\]\((\.\./[^)#]*)", replace, source[0])


def sign_class(app: Sphinx, what: str, name: str, item: Any, *_: Any) -> tuple[str, str] | None:
    """Return the arguments of a class; those of a Cell's metaclass say nothing."""
    if what != "class" or "__init__" not in vars(item):
        return None
    signature = inspect.signature(item.__init__)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return stringify_signature(signature.replace(parameters=parameters[1:], return_annotation=signature.empty)), ""


def list_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the contents of what the first page of a language, or of a folder, links to; a page left out is an error."""
    name = page.rpartition("/")[2]
    if name in (app.config.root_doc, "migrating"):
        folder = "" if name == app.config.root_doc else f"{name}/"
        pages = "\n".join(dict.fromkeys(re.findall(rf"\]\(({folder}[\w/]+)\.(?:md|rst)[#)]", source[0])))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", list_pages)
    app.connect("source-read", link_to_checkout)
    app.connect("autodoc-process-signature", sign_class)
