"""Settings of Sphinx, and a directive for tables that the code answers for: `python -m sphinx -W docs build/docs`."""

import os
import sys
from pathlib import Path
from typing import Any

# Before JAX is imported: the tables are the same wherever they are made.
os.environ["JAX_PLATFORMS"] = "cpu"
for variable in ("GRADSOLVE_BACKEND", "GRADSOLVE_MEMORY", "GRADSOLVE_LOG"):
    os.environ.pop(variable, None)
sys.path.insert(0, str(Path(__file__).parent))

from docutils import nodes  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402
from sphinx.util.docutils import SphinxDirective  # noqa: E402
from supported import TABLES, table  # noqa: E402

import gradsolve_backend  # noqa: E402

project = "gradsolve_backend"
version = release = gradsolve_backend.__version__
project_copyright = "the authors of gradsolve_backend, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3  # links to headings are checked

# Docstrings write code between single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes, which matter more, are in the text
# "Returns" as text: what stands before a colon there is no type.
napoleon_custom_sections = [("Fields", "params_style"), "Returns"]

html_theme = "furo"
html_title = "GradSolve for Diffrax"
html_show_sphinx = False
html_copy_source = False


class Answered(SphinxDirective):
    """`{answered} NAME`: one of the tables of `supported.py`, made while the site is built."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Called by Sphinx."""
        (name,) = self.arguments
        if name not in TABLES:
            raise self.error(f"There is no table {name}. There are: {', '.join(TABLES)}.")
        return self.parse_text_to_nodes(table(name))


def keep_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Have Napoleon look for the type of an attribute, which ends with a colon, in a line that shows nothing."""
    if what in ("attribute", "property"):
        lines.insert(0, "\\ ")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("answered", Answered)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    return {"parallel_read_safe": True}
