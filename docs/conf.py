"""Sphinx's settings. `./dev docs` builds the site into build/docs, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

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
author = "the authors of brim"
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
html_title = "brim"
html_theme_options = {"navigation_with_keys": True}

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
    ("py:.*", r"brim\..*\.[A-Z]"),
    ("cpp:.*", r".*"),
    ("std:ref", r".*_8h"),  # what a class is included from
]
