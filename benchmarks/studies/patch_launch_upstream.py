"""``dct patch-launch`` over all shell scripts of a checkout: Megatron-LM's, Megatron-DeepSpeed's, anyone's.

    python benchmarks/studies/patch_launch_upstream.py ~/Megatron-LM/examples
    python benchmarks/studies/patch_launch_upstream.py ~/Megatron-LM/examples --list

Each script (``*.sh``) is copied, patched by the command in place, patched again, and reverted by the command
without its backup. Wanted: every training launch starts the plugin, ``bash -n`` says of the patched script
what it said of the original, the second patch changes nothing, and the reverted script is the original byte
for byte. Exit status 1 if any of this fails. Prints one row of the table in ``docs/megatron.md``;
``--list`` says of every script what it is, for the eye: what is called "no launch" must not be one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.integrations.megatron.patch import LaunchError, find_launches

CONFIG = "${HOME}/dct.json"  # left to the script's shell: nothing is read here

# What a script without a launch of its own does, by the first pattern found outside comments.
WITHOUT_LAUNCH = {
    "hands a job to sbatch or srun": r"\b(sbatch|srun)\b|SBATCH\.sh",
    "starts other scripts": r"(^|\s|;)(bash|sh|\.|source)\s+\S+(\.sh|\$)|^\s*\.?\.?/\S+\.sh",
    "starts Python, but no training": r"(^|[\s\"'=;])python[\d.]*\s",
    "settings or tools, no Python": "",
}


class Outcome(NamedTuple):
    """What became of a script: its class, a remark, and how many training launches it has."""

    group: str
    remark: str
    launches: int
    wrong: bool = False


def main() -> int:
    """Print a row of figures, or all scripts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a checkout, or a folder in it")
    parser.add_argument("--list", action="store_true", help="every script with its class")
    options = parser.parse_args()
    files = sorted(path for path in options.folder.rglob("*.sh") if path.is_file())
    if not files:
        parser.error(f"no *.sh below {options.folder}")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {file: there_and_back(file, Path(folder) / "script.sh") for file in files}
    groups: dict[str, list[Path]] = {}
    for file, outcome in outcomes.items():
        groups.setdefault(outcome.group, []).append(file)
    for group in sorted(groups) if options.list else []:
        print(f"{group}:")
        for file in groups[group]:
            remark = outcomes[file].remark
            print(f"    {file.relative_to(options.folder)}" + (f": {remark}" if remark else ""))
    for file, outcome in outcomes.items():
        if outcome.wrong:
            print(f"WRONG {file}: {outcome.remark}")
    print(f"{len(files)} scripts, {sum(outcome.launches for outcome in outcomes.values())} training launches")
    for group in sorted(groups):
        print(f"{len(groups[group]):5} {group}")
    return int(any(outcome.wrong for outcome in outcomes.values()))


def there_and_back(file: Path, copy: Path) -> Outcome:
    """Patch, patch again and revert a copy through the command."""
    original = file.read_bytes()
    shutil.copyfile(file, copy)
    text = original.decode("utf-8", "surrogateescape")
    try:
        found = find_launches(text)
    except LaunchError as error:
        return Outcome("refused", str(error), 0)
    if found.errors:
        code = dct(copy, "--in-place")
        wrong = code != 2 or copy.read_bytes() != original
        return Outcome("refused", "; ".join(found.errors), 0, wrong)
    if not found.training:
        wrong = dct(copy, "--in-place") != 2 or copy.read_bytes() != original
        if found.notes:
            group = (
                "left alone, for the remedy"
                if "not Megatron's" in str(found.notes)
                else "launches something else"
            )
            return Outcome(group, "; ".join(found.notes), 0, wrong)
        code_only = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        kind = next(
            kind
            for kind, pattern in WITHOUT_LAUNCH.items()
            if re.search(pattern, code_only, re.IGNORECASE | re.MULTILINE)
        )
        return Outcome(f"no launch: {kind}", "", 0, wrong)

    faults = []
    before = syntax(copy)
    if dct(copy, "--in-place", "--config", CONFIG) or dct(copy, "--check"):
        faults.append("not patched")
    patched = copy.read_bytes()
    starting = find_launches(patched.decode("utf-8", "surrogateescape"))
    if sum(launch.removal is not None for launch in starting.training) != len(found.training):
        faults.append("a training launch does not start the plugin")
    if syntax(copy) != before:
        faults.append("bash -n differs")
    dct(copy, "--in-place", "--config", CONFIG)
    if copy.read_bytes() != patched:
        faults.append("patching again changes it")
    for backup in copy.parent.glob("*.dct-orig*"):
        backup.unlink()
    if dct(copy, "--revert", "--in-place") or copy.read_bytes() != original:
        faults.append("not reverted")
    remark = "; ".join(faults) or ", ".join(f"{x.script} (line {x.line})" for x in found.training)
    return Outcome("patched and back, byte for byte", remark, len(found.training), bool(faults))


def dct(script: Path, *options: str) -> int:
    """Exit status of ``dct patch-launch``."""
    return CliRunner().invoke(cli.app, ["patch-launch", str(script), *options]).exit_code


def syntax(script: Path) -> int:
    """Exit status of ``bash -n``."""
    return subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
