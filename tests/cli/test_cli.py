"""The ``dct`` command, started as users start it."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from support import CONFIGS, ROOT
from support.forked import forked_interpreters
from typer.testing import CliRunner

from dct_plugin import __version__, cli
from dct_plugin.cli import doctor as doctor_module
from dct_plugin.cli.doctor import Finding, _supported
from dct_plugin.integrations.host.versions import TESTED, how_tested

runner = CliRunner()


def dct(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dct_plugin.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_version() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"dct-plugin {__version__}"


def test_help_lists_the_commands() -> None:
    result = runner.invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for command in ("config", "doctor", "demo"):
        assert command in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["config", "check", str(CONFIGS / "deepspeed_zero0_dct.json")],
        ["config", "show"],
    ],
)
def test_start_is_light(arguments: list[str]) -> None:
    python = sys.executable
    with forked_interpreters():  # for the process in which DeepSpeed judges a file
        program = (
            f"import sys; sys.executable = {sys.executable!r}; from dct_plugin.cli import app\n"
            f"try: app({arguments!r})\n"
            "except SystemExit as end: assert not end.code, end.code\n"
            "heavy = {'torch', 'numpy', 'deepspeed', 'dct_plugin.data_parallel'} & sys.modules.keys()\n"
            "sys.exit(f'imported: {heavy}' if heavy else 0)"
        )
        result = subprocess.run([python, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow  # DeepSpeed judges the files in a process of its own
def test_check_accepts_the_ready_made_files() -> None:
    files = sorted(str(path) for path in CONFIGS.glob("*.json"))
    with forked_interpreters():
        result = runner.invoke(cli.app, ["config", "check", *files])
    assert result.exit_code == 0
    assert result.output.count(": ok (fingerprint ") == len(files)
    warned = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert ["deepspeed_bf16_zero3_dct.json" in line for line in warned] == [True], "these settings lose"


@pytest.mark.slow
def test_ready_files_have_names_and_the_standard_input_a_limit(tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["config", "show", "hybrid_dct", "--json"])
    assert json.loads(result.stdout)["embedding"]["error_bound"] == 0.01
    result = runner.invoke(
        cli.app, ["config", "check", "hybrid_dtc", str(tmp_path), "-"], input=" " * 1_000_001
    )
    assert result.exit_code == 1
    assert "hybrid_dtc: cannot be read: No such file or directory; did you mean" in result.stderr
    assert "did you mean the ready configuration hybrid_dct?" in result.stderr
    assert f"{tmp_path}: cannot be read: Is a directory" in result.stderr
    assert "-: a configuration has 1 MB at most" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["demo", "--seed", "-1"], ["demo", "--seed", "9" * 30], ["dlrm", "--seeds", "9" * 15]]
)
def test_numbers_that_cannot_be(arguments: list[str]) -> None:
    pytest.importorskip("deepspeed")
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 2, result.output


@pytest.mark.slow
def test_check_reports_every_fault_of_every_file(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"dct": {"data_parallel": {"sparsity": 1, "mod[red]e": 2}}}))
    good = CONFIGS / "deepspeed_zero0_dct.json"
    with forked_interpreters():
        result = dct("config", "check", str(bad), str(tmp_path / "absent.json"), str(good))
    assert result.returncode == 1
    assert f"{good}: ok" in result.stdout
    assert f"invalid dct configuration in {bad} (2 faults):" in result.stderr
    assert "  dct.data_parallel.sparsity = 1: must be a number in [0, 1)\n" in result.stderr
    assert "dct.data_parallel.mod[red]e = 2: unknown key" in result.stderr
    assert "absent.json: cannot be read" in result.stderr
    assert "Traceback" not in result.stderr


def test_show_names_every_option(tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["config", "show", str(CONFIGS / "deepspeed_conservative_adam.json")])
    assert result.exit_code == 0
    assert "dct.data_parallel.sparsity_warmup_steps" in result.output
    assert "a number in [0, 1)" in result.output
    assert "400" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["config", "show"], ["advise", "--memory"]])
def test_a_terminal_that_is_not_unicode_gets_what_it_can_show(arguments: list[str]) -> None:
    result = dct(*arguments, PYTHONIOENCODING="latin-1")
    assert result.returncode == 0, result.stderr


def test_show_json_is_a_section_again(tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["config", "show", "--json"])
    section = tmp_path / "section.json"
    section.write_text(result.output)
    assert runner.invoke(cli.app, ["config", "check", str(section)]).exit_code == 0


@pytest.mark.slow
def test_show_of_a_faulty_file_ends_with_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"enabled": "yes"}')
    result = dct("config", "show", str(bad))
    assert result.returncode == 2
    assert 'dct.enabled = "yes": must be true or false' in result.stderr
    assert "Traceback" not in result.stderr


def greet(
    rest: Annotated[list[str], typer.Argument()], name: Annotated[str, typer.Option("--name", "-n")]
) -> None:
    """Say hello."""
    typer.echo(f"hello {name} {rest}")


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> cli.LazyCommand:
    monkeypatch.setattr(cli, "app", typer.Typer())
    monkeypatch.setattr(cli, "COMMANDS", made := [])
    cli.app.callback()(lambda: None)

    @cli._command("Say hello.")
    def _greet() -> Any:
        return greet

    return made[0]


def test_lazy_command_gets_its_arguments_as_they_are(entry: cli.LazyCommand) -> None:
    result = runner.invoke(cli.app, ["greet", "-n", "Ada", "x", "--", "--y"])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == "hello Ada ['x', '--y']"
    assert "Say hello" in runner.invoke(cli.app, ["greet", "--help"]).output
    assert runner.invoke(cli.app, ["greet", "--nome", "Ada"]).exit_code == 2


def test_lazy_command_without_its_extra(entry: cli.LazyCommand, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        cli._run(entry._replace(needs=("json", "no_such_module"), extra="demo"), ["-n", "Ada", "x"])
    assert "dct greet needs no_such_module, not installed here: pip install 'dct-plugin[demo]'" in (
        capsys.readouterr().err
    )
    with pytest.raises(typer.Exit):
        cli._run(entry._replace(load=lambda: importlib.import_module("no_such_module.sub")), [])
    assert "pip install no_such_module" in capsys.readouterr().err


def test_lazy_command_of_an_incomplete_installation_is_not_hidden(entry: cli.LazyCommand) -> None:
    with pytest.raises(ModuleNotFoundError):
        cli._run(entry._replace(load=lambda: importlib.import_module("dct_plugin.no_such_module")), [])


def findings(*arguments: str, **environment: str) -> dict[str, Finding]:
    result = dct("doctor", "--json", *arguments, **environment)
    found = {row["subject"]: Finding(**row) for row in json.loads(result.stdout)}
    assert result.returncode == any(finding.status == "fail" for finding in found.values())
    return found


@pytest.mark.slow
def test_doctor_finds_what_is_here() -> None:
    found = findings()
    import torch

    assert found["dct-plugin"].detail.startswith(__version__)
    assert found["torch"].detail.startswith(torch.__version__)
    assert found["torch"].status == "ok"
    assert found["activation"].status == "ok"
    assert found["kernels"].status in ("ok", "warn")
    assert {"deepspeed", "transformers", "accelerate", "triton"} <= found.keys()
    for finding in found.values():
        assert finding.status == "ok" or finding.advice


@pytest.mark.slow
def test_doctor_sees_the_environment() -> None:
    found = findings(TORCH_DEVICE_BACKEND_AUTOLOAD="0", DCT_KERNELS="reference")
    assert found["activation"].status == "warn"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in found["activation"].detail
    assert found["kernels"] == Finding("ok", "kernels", "reference (DCT_KERNELS=reference)")


@pytest.mark.slow
def test_doctor_reports_an_unknown_kernel_backend() -> None:
    with forked_interpreters():
        found = findings(DCT_KERNELS="nonsense")
    assert found["kernels"].status == "fail"
    assert "nonsense" in found["kernels"].detail


def test_doctor_survives_a_check_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken_check() -> list[Finding]:
        raise RuntimeError("[boom]")

    monkeypatch.setattr(doctor_module, "CHECKS", [_broken_check])
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "broken check" in result.output
    assert "[boom]" in result.output


@pytest.mark.parametrize(
    ("installed", "status"),
    [
        ("0.19.8", "ok"),
        ("0.19.8+cpu", "ok"),
        ("0.19.9rc1", "ok"),
        ("0.20.0", "warn"),
        ("0.18.9", "warn"),
    ],
)
def test_versions_are_held_against_the_metadata(
    installed: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "installed", lambda name: installed)
    finding = doctor_module._package("deepspeed", "advice")
    assert finding.status == status
    assert "supported: >=0.19,<0.20" in finding.detail


def test_supported_versions_come_from_the_metadata() -> None:
    assert "2.6" in _supported("torch")
    assert "0.18" not in _supported("deepspeed")
    assert not _supported("no-such-package")


def test_doctor_says_which_versions_were_tested() -> None:
    assert how_tested("torch", "2.13.0+cpu") == "tested"
    assert how_tested("torch", "2.9.1") == "not tested (tested: 2.6.0, 2.13.0, 2.15.0)"
    assert how_tested("numpy", "2.0.0") == ""
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    for name, versions in TESTED.items():
        row = re.search(rf"^\| {name} \|.*$", page, re.M)
        assert row is not None, name
        assert all(version in row[0] for version in versions), name
