"""``dct patch-launch`` on scripts that nobody writes: how long it takes, which files."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.integrations.megatron.patch import (
    BACKUP,
    LARGEST,
    MODULE,
    LaunchError,
    find_launches,
    patch,
    revert,
)

LAUNCH = "torchrun pretrain_gpt.py\n"
PATCHED = f"torchrun -m {MODULE} pretrain_gpt.py\n"

# -- time -------------------------------------------------------------------------------------------------

#: Scripts of ``count`` pieces, each with something that invites a second look at what was read before.
GROWING: dict[str, Callable[[int], str]] = {
    "lines": lambda count: 'echo a b "$C d" ${E} # f\n' * count + LAUNCH,
    "launches": lambda count: "torchrun $A pretrain_gpt.py --b $C\n" * count,
    "launches that are in place": lambda count: PATCHED * count,
    "launches of something else": lambda count: "torchrun tools/x.py\n" * count,
    "launches not understood": lambda count: "flux run pretrain_gpt.py\n" * count,
    "words": lambda count: "torchrun " + "--nnodes 2 $A " * count + "pretrain_gpt.py",
    "words of a variable": lambda count: "$A " * count + LAUNCH,
    "assignments": lambda count: "A=pretrain_gpt.py\n" * count + "torchrun $A\n" * count,
    "assignments of launchers": lambda count: "A=torchrun\n" * count + "$A pretrain_gpt.py\n" * count,
    "assignments of scripts, used as launchers": lambda count: (
        "A='x pretrain_gpt.py'\n" * count + "$A\n" * count
    ),
    "assignments by assignments": lambda count: (
        "".join(f"{a}=${b}\n" * count for a, b in zip("ABCDE", "BCDEF", strict=True))
        + "".join(f"F={number}.py\n" for number in range(count))
        + "torchrun $A\n" * count
    ),
    "assignments before a command": lambda count: "A=1 " * count + "$B " * count + LAUNCH,
    "launchers that take each other as a value": lambda count: "torchrun -t " * count,
    "launchers without Python": lambda count: "torchrun --no-python " * count,
    "launchers of one Python": lambda count: "torchrun --no-python " * count + "python " + "-u " * count,
    "options of Python": lambda count: "python " + "-u " * count + "pretrain_gpt.py",
    "strings": lambda count: "sh -c \"cd a; torchrun pretrain_gpt.py --b 'c d'\"\n" * count,
    "strings in a string": lambda count: 'sh -c "' + r"torchrun pretrain_gpt.py \"a b\"; " * count + '"',
    "words after an open bracket": lambda count: 'a[1 "b c"\n' * count + LAUNCH,
    "open brackets": lambda count: "torchrun '" + "${a[" * count + "'",
    "open assignments": lambda count: "a" * count + "[" + "b" * count + "\n" + LAUNCH,
    "substitutions": lambda count: 'A=$(b $(c `d` ${E:-"$(f)"}) "$(g "$(h)")")\n' * count + LAUNCH,
    "substitutions in one word": lambda count: "echo " + "$(a)${B}`c`" * count + "\n" + LAUNCH,
    "parentheses": lambda count: "(" * 2 + "a " + "( " * count + ") " * count + "))\n" + LAUNCH,
    "arrays": lambda count: "A=(torchrun pretrain_gpt.py)\n" * count,
    "here-documents": lambda count: ("bash <<EOF\n" + LAUNCH + "EOF\n") * count,
    "other scripts": lambda count: "".join(f"bash {number}.sh\n" for number in range(count)),
}


def seconds(text: str) -> float:
    """Of the processor, for one script: patched and reverted, or refused.

    Without the garbage collector, whose time grows with what other tests left.
    """
    gc.disable()
    try:
        started = time.process_time()
        with contextlib.suppress(LaunchError):
            revert(patch(text)[0])
        return time.process_time() - started
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_time_grows_as_the_script_does(name: str) -> None:
    text = GROWING[name]
    count = 200
    while len(text(count)) < 9_000:
        count *= 2
    # 4 where time is linear, 16 where it is quadratic, 6.4 where a quadratic part takes a fifth of the
    # time of the shorter one. Others work on this machine, too: the best of some.
    ratios = []
    for _ in range(6):
        short = min(seconds(text(count)) for _ in range(2))
        ratios.append(seconds(text(4 * count)) / short)
        if ratios[-1] < 6:
            break
    assert min(ratios) < 6.4, ratios


NESTED: dict[str, tuple[str, str]] = {
    "$( )": ("$(a ", ")"),
    "quoted $( )": ('"$(a ', ')"'),
    "$( ) in a string": ('sh -c "$(a ', ')"'),
    "${ }": ("${A:-", "}"),
    "quoted ${ }": ('"${A:-', '}"'),
    "$( ) and ${ }": ("$(a ${A:-", "})"),
    "array": ("$(A=(", "))"),
}


@pytest.mark.parametrize("name", NESTED)
def test_time_grows_with_depth_not_with_its_power(name: str) -> None:
    opening, closing = NESTED[name]

    def taken(depth: int) -> float:
        return seconds(("echo " + opening * depth + closing * depth + "\n") * 100 + LAUNCH)

    short = min(taken(3) for _ in range(3))
    # What is read twice at each level would take 2**9 times as long.
    assert any(taken(12) < 50 * short for _ in range(3))


def test_a_launch_at_the_bottom_is_found() -> None:
    text = "x=$(" * 50 + "torchrun pretrain_gpt.py" + ")" * 50
    assert patch(text)[0] == text.replace("pretrain_gpt.py", f"-m {MODULE} pretrain_gpt.py")


PIECES = st.sampled_from(
    [
        *(
            "$(",
            ")",
            "${A:-",
            "}",
            "`",
            '"',
            "'",
            "((",
            "))",
            "$((",
            "<<E\n",
            "E\n",
            "A=(",
            "\\",
            "#",
            "a[",
            "]",
        ),
        *(
            "\n",
            "\n",
            " ",
            " ",
            ";",
            "torchrun ",
            "pretrain_gpt.py ",
            "--no-python ",
            "-t ",
            "A=",
            "$A ",
            "sh -c ",
            "é",
        ),
    ]
)


@settings(max_examples=400, deadline=None)
@example(
    [")", "$(", "A=(", "$A ", "`", " ", "torchrun ", "pretrain_gpt.py "], 5, []
)  # an insertion ends a reading
@given(st.lists(PIECES, max_size=12), st.integers(1, 150), st.lists(PIECES, max_size=12))
def test_repeated_pieces_are_refused_or_come_back(head: list[str], times: int, tail: list[str]) -> None:
    text = "".join(head) * times + "".join(tail)
    started = time.process_time()
    try:
        patched, _ = patch(text, partial=True)
    except LaunchError:
        pass
    else:
        assert all(launch.removal for launch in find_launches(patched).training)
        assert revert(patched) == text
    assert time.process_time() - started < 0.5 + 2e-4 * len(text)


# -- files ------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(LAUNCH)
    return path


def command(*arguments: object) -> tuple[int, str, str]:
    """Exit status, output and errors of ``dct patch-launch``; a call that blocks is interrupted."""

    def interrupt(*_: object) -> None:
        raise TimeoutError("blocked")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(20)
    try:
        result = CliRunner().invoke(cli.app, ["patch-launch", *map(str, arguments)])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def directory(path: Path) -> Path:
    path.mkdir()
    return path


def listening(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.getcwd()
        os.chdir(path.parent)  # a socket's name may have no more than 107 bytes
        try:
            server.bind(path.name)
        finally:
            os.chdir(folder)
    return path


IRREGULAR = {
    "a FIFO": fifo,
    "a folder": directory,
    "a socket": listening,
    "a character device": lambda path: Path(os.devnull),
}


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("linked", [False, True])
def test_only_regular_files_are_read(kind: str, linked: bool, tmp_path: Path) -> None:
    path = IRREGULAR[kind](tmp_path / "x.sh")
    if linked:
        path = tmp_path / "link.sh"
        path.symlink_to(IRREGULAR[kind](tmp_path / "y.sh"))
    for options in ([], ["--check"], ["--in-place"], ["--revert"]):
        code, out, err = command(path, *options)
        assert (code, out) == (2, "")
        assert f"{path}: not a regular file" in err


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_path_without_a_name_is_no_script(path: str) -> None:
    code, out, err = command(Path(path))
    assert (code, out) == (2, "")
    assert "not a regular file" in err


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_regular_files_are_taken_as_backup(kind: str, script: Path) -> None:
    target = IRREGULAR[kind](script.with_name("out"))
    backup = script.with_name(script.name + BACKUP)
    backup.symlink_to(target)
    code, _, err = command(script, "--in-place")
    assert code == 2
    assert f"{backup}: not a regular file" in err
    assert script.read_text() == LAUNCH


def test_a_configuration_is_a_regular_file(script: Path) -> None:
    code, _, err = command(script, "--config", fifo(script.with_name("dct.json")))
    assert code == 2
    assert "dct.json: not a regular file" in err


def test_a_file_too_large_for_a_script_is_refused(script: Path) -> None:
    os.truncate(script, LARGEST + 1)
    code, _, err = command(script)
    assert code == 2
    assert f"{script}: more than 1,000,000 bytes, too large for a launch script" in err
