"""Pages and docstrings: what they say of the paper, how they install the package, and whether names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "configs").glob("*.md"))]
#: One page a host, which a user follows from the top.
START = ["ddp", "deepspeed", "dlrm", "fsdp", "huggingface", "megatron", "torchft"]


def test_the_paper_is_cited_by_its_title() -> None:
    (title,) = re.findall(r"conference-paper\n +title: \"(.*)\"", (ROOT / "CITATION.cff").read_text())
    named = []
    for page in [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "dct_plugin").rglob("*.py")]:
        text = " ".join(page.read_text().split())
        named += [(page, found) for found in re.findall(r"\*([^*]{20,})\* \(Gupta", text)]
        # A citation names authors, venue and year, and no title, or this one.
        assert not re.search(r"Gupta et al\.(?!.{0,3}KDD 2021)", text.replace(" [", "")), page
    assert ROOT / "README.md" in [page for page, _ in named]
    assert {found for _, found in named} == {title}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_install_lines_work_without_an_index(page: Path) -> None:
    assert not re.findall(r"pip install '?dct-plugin", page.read_text())


@pytest.mark.parametrize("name", START)
def test_a_start_page_begins_with_its_install_line(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert "pip install" in page[:1200]


#: Packages whose modules the page of extensions names without their path.
SHORT = {"host": "dct_plugin.integrations.host"}
SOURCES = [ROOT / "dct_plugin", ROOT / "tests", ROOT / "benchmarks"]


def _code(page: str) -> list[str]:
    """Return the code within the sentences of a page, without its blocks."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Return the names that statements bind."""
    for node in body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If):
            yield from _bound(node.body)


def _exists(name: str) -> bool:
    """Return whether a dotted name is a module of the package, or a name at the top of one."""
    first, _, rest = name.partition(".")
    module, _, last = name.rpartition(".")
    if first in SHORT:
        return _exists(f"{SHORT[first]}.{rest}")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return False
    file = Path(spec.origin)
    beside = [file.parent / f"{last}.py", file.parent / last / "__init__.py"]
    if file.name == "__init__.py" and any(path.exists() for path in beside):
        return True
    return last in _bound(ast.parse(file.read_text(encoding="utf-8")).body)


def _begins_one(part: str, words: set[str]) -> bool:
    """Return whether a name that ends in an underscore is the beginning of others: ``ENC_``."""
    return part.endswith("_") and any(word.startswith(part) for word in words)


def test_the_page_of_extensions_names_what_exists() -> None:
    words: set[str] = set()
    for folder in SOURCES:
        for file in (*folder.rglob("*.py"), *folder.rglob("*.c")):
            if file != Path(__file__):
                words |= set(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    config = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = []
    for code in _code("extending"):
        name = code.split()[-1].rstrip("/")
        first = name.partition(".")[0]
        if "/" in name or name.endswith(".toml"):
            path = ROOT / name
            exists = (path.parent if "<" in path.name else path).exists()
        elif first == "dct":
            section, _, key = name.rpartition(".")
            exists = f"`{section}`" in config and f"| `{key}` |" in config
        elif first == "dct_plugin" or first in SHORT:
            exists = _exists(name)
        else:
            exists = all(part in words or _begins_one(part, words) for part in name.split("."))
        if not exists:
            missing.append(code)
    assert not missing


def test_the_page_of_the_api_names_what_exists() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    modules = re.findall(r"^\.\. automodule:: ([\w.]+)\n((?:   :.*\n)*)", text, re.M)
    assert len(modules) >= 8
    names = [module for module, _ in modules]
    for module, options in modules:
        for listed in re.findall(r":exclude-members: (.*)", options):
            names += [f"{module}.{name}" for name in listed.split(", ")]
    names += re.findall(r"autoclass:: ([\w.]+)", text)
    dotted = [re.sub(r"\(.*", "", code) for code in _code("api") if code.startswith("dct_plugin.")]
    assert [name for name in (*names, *dotted) if "." in name and not _exists(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page: Path) -> None:
    """Names that blocks import, and names that sentences give with their module."""
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"`(dct_plugin(?:\.\w+)+)[`(]", text)
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        for node in ast.walk(ast.parse(block.replace(", ...)", ")"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dct_plugin"):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
    assert [name for name in names if not _exists(name)] == []


def _texts(folder: Path) -> str:
    """Return the constant texts of all modules of a folder, with a line break between them."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in folder.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\n".join(
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_messages_of_the_page_of_troubleshooting_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    texts, missing = _texts(ROOT / "dct_plugin"), []
    cells = re.findall(r"^\| (`.*?`) \| ", page, re.M)
    assert len(cells) > 30
    for cell in cells:
        messages = [re.findall(r"[^\s`]+", message) for message in re.findall(r"`([^`]+)`", cell)]
        # Names and numbers are examples: three words in a row are the message's own.
        runs = [" ".join(words[at : at + 3]) for words in messages for at in range(max(1, len(words) - 2))]
        if not any(len(run) >= 12 and run in texts for run in runs):
            missing.append(cell)
    assert not missing, missing
