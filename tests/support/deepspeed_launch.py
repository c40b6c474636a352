"""Starts the training scripts of the DeepSpeed tests and reads their results."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from support import processes, with_local_feedback

WORKER = Path(__file__).with_name("deepspeed_worker.py")
Run = dict[str, Any]
#: Results by run, per rank.
Results = list[dict[str, Run]]


def environment(**more: str) -> dict[str, str]:
    """CPU, one thread per rank, and no GPU that happens to be there."""
    variables = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }
    # DeepSpeed compiles an operator on first use. Two versions of ninja make each other compile it again: the
    # one beside this interpreter is taken only where there is no other.
    if shutil.which("ninja") is None:
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
    _refuse_stale_lock(variables)
    return variables


def _refuse_stale_lock(variables: dict[str, str]) -> None:
    """A DeepSpeed that is killed while it compiles leaves a lock, on which all later ones wait in silence."""
    if not hasattr(cpp_extension, "FileBaton"):  # from torch 2.15 on the lock ends with its process
        return
    folder = Path(variables.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for lock in folder.glob("*/deepspeed*/lock"):
        age = time.time() - lock.stat().st_mtime
        assert age < 300, f"{lock} was left by a DeepSpeed that was killed while compiling; remove it"


def torchrun(world_size: int, *arguments: str) -> list[str]:
    """Command line of torchrun, with a port of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={world_size}", *arguments]


def execute(
    command: list[str], folder: Path, *, timeout: float = processes.PATIENCE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; after the time limit it is stopped with everything it started."""
    process = subprocess.Popen(
        command,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.terminate()  # torchrun passes it on to the ranks
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def launch(world_size: int, plan: list[Run], folder: Path, **variables: str) -> Results:
    """Execute all runs of a plan (``deepspeed_worker``), in one process per rank, and return their results.

    The processes are forked from one that has imported DeepSpeed, which is faster than
    :func:`launch_with_torchrun`.
    """
    return run_ranks(world_size, _execute, folder, list(map(_with_local_feedback, plan)), **variables)


def _execute(plan: list[Run]) -> dict[str, Run]:
    from support import deepspeed_worker

    return deepspeed_worker.main(plan)


def launch_with_torchrun(world_size: int, plan: list[Run], folder: Path, **variables: str) -> Results:
    """Like :func:`launch`, in processes with an environment of their own from the start."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(list(map(_with_local_feedback, plan)), folder / "plan")
    done = execute(torchrun(world_size, str(WORKER), str(folder / "plan"), str(folder)), folder, **variables)
    (folder / "log").write_text(done.stdout + done.stderr)
    files = [folder / str(rank) for rank in range(world_size)]
    results = [torch.load(file, weights_only=False) if file.exists() else {} for file in files]
    # With all results written ranks only take down their connections, and gloo may abort in that.
    complete = all(len(result) == len(plan) for result in results)
    assert done.returncode == 0 or complete, (done.stdout + done.stderr)[-6000:]
    return results


def run_ranks(
    world_size: int, function: Callable[..., Any], folder: Path, *arguments: Any, **variables: str
) -> list[Any]:
    """Call a function in the ranks of one job, in ``folder``, and return its results. What the ranks print is
    kept in ``folder/log``.
    """
    _refuse_stale_lock(dict(os.environ))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    variables = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", **variables}
    try:
        return processes.run(world_size, _call, function, str(log), arguments, **variables)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-6000:] if log.exists() else ''}") from None


def _call(rank: int, world_size: int, function: Callable[..., Any], log: str, arguments: Any) -> Any:
    with open(log, "a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # In pytest's capture these would be other files.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    os.chdir(Path(log).parent)
    result = function(*arguments)
    dist.barrier()  # a rank that takes down its connections while others still use them can abort them
    atexit._run_exitfuncs()  # as at the end of a script
    sys.stdout.flush()
    return result


def _with_local_feedback(run: Run) -> Run:
    config = run.get("config")
    if not isinstance(config, dict) or "dct" not in config:
        return run
    return {**run, "config": {**config, "dct": with_local_feedback(config["dct"])}}


def config(
    stage: int = 0,
    precision: str = "fp32",
    *,
    dct: dict[str, Any] | None = None,
    optimizer: str = "SGD",
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A DeepSpeed configuration; ``more`` are top-level keys, ``zero`` keys of ``zero_optimization``."""
    parameters: dict[str, Any] = {"SGD": {"lr": 0.02, "momentum": 0.5}}.get(
        optimizer, {"lr": 0.004, "torch_adam": True}
    )
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 10**9,
        "optimizer": {"type": optimizer, "params": parameters},
        "zero_allow_untested_optimizer": True,
    }
    if precision != "fp32":
        settings[precision] = {"enabled": True}
    if stage:
        # Buckets smaller than one of the parameters, so that several are filled and one is "extra large".
        settings["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 4000, **(zero or {})}
    settings.update(more)
    if dct is not None:
        settings["dct"] = dct
    return settings


def assert_resumed_bitwise(results: Results, name: str) -> None:
    """``whole/name`` is ``half/name`` and ``rest/name``, which was loaded from its checkpoint, in one."""
    for rank in results:
        whole, half, rest = (rank[f"{part}/{name}"] for part in ("whole", "half", "rest"))
        assert rest["loaded"]
        assert half["losses"] + rest["losses"] == whole["losses"]
        assert rest["hash"] == whole["hash"]
        assert rest["residual"] == whole["residual"]
        assert rest["restored"] == half["residual"]
        assert whole["steps"] == rest["steps"] == 6
