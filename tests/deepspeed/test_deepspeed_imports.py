"""The imports of the DeepSpeed integration: plain ones, and each optional feature named by one table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

FOLDER = ROOT / "dct_plugin" / "integrations" / "deepspeed"


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Yield every node of every module of the integration, and of the entry point that activates it."""
    for path in [*FOLDER.glob("*.py"), FOLDER.parent / "autoload.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def test_nothing_is_imported_by_string() -> None:
    forbidden = {"import_module", "__import__"}
    found = [
        path.name
        for path, node in nodes()
        if (isinstance(node, ast.Name) and node.id in forbidden)
        or (isinstance(node, ast.Attribute) and node.attr in forbidden)
        or (isinstance(node, ast.alias) and node.name in forbidden)
    ]
    assert found == []


@pytest.mark.parametrize(("module", "table"), [("onebit", "engine_hook.py")])
def test_a_feature_in_a_file_of_its_own_is_named_by_one_table(module: str, table: str) -> None:
    """Deleting the file and its row removes the feature."""
    naming = {
        path.name
        for path, node in nodes()
        if isinstance(node, ast.ImportFrom)
        and node.level == 1
        and (node.module == module or (node.module is None and module in {a.name for a in node.names}))
    }
    assert naming == {table}
