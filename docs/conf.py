"""The documentation site: `make docs` builds it into out/site, with warnings as errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.directives.patches import CSVTable
from typer.cli import get_docs_for_click

from dct_plugin import cli
from dct_plugin._version import __version__

sys.path.insert(0, str(Path(__file__).parent))
import result_tables

project = "dct-plugin"
author = "the authors of dct-plugin"
release = version = __version__
html_title = f"dct-plugin {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4  # the slugs that GitHub makes, so that links work in both
exclude_patterns = ["_generated/commands.md"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_prompt_text = "$ "


# Files of the repository that are pages of the site, too.
FILES = {
    "configs/README.md": "configs",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
}
ROOT = Path(__file__).resolve().parents[1]


def write_pages(app: Sphinx) -> None:
    """Write the generated pages: the commands of ``dct``, and files from outside of ``docs``."""
    pages = {name: (ROOT / file).read_text(encoding="utf-8") for file, name in FILES.items()}
    for name, page in pages.items():
        pages[name] = re.sub(r"\]\((\.\./)?docs/", "](../", page)
    commands = {"config": typer.main.get_command(cli.config.app)}
    commands |= {entry.name: cli.command_of(entry) for entry in cli.COMMANDS}
    pages["commands"] = "\n".join(
        get_docs_for_click(obj=command, ctx=typer.Context(command), indent=1, name=f"dct {name}")
        for name, command in commands.items()
    )
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    for name, page in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != page:
            path.write_text(page, encoding="utf-8")


def link_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Have links to these files lead to their pages."""
    for file, page in FILES.items():
        source[0] = source[0].replace(f"](../{file}", f"](_generated/{page}.md")


def skip_tuple_fields(
    app: Sphinx, kind: str, name: str, what: object, skip: bool, options: object
) -> bool | None:
    """Leave out the fields of named tuples, which the class describes."""
    return True if str(getattr(what, "__doc__", "")).startswith("Alias for field") else None


class ResultTable(CSVTable):
    """The directive ``csv-table`` for a file of results: the table, and below it the commands of the file."""

    commands: list[str]

    def run(self) -> list[nodes.Node]:
        """Return the table with its commands."""
        self.commands = []
        self.options.setdefault("header-rows", 1)
        shown: list[nodes.Node] = list(super().run())
        if self.commands:
            text = "\n".join(self.commands)
            shown.append(nodes.literal_block(text, text, language="bash"))
        return shown

    def get_csv_data(self) -> tuple[Any, Any]:
        """Return the lines of the table and their source; keep the commands."""
        lines, source = super().get_csv_data()
        self.commands = result_tables.commands(lines)
        return result_tables.table(lines), source


def setup(app: Sphinx) -> None:
    """Connect them."""
    app.add_directive("csv-table", ResultTable, override=True)
    app.connect("autodoc-skip-member", skip_tuple_fields)
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_files)
