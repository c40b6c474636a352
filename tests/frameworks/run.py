"""Runs the hosts' own tests with the plugin in what they train: ``make test-hosts``.

A test may fail for three reasons. The plugin refuses it by name, and ``suites.py`` says so. It fails without
the plugin, too. Or the plugin breaks it: then this command fails. Refusals that no test met are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from suites import HERE, SUITES, Suite

ROOT = HERE.parents[1]


def main() -> int:
    """Run the suites, print a table and write it as JSON; 1 if the plugin breaks a test."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "suites", nargs="*", default=list(SUITES), help=f"of {', '.join(SUITES)}; default: all"
    )
    parser.add_argument("--sources", type=Path, required=True, help="folder of what is fetched")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    options = parser.parse_args()
    folders = {name: folder_of(SUITES[name], options.sources) for name in options.suites}
    results = {name: judge(SUITES[name], folder) for name, folder in folders.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1))
    columns = ("passed", "skipped", "injected", "refused", "fails without the plugin", "broken", "not met")
    print(" | ".join(("suite", *columns)))
    for name, found in results.items():
        print(" | ".join([name, *(str(len(found[column])) for column in columns)]))
    for name, found in results.items():
        for column in ("broken", "not met"):
            for each in found[column]:
                print(f"{name}: {column}: {each}")
    return any(found["broken"] or not found["injected"] for found in results.values())


def judge(suite: Suite, folder: Path) -> dict[str, list[str]]:
    """Run a suite with the plugin, and what fails also without it; return tests by what became of them."""
    outcomes, injected, end = run(suite, folder, [str(folder / path) for path in suite.paths], inject=True)
    failed = {test: each["text"] for test, each in outcomes.items() if each["outcome"] == "failed"}
    reasons = {
        test: [each for each in suite.refused if re.search(each.tests, test) and each.error in text]
        for test, text in failed.items()
    }
    rest = [test for test in failed if not reasons[test]]
    plain = run(suite, folder, rest, inject=False)[0] if rest else {}
    alike = [test for test in rest if plain.get(test, {}).get("outcome") == "failed"]
    return {
        **{kind: [t for t, e in outcomes.items() if e["outcome"] == kind] for kind in ("passed", "skipped")},
        "injected": sorted(injected),
        "refused": [test for test in failed if reasons[test]],
        "fails without the plugin": alike,
        "broken": [*(test for test in rest if test not in alike), *end],
        "not met": [
            f"{each.tests} {each.error}".strip()
            for each in suite.refused
            if not any(each in found for found in reasons.values())
        ],
    }


def run(
    suite: Suite, folder: Path, tests: Sequence[str], *, inject: bool
) -> tuple[dict[str, dict[str, str]], set[str], list[str]]:
    """Run tests of a suite.

    Args:
        folder: Folder of the tests; those of the project are named from the root of the repository.
        tests: Paths, or names as this function returns them.

    Returns:
        What :mod:`outcomes` says of each test by name; the tests in which the plugin took part; and the test
        in which pytest ended early, if it did.
    """
    with tempfile.TemporaryDirectory() as scratch:
        outcomes, injected, current = (Path(scratch, name) for name in ("outcomes", "injected", "current"))
        for file in (outcomes, injected, current):
            file.touch()
        variables = {name: each for name, each in os.environ.items() if not name.startswith("PYTEST_")}
        folders = [str(HERE / "injected"), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        variables |= {
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(folders),
            "DCT_OUTCOMES": str(outcomes),
            "DCT_CURRENT_TEST": str(current),
            **({"DCT_INJECTED": str(injected)} if inject else {}),
            **suite.environment,
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "-p", "no:cacheprovider"]
        command += ["--tb=native", f"--timeout={suite.seconds}", *suite.options]
        root = ROOT if folder == HERE else folder
        where = folder if suite.source is not None else scratch  # DeepSpeed's tests read files there
        done = subprocess.run([*command, *(str(root / test) for test in tests)], cwd=where, env=variables)
        found = {each["test"]: each for each in map(json.loads, outcomes.read_text().splitlines())}
        early = [] if done.returncode in (0, 1) else [f"{current.read_text()}: pytest ended here"]
        return found, set(injected.read_text().splitlines()), early


def folder_of(suite: Suite, sources: Path) -> Path:
    """Return the folder of a suite's tests. What is not there is fetched by git.

    Raises:
        SystemExit: The installed package is of another version than the tests.
    """
    if suite.folder is not None:
        return suite.folder
    source = suite.source
    assert source is not None
    installed = version(source.package).split("+")[0]
    if installed != source.version:
        sys.exit(f"{source.package} {installed} is installed, suites.py has the tests of {source.version}")
    checkout = sources.resolve() / f"{source.package}-{source.tag}"
    if not checkout.exists():
        part = checkout.with_name(f"{checkout.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        clone = ["git", "clone", "--quiet", "--depth", "1", "--filter=blob:none", "--sparse"]
        subprocess.run([*clone, "--branch", source.tag, source.url, str(part)], check=True)
        sparse = ["git", "-C", str(part), "sparse-checkout", "set", "--no-cone", f"/{source.folder}/"]
        subprocess.run(sparse, check=True)
        part.rename(checkout)
    return checkout / source.folder


if __name__ == "__main__":
    sys.exit(main())
