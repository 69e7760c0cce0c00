"""Sphinx's settings. `./dev docs` builds the site into build/docs, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

import brim

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "pictures"))

import measured  # noqa: E402  what draws the pictures
import pages  # noqa: E402

GENERATED = DOCS / "_generated"  # not in git: pictures and the stubs of the Python reference
DOXYGEN = DOCS.parent / "build" / "doxygen"

pages.draw(GENERATED / "pictures")
measured.draw(GENERATED / "pictures")

project = "brim"
author = "the brim authors"
project_copyright = f"2026, {author}"
version = release = brim.__version__

extensions = [
    "breathe",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["pictures"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = f"brim {version}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["brim.css"]
html_copy_source = False
html_show_sphinx = False

# MyST: anchors of headings as GitHub makes them, so that links work there too.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autosummary_generate = True
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

breathe_projects = {"brim": str(DOXYGEN / "xml")}
breathe_default_project = "brim"
breathe_default_members = ("members",)

# References that must resolve are those to brim's own names; types of torch and Python, and type
# variables, have no pages here.
suppress_warnings = [
    "duplicate_declaration.cpp",  # every header opens namespace brim
    "ref.python",  # the annotation `type` beside attributes of that name
]

nitpick_ignore_regex = [
    ("py:.*", r"(?!brim\.).*"),
    ("py:.*", r"brim\.(.*\.)?_.*"),
    ("py:class", r"brim\.data\.shards\.Reader"),  # internal: it has no page
    ("py:.*", r"brim\..*\.[A-Z]"),
    ("cpp:.*", r".*"),
    ("std:ref", r".*_8h"),  # what a class is included from
]


def setup(app: Sphinx) -> None:
    """Leave out the fields of named tuples, which "Attributes" of their docstrings describe."""
    app.connect(
        "autodoc-skip-member",
        lambda _app, _what, _name, member, skip, _options: (
            skip or type(member).__name__ == "_tuplegetter"
        ),
    )
