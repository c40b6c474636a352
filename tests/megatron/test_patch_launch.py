"""``dct patch-launch`` on representative scripts, which are also run with launchers that only take notes."""

from __future__ import annotations

import contextlib
import json
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.integrations.megatron import patch as launches
from dct_plugin.integrations.megatron.patch import BACKUP, MODULE, LaunchError, find_launches, revert

SCRIPTS = sorted((Path(__file__).parent / "launch_scripts").glob("*.sh"))
runner = CliRunner()

# How many launches of training scripts each holds.
LAUNCHES = {
    "heredoc.sh": 3,
    "launcher_variable.sh": 4,
    "module_forms.sh": 4,
    "srun_string.sh": 4,
    "torchrun_arrays.sh": 1,
    "torchrun_variable.sh": 1,
}

# How many it starts, where loops and conditions make that another number.
STARTS = {"heredoc.sh": 4}

# Writes its name and arguments, one per line, into $RECORD; wrappers then run what they were given.
STUB = """\
#!/bin/bash
name=$(basename "$0")
case $name in
    srun) while [[ $1 == -* ]]; do [[ $1 == --container-image ]] && shift; shift; done; exec "$@";;
    uv) shift; while [[ $1 == -* ]]; do shift; done; exec "$@";;
esac
{ printf '%s\\n' "$name"; printf '<%s>\\n' "$@"; echo; } >> "$RECORD"
"""


def patch(text: str, **options: Any) -> tuple[str, Any]:
    """Most scripts here say nothing of Megatron, and are about how launches are read."""
    return launches.patch(text, force=True, **options)


def read(path: Path) -> str:
    return path.read_bytes().decode()


def executed(text: str, folder: Path, *arguments: str) -> list[list[str]]:
    """Arguments of every launcher that the script starts, in order."""
    tools = folder / "bin"
    tools.mkdir(parents=True)
    for name in ("torchrun", "deepspeed", "python", "python3", "srun", "uv"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o755)
    script, record = folder / "script.sh", folder / "record"
    script.write_bytes(text.encode())
    record.touch()
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "RECORD": str(record),
        "HOME": "/home",
        "LAUNCH_SCRIPT": "torchrun",
    }
    environment |= {"N": "2"}
    subprocess.run(
        ["bash", str(script), *arguments],
        env=environment,
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return [entry.split("\n") for entry in record.read_text().strip().split("\n\n")]


def without_plugin(argv: list[str], config: str | None) -> list[str]:
    """What a launcher was given, less the plugin; fails unless the plugin is there once, as it should be."""
    at = argv.index(f"<{MODULE}>")
    added = ["<--dct-config>", f"<{config}>"] if config else []
    assert argv[at + 1 : at + 1 + len(added)] == added
    rest = argv[at + 1 + len(added) :]
    assert argv.count(f"<{MODULE}>") == 1
    if rest[0] == "<-m>":  # it was a module already
        return argv[:at] + rest[1:]
    assert argv[at - 1] == "<-m>"
    return argv[: at - 1] + rest


CORPUS = Path(__file__).parent / "launch_corpus"


def outcome(text: str) -> str:
    """The changed lines of a patched script, or the refusal, and what is said of other launches."""
    try:
        patched, found = launches.patch(text)
    except LaunchError as error:
        return f"refused: {error}\n"
    assert revert(patched) == revert(text)
    assert launches.patch(patched)[0] == patched
    lines = zip(text.split("\n"), patched.split("\n"), strict=True)
    changed = [f"{number}: {new.strip()}" for number, (old, new) in enumerate(lines, 1) if old != new]
    return "\n".join([*changed, *found.notes]) + "\n"


def test_every_script_of_the_corpus_becomes_what_it_should() -> None:
    """``launch_corpus/NAME.sh`` is a kind of launch, ``NAME.txt`` what it becomes, read by a person."""
    scripts = sorted(CORPUS.glob("*.sh"))
    assert len(scripts) > 80
    for path in scripts:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        assert outcome(text) == path.with_suffix(".txt").read_text(), path.name


def test_every_representative_script_is_counted() -> None:
    assert [path.name for path in SCRIPTS] == sorted(LAUNCHES)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize("config", [None, "conf/dct.json", "${HOME}/dct.json"])
def test_patched_and_back(path: Path, config: str | None) -> None:
    text = read(path)
    patched, found = patch(text, config=config)
    assert len(found.training) == LAUNCHES[path.name]
    assert not found.errors
    assert patched != text
    assert patch(patched, config=config)[0] == patched
    assert revert(patched) == text
    assert revert(text) == text
    assert all(launch.removal for launch in find_launches(patched).training)


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize("config", [None, "conf/dct.json"])
def test_patched_scripts_hand_over_the_plugin(path: Path, config: str | None, tmp_path: Path) -> None:
    text = read(path)
    plain = executed(text, tmp_path / "plain")
    with_plugin = executed(patch(text, config=config)[0], tmp_path / "patched")
    assert len(plain) == len(with_plugin)
    started = 0
    for before, after in zip(plain, with_plugin, strict=True):
        after = [word.replace(str(tmp_path / "patched"), str(tmp_path / "plain")) for word in after]
        if after != before:
            started += 1
            assert without_plugin(after, config) == before
    assert started == STARTS.get(path.name, LAUNCHES[path.name])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun pretrain_gpt.py", "torchrun -m dct_plugin.megatron pretrain_gpt.py"),
        ("torchrun $A pretrain_gpt.py --x", "torchrun $A -m dct_plugin.megatron pretrain_gpt.py --x"),
        ("/opt/bin/torchrun $A a/train.py", "/opt/bin/torchrun $A -m dct_plugin.megatron a/train.py"),
        ("ft_launcher --nnodes 2 sft_vlm.py", "ft_launcher --nnodes 2 -m dct_plugin.megatron sft_vlm.py"),
        ("python3.11 -u -W ignore train.py", "python3.11 -u -W ignore -m dct_plugin.megatron train.py"),
        ("torchrun $A -m a.train", "torchrun $A -m dct_plugin.megatron -m a.train"),
        (
            "torchrun --no-python python -u train.py",
            "torchrun --no-python python -u -m dct_plugin.megatron train.py",
        ),
        ("mpirun -np 2 python train.py", "mpirun -np 2 python -m dct_plugin.megatron train.py"),
        (
            "dbg -p :1 -m torch.distributed.run -- ${A[@]} train.py",
            "dbg -p :1 -m torch.distributed.run -- ${A[@]} -m dct_plugin.megatron train.py",
        ),
        (
            'sh -c "torchrun \\"$S/train.py\\" -x"',
            'sh -c "torchrun -m dct_plugin.megatron \\"$S/train.py\\" -x"',
        ),
        ("torchrun $A $TRAIN_SCRIPT $B", "torchrun $A -m dct_plugin.megatron $TRAIN_SCRIPT $B"),
        ("S=pretrain_gpt.py\ntorchrun $A $S", "S=pretrain_gpt.py\ntorchrun $A -m dct_plugin.megatron $S"),
        ("S=x.py\nS=train.py\ntorchrun ${S}", "S=x.py\nS=train.py\ntorchrun -m dct_plugin.megatron ${S}"),
        ("torchrun \\\r\n  train.py\r\n", "torchrun \\\r\n  -m dct_plugin.megatron train.py\r\n"),
        (
            "PY=python3\n$PY -m torch.distributed.run --nnodes 1 train.py",
            "PY=python3\n$PY -m torch.distributed.run --nnodes 1 -m dct_plugin.megatron train.py",
        ),
        (
            "$PYTHON -m torch.distributed.run train.py",
            "$PYTHON -m torch.distributed.run -m dct_plugin.megatron train.py",
        ),
        (
            "A=$(cat <<E\nit's\nE\n)\ntorchrun train.py",
            "A=$(cat <<E\nit's\nE\n)\ntorchrun -m dct_plugin.megatron train.py",
        ),
        (
            "A=$(bash <<E\ntorchrun train.py\nE)\necho 'b'",
            "A=$(bash <<E\ntorchrun -m dct_plugin.megatron train.py\nE)\necho 'b'",
        ),
        ('torchrun train.py > a 2>&1 <<< "$B"', 'torchrun -m dct_plugin.megatron train.py > a 2>&1 <<< "$B"'),
        ("torchrun --a=\\\nb train.py", "torchrun --a=\\\nb -m dct_plugin.megatron train.py"),
        ("srun > log torchrun train.py", "srun > log torchrun -m dct_plugin.megatron train.py"),
        ("a && b > log torchrun train.py", "a && b > log torchrun -m dct_plugin.megatron train.py"),
        ("torchrun\ttrain.py;ls train.py", "torchrun\t-m dct_plugin.megatron train.py;ls train.py"),
    ],
)  # fmt: skip
def test_one_insertion(line: str, expected: str) -> None:
    assert patch(line)[0] == expected
    assert revert(expected) == line


@pytest.mark.parametrize(
    ("text", "number", "what"),
    [
        ("set -e\ntorchrun ${ARGS[@]}\n", 2, "no script found"),
        ("torchrun $ARGS $COMMAND --lr 1", 1, "no script found before --lr"),
        ("\n\ntorchrun --no-python ./run train.py", 3, "no launcher known here"),
        ("python -um a.train", 1, "python -um: write -u -m"),
        ("torchrun ./launch train.py", 1, "neither an option nor a Python script"),
        ("mylauncher train.py", 1, "no launcher known here"),
        ("torchrun pretrain_gpt.py\nflux run train.py", 2, "no launcher known here"),
        (f"# torchrun -m {MODULE} x.py\ntorchrun train.py", 1, "before no launch"),
        (f"torchrun '-m' {MODULE} train.py", 1, "in a way that is not understood"),
    ],
)
def test_refusals_name_the_line(text: str, number: int, what: str) -> None:
    with pytest.raises(LaunchError, match=f"line {number}: .*{what}"):
        patch(text)


@pytest.mark.parametrize(
    "text",
    [
        "torchrun train.py 2>&1 | tee >(cat > log)",
        "[[ $x =~ ^[0-9]+$ && ( -n $C ) ]] && torchrun train.py",
        "declare -A M=([a]=1 [b]=2); torchrun train.py ${M[a]} ${B//,/ } ${C%%.*} ${#D[@]} ${!E} ${F^^}",
        "for ((i=0;i<3;i++)); do torchrun train.py; done; while read -r x; do :; done < file",
        'case "$1" in a|b) torchrun train.py ;; *) exit 1;; esac; f() { torchrun train.py; }',
        "torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) train.py; ((i++)); let x=1+2",
        "exec > >(tee log) 2>&1; torchrun train.py |& tee log & wait $!",
        'ssh host "cd x && torchrun train.py --a \'b c\'"; sbatch --wrap="torchrun train.py"',
        'HOSTS=($(scontrol show hostnames "$L")); srun torchrun --master_addr ${HOSTS[0]} train.py "${@:2}"',
        'python - <<E\nprint("it\'s (x)")\nE\ntorchrun train.py',
        'V="${A:$K+1}"; N=${N:=4}; torchrun train.py --a {1..3} --x "`date +%s`" --d "a\\"b"',
        "A=(\n  a # it's\n  b\n)\ntorchrun train.py ${A[@]}",
    ],
)
def test_constructs_of_scripts_in_use(text: str) -> None:
    assert patch(text)[0] == text.replace("train.py", "-m dct_plugin.megatron train.py")


def test_a_syntax_error_elsewhere_does_not_matter() -> None:
    text = "D=<path of the data>\ntorchrun train.py\necho a ) b\nE=<prefix>_text\n"
    assert patch(text)[0] == text.replace("train.py", "-m dct_plugin.megatron train.py")


@pytest.mark.parametrize("body", ["Echo it's\n", "E2\nE(\n", "\tE\nEE\n"])
def test_lines_that_begin_with_the_end_of_a_here_document_do_not_end_it(body: str) -> None:
    text = f"cat <<E\n{body}E\ntorchrun train.py\nsh <<E\n{body}torchrun train.py\nE\n"
    patched, found = patch(text)
    assert patched.startswith(f"cat <<E\n{body}E\ntorchrun -m dct_plugin.megatron train.py\n")
    assert found.training[0].line == text[: text.index("torchrun")].count("\n") + 1
    assert revert(patched) == text


def test_partial_patches_what_is_understood() -> None:
    patched, found = patch("torchrun train.py\nflux run train.py\n", partial=True)
    assert patched == "torchrun -m dct_plugin.megatron train.py\nflux run train.py\n"
    assert len(found.errors) == 1


@pytest.mark.parametrize(
    "line",
    [
        "",
        "echo torchrun pretrain_gpt.py",
        "# torchrun pretrain_gpt.py",
        "pip install deepspeed",
        "python tools/preprocess_data.py --script train.py",
        "torchrun tools/run_text_generation_server.py",
        "scp_target=train.py",
        '[ -f "pretrain_gpt.py" ] && ls train.py',
        "if [ ! -f train.py ]; then echo train.py; fi",
    ],
)
def test_what_is_no_launch_of_a_training(line: str) -> None:
    with pytest.raises(LaunchError, match="no launch of a training script found"):
        patch(line)


def test_other_scripts_are_named_and_can_be_added() -> None:
    text = "torchrun tasks/main.py --task X\n"
    with pytest.raises(LaunchError, match=r"line 1: tasks/main\.py is not a training script"):
        patch(text)
    patched, _ = patch(text, scripts=["tasks/main.py"])
    assert patched == "torchrun -m dct_plugin.megatron tasks/main.py --task X\n"
    assert revert(patched) == text


def test_another_configuration_replaces_the_one_there() -> None:
    first, _ = patch("torchrun train.py\n", config="a.json")
    assert patch(first)[0] == first
    assert (
        patch(first, config="b.json")[0] == "torchrun -m dct_plugin.megatron --dct-config b.json train.py\n"
    )


@pytest.mark.parametrize(
    "value",
    [
        """ '{"data_parallel": {"sparsity": 0.9}}'""",
        r""" "{\"data_parallel\": {}}" """.rstrip(),
        "='{\"data_parallel\":\n {}}'",
        """ 'my dct.json'""",
    ],
)
def test_a_section_of_several_words_is_one_argument(value: str) -> None:
    text = f"torchrun -m {MODULE} --dct{value} train.py\n"
    assert revert(text) == "torchrun train.py\n"
    assert patch(text)[0] == text
    assert patch(text, config="b.json")[0] == f"torchrun -m {MODULE} --dct-config b.json train.py\n"


@pytest.mark.parametrize("path", ["a b.json", "it's.json", "a;b"])
def test_a_path_that_is_more_than_a_word_is_refused(path: str) -> None:
    with pytest.raises(LaunchError, match="without blanks and special characters"):
        patch("torchrun train.py", config=path)


FRAGMENTS = st.sampled_from(
    [
        *[
            "torchrun",
            "deepspeed",
            "python",
            "-m",
            "torch.distributed.run",
            "--lr=1",
            "train.py",
            "pretrain_gpt.py",
            "tools/x.py",
        ],
        *[
            "$ARGS",
            "$SCRIPT",
            "SCRIPT=train.py",
            "A=(",
            ")",
            '"',
            "'",
            "`",
            "$(",
            "${",
            "}",
            ";",
            "&&",
            "|",
            "2>&1",
            "echo",
            "((",
            "))",
            "é",
            "\\",
            "$$",
            "if",
            "then",
            "fi",
            ";;",
        ],
        *["esac", "run_cmd=", "--module", "--no-python"],
        *("python3 -u", "--nnodes 2", '"${ARGS[@]}"', "\\\n", "\n", "\r\n", " ", " ", " ", "> log", "# text"),
        *("<<EOF\n", "EOF\n", "srun sh -c", 'cmd="', MODULE, "--dct-config a.json", "case x in x)"),
        "eval $run_cmd",
    ]
)


@settings(max_examples=600, deadline=None)
@given(st.lists(FRAGMENTS, max_size=25), st.sampled_from([None, "c.json", "a b.json"]))
def test_any_text_is_refused_or_comes_back(parts: list[str], config: str | None) -> None:
    text = " ".join(parts)
    try:
        patched, found = patch(text, config=config)
    except LaunchError:
        return
    assert len(patched) >= len(text) or any(launch.removal for launch in found.training)
    assert patch(patched, config=config)[0] == patched
    if not any(launch.removal for launch in found.training):
        assert revert(patched) == text


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="torchun pyA=\"'$(){}[]\\\n;&|<>#`.-\t\r", max_size=60))
def test_no_text_makes_it_fail_otherwise(text: str) -> None:
    with contextlib.suppress(LaunchError):
        patch(text)


# -- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    shutil.copy(Path(__file__).parent / "launch_scripts" / "torchrun_arrays.sh", path)
    path.chmod(0o750)
    return path


def command(*arguments: object) -> tuple[int, str, str]:
    result = runner.invoke(cli.app, ["patch-launch", "--force", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_prints_a_diff_that_patch_applies(script: Path) -> None:
    before = script.read_bytes()
    code, out, _ = command(script)
    assert code == 0
    assert script.read_bytes() == before
    copy = script.with_name("copy.sh")
    shutil.copy(script, copy)
    if shutil.which("patch"):
        subprocess.run(["patch", str(copy)], input=out, text=True, check=True, capture_output=True)
        assert copy.read_text() == patch(before.decode())[0]
    changed = [
        line for line in out.splitlines() if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")
    ]
    assert changed == [
        "-torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\",
        "+torchrun ${DISTRIBUTED_ARGS[@]} -m dct_plugin.megatron pretrain_gpt.py \\",
    ]


def test_in_place_and_back(script: Path) -> None:
    before = script.read_bytes()
    backup = script.with_name(script.name + BACKUP)
    assert command(script, "--check")[0] == 1
    assert command(script, "--in-place")[0] == 0
    assert MODULE in script.read_text()
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert backup.read_bytes() == before
    assert command(script, "--check")[0] == 0
    patched = script.read_bytes()
    code, _, err = command(script, "--in-place")
    assert code == 0
    assert "nothing to change" in err
    assert script.read_bytes() == patched
    assert backup.read_bytes() == before
    assert command(script, "--revert", "--check")[0] == 1
    assert command(script, "--revert", "--in-place")[0] == 0
    assert script.read_bytes() == before
    assert not backup.exists()
    assert command(script, "--revert", "--check")[0] == 0


def test_revert_needs_no_backup_and_keeps_later_edits(script: Path) -> None:
    before = script.read_text()
    command(script, "--in-place")
    script.write_text(script.read_text() + "echo done\n")
    assert command(script, "--revert", "--in-place")[0] == 0
    assert script.read_text() == before + "echo done\n"
    assert script.with_name(script.name + BACKUP).read_text() == before


def test_revert_restores_a_script_that_had_the_plugin_in_one_place_already(script: Path) -> None:
    text = f"torchrun -m {MODULE} train.py\ntorchrun train.py\n"
    script.write_text(text)
    command(script, "--in-place")
    assert script.read_text().count(MODULE) == 2
    command(script, "--revert", "--in-place")
    assert script.read_text() == text


def test_another_configuration_keeps_the_one_original(script: Path) -> None:
    before = script.read_text()
    backup = script.with_name(script.name + BACKUP)
    for config in ("$HOME/a.json", "$HOME/b.json"):
        code, _, _ = command(script, "--in-place", "--config", config)
        assert code == 0
        assert f"--dct-config {config} " in script.read_text()
        assert backup.read_text() == before
    command(script, "--revert", "--in-place")
    assert script.read_text() == before
    assert not backup.exists()


def test_every_refusal_names_the_file(script: Path) -> None:
    script.write_text("torchrun train.py\nflux run train.py\nflux run train.py\n")
    _, _, err = command(script)
    assert f"error: {script}: line 2: " in err
    assert f"\n{script}: line 3: " in err


def test_bytes_that_are_no_text_and_links_stay(script: Path) -> None:
    content = b"#!/bin/bash\r\n# caf\xe9 \xff\ntorchrun train.py"
    real = script.with_name("real.sh")
    real.write_bytes(content)
    script.unlink()
    script.symlink_to(real)
    command(script, "--in-place")
    assert script.is_symlink()
    assert real.read_bytes() == content.replace(b"train.py", b"-m dct_plugin.megatron train.py")
    assert command(script)[0] == 0
    command(script, "--revert", "--in-place")
    assert real.read_bytes() == content


def test_the_configuration_is_checked(script: Path) -> None:
    config = script.with_name("dct.json")
    config.write_text(
        json.dumps(
            {"dct": {"model_parallel": {"pipeline": {"forward": {"method": "threshold", "sparsity": 0.9}}}}}
        )
    )
    assert command(script, "--config", config, "--in-place")[0] == 0
    assert f"-m {MODULE} --dct-config {config} pretrain_gpt.py" in script.read_text()
    config.write_text("{}{")
    code, _, err = command(script, "--config", config)
    assert code == 2
    assert "not valid JSON" in err


def test_refusal_changes_nothing(script: Path) -> None:
    script.write_text("torchrun train.py\nflux run train.py\n")
    code, out, err = command(script, "--in-place")
    assert code == 2
    assert out == ""
    assert "line 2" in err
    assert MODULE not in script.read_text()
    assert command(script.with_name("absent.sh"))[0] == 2


def test_says_what_is_done(script: Path) -> None:
    script.write_text("torchrun train.py\ntorchrun tools/x.py\n")
    left = f"{script}: line 2: tools/x.py is not a training script"
    for options in ([], ["--check"], ["--in-place"]):
        said = command(script, *options)[2]
        assert left in said
        assert f"{script}: training launches: line 1\n" in said
    assert "nothing to change" in command(script)[2]
    assert "nothing is written" in command(script, "--config", "$A")[2]
    assert "nothing is written" in command(script, "--revert")[2]
    assert command(script, "--revert", "--in-place")[2] == ""


def test_an_older_backup_stays(script: Path) -> None:
    before = script.read_text()
    backup = script.with_name(script.name + BACKUP)
    backup.write_text("older\n")
    command(script, "--in-place")
    command(script, "--revert", "--in-place")
    assert backup.read_text() == "older\n"
    assert script.read_text() == before


def test_a_launch_needs_a_reason_which_may_be_an_import(tmp_path: Path) -> None:
    launch, script = tmp_path / "run.sh", tmp_path / "train.py"
    launch.write_text("torchrun --standalone train.py --lr 1\n")
    for content, status in (("import torch\n", 2), ("from megatron.core import mpu\n", 0)):
        script.write_text(content)
        result = runner.invoke(cli.app, ["patch-launch", str(launch)])
        assert result.exit_code == status
        assert ("nothing in the launch says that it is Megatron's" in result.output) == bool(status)
    script.unlink()
    assert runner.invoke(cli.app, ["patch-launch", "--force", str(launch)]).exit_code == 0
