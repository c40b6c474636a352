"""``python -m dct_plugin.megatron``: arguments, the script's surroundings, checks before patching."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support import processes
from support.forked import forked_interpreters

from dct_plugin.config import DCTConfig
from dct_plugin.config.model_parallel import ThresholdMethod
from dct_plugin.errors import ConfigError, DCTError, DesyncError
from dct_plugin.integrations.host.versions import faults
from dct_plugin.integrations.megatron import versions
from dct_plugin.integrations.megatron.launch import agree, hook_states
from dct_plugin.integrations.megatron.options import launcher_rank, parse
from dct_plugin.recommender.links.team import free_port

_PACKAGE = importlib.util.find_spec("megatron")
_FOLDERS = [Path(path, "core") for path in (_PACKAGE and _PACKAGE.submodule_search_locations) or ()]
INSTALLED = next((folder for folder in _FOLDERS if (folder / "__init__.py").is_file()), None)
needs_megatron = pytest.mark.skipif(INSTALLED is None, reason="megatron-core is not installed")
FORWARD = '{"method": "threshold", "sparsity": 0.9}'
OFF = {"enabled": False}
SECTION = json.dumps({"data_parallel": OFF, "model_parallel": {"pipeline": {"forward": json.loads(FORWARD)}}})
PIPELINE = f"--dct={SECTION}"


def section(**data: Any) -> str:
    return f"--dct={json.dumps({'data_parallel': data})}"


def stages(**pipeline: Any) -> str:
    return f"--dct={json.dumps({'model_parallel': {'pipeline': pipeline}})}"


def start(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "DCT_CONFIG", "SLURM_PROCID")
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


def run(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return start("-m", "dct_plugin.megatron", *arguments, cwd=cwd, **environment)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


# -- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dct", SECTION, "x.py", "--a", "1", "b"],
        ["x.py", "--a", "1", "--dct", SECTION, "b"],
        ["x.py", "--a", "1", "b", f"--dct={SECTION}"],
        ["x.py", "--a", "1", "b", "--dct", SECTION],
    ],
)
def test_own_arguments_may_stand_anywhere(arguments: list[str]) -> None:
    found = parse(arguments, {})
    assert found.target == "x.py"
    assert found.arguments == ["--a", "1", "b"]
    assert found.config.model_parallel.pipeline.forward == ThresholdMethod(sparsity=0.9)


@pytest.mark.parametrize(
    ("arguments", "rest"),
    [
        (["--local-rank=1", "x.py", "-a"], ["--local-rank=1", "-a"]),
        (["--local_rank=1", "x.py"], ["--local_rank=1"]),
        (["--local_rank", "1", PIPELINE, "x.py", "-m", "y"], ["--local_rank", "1", "-m", "y"]),
    ],
)
def test_local_rank_of_older_launchers_reaches_the_script(arguments: list[str], rest: list[str]) -> None:
    found = parse([*arguments, PIPELINE], {})
    assert (found.target, found.is_module, found.arguments) == ("x.py", False, rest)


@pytest.mark.parametrize("flag", ["-m", "--module"])
def test_modules(flag: str) -> None:
    found = parse(["--local-rank=0", flag, "a.b", "-m", "c", PIPELINE], {})
    assert (found.target, found.is_module, found.arguments) == ("a.b", True, ["--local-rank=0", "-m", "c"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PIPELINE], "no script to run"),
        ([PIPELINE, "-m"], "needs the name of a module"),
        ([PIPELINE, "--lr", "1", "x.py"], "'--lr' before the script"),
        (["x.py"], "no configuration: give --dct or --dct-config"),
        (["x.py", "--dct-config"], "--dct-config needs a value"),
        (["x.py", "--dct", "--lr"], "--dct needs a value, got '--lr'"),
        (["x.py", "--dct-data-parallel-sparsity", "0.9"], "unknown argument --dct-data-parallel-sparsity"),
        (["x.py", section(sparsitty=0.9)], "did you mean dct.data_parallel.sparsity?"),
        (["x.py", stages(evaluation="yes")], "must be true or false"),
        (["x.py", "--dct", "{sparsity"], "--dct = {sparsity: must be a JSON object"),
        (["x.py", "--dct", "3"], "--dct = 3: must be a JSON object"),
        (["x.py", "--dct", "[]"], "--dct = []: must be a JSON object"),
        (["x.py", "--dct", '{"kernels": {}, "kernels": {}}'], "key 'kernels' is given twice"),
        (["x.py", "--dct-config", "absent.json"], "absent.json: cannot be read"),
    ],
)
def test_faults_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(arguments, {})
    assert message in str(caught.value)


def test_the_configuration_comes_from_file_environment_and_options(tmp_path: Path) -> None:
    content = {"data_parallel": {"sparsity": 0.5}, "metrics": {"every": 7}}
    first = write(tmp_path / "a.json", json.dumps({"dct": content}))
    second = write(tmp_path / "b.json", json.dumps({"metrics": {"every": 8}}))
    found = parse(["x.py", "--dct-config", str(first)], {"DCT_CONFIG": str(second)})
    assert found.config == DCTConfig.parse(content)
    assert found.source == str(first)
    found = parse(["x.py"], {"DCT_CONFIG": str(second)})
    assert found.config.metrics.every == 8
    assert "DCT_CONFIG" in found.source
    found = parse(["x.py", f"--dct-config={first}", section(sparsity=0.25)], {})
    assert found.config == DCTConfig.parse(content).updated({"data_parallel": {"sparsity": 0.25}})


def test_hooks_of_a_section() -> None:
    config = parse(["x.py", PIPELINE], {}).config
    assert [name for name, reason in hook_states(config).items() if not reason] == ["pipeline"]
    forward = {"method": "transform", "rate": 2}
    config = parse(["x.py", stages(forward=forward, backward="quantise")], {}).config
    assert config.model_parallel.pipeline.summary == "transform, 2 bits per entry, gradients quantise, 8 bits"
    states = hook_states(config)
    assert states["pipeline"] == ""
    assert states["tensor"] == 'dct.model_parallel.tensor.forward = "none"'


def test_reasons_why_a_hook_is_not_active() -> None:
    section: dict[str, Any] = {
        "data_parallel": {"sparsity": 0},
        "model_parallel": {"tensor": {"forward": {"method": "threshold", "sparsity": 0}}},
    }
    states = hook_states(DCTConfig.parse(section))
    assert states == {
        "pipeline": 'dct.model_parallel.pipeline.forward = "none"',
        "tensor": "dct.model_parallel.tensor.forward.sparsity = 0",
        "data_parallel": "dct.data_parallel.sparsity = 0",
    }
    assert set(hook_states(DCTConfig(enabled=False)).values()) == {"dct.enabled = false"}
    section["data_parallel"]["parameters"] = {}
    assert hook_states(DCTConfig.parse(section))["data_parallel"] == ""


# -- the script's surroundings ------------------------------------------------------------------------------

REPORT = """\
    import json, sys, os
    print(json.dumps({"name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0],
                      "main": sys.modules["__main__"].__dict__ is globals(), "cwd": os.getcwd()}))
"""


def report(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    write(tmp_path / "sub" / "x.py", REPORT + "    import beside\n")
    write(tmp_path / "sub" / "beside.py", "")
    plain = report(start("sub/x.py", "--a", "1", cwd=tmp_path))
    result = run(PIPELINE, "sub/x.py", "--a", "1", cwd=tmp_path)
    assert report(result) == {**plain, "argv": [str(tmp_path / "sub" / "x.py"), "--a", "1"]}
    assert "never imported megatron.core" in result.stderr


@pytest.mark.slow
def test_a_module_runs_as_python_would_run_it(tmp_path: Path) -> None:
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "x.py", REPORT)
    plain = report(start("-m", "pkg.x", "1", cwd=tmp_path))
    found = report(run("-m", "pkg.x", "1", PIPELINE, cwd=tmp_path))
    assert found == plain
    found = report(run("--local-rank=0", "-m", "pkg.x", "1", PIPELINE, cwd=tmp_path))
    assert found["argv"][1:] == ["--local-rank=0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "local_rank"),
    [
        (["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"], None),
        (["torch.distributed.launch", "--nproc-per-node=2", "-m"], "--local-rank={}"),
        (["deepspeed.launcher.runner", "--num_gpus", "2", "--module"], "--local_rank={}"),
    ],
    ids=lambda value: (
        value[0].split(".")[0] + "." + value[0].split(".")[-1] if isinstance(value, list) else ""
    ),
)
def test_under_real_launchers(command: list[str], local_rank: str | None, tmp_path: Path) -> None:
    if command[0].startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    report_to_file = "import os, sys; print(sys.argv[1:], file=open(os.environ['RANK'], 'w'))"
    write(tmp_path / "x.py", report_to_file)
    environment = {"DS_ACCELERATOR": "cpu", "MASTER_PORT": str(free_port())}
    with forked_interpreters():
        result = start(
            "-m", *command, "dct_plugin.megatron", PIPELINE, "x.py", "-m", "1",
            cwd=tmp_path, **environment,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        expected = [*([local_rank.format(rank)] if local_rank else []), "-m", "1"]
        assert (tmp_path / str(rank)).read_text() == f"{expected}\n"


@pytest.mark.slow
@forked_interpreters()
def test_exit_status_and_traceback_are_the_script_s(tmp_path: Path) -> None:
    write(tmp_path / "x.py", "import sys; sys.exit(7)")
    assert run(PIPELINE, "x.py", cwd=tmp_path).returncode == 7
    write(tmp_path / "y.py", "raise KeyError('here')")
    result = run(PIPELINE, "y.py", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "KeyError: 'here'" in result.stderr


@pytest.mark.slow
@forked_interpreters()
def test_errors_come_without_traceback(tmp_path: Path) -> None:
    result = run(PIPELINE, "absent.py", cwd=tmp_path, RANK="3")
    assert result.returncode == 2
    assert result.stderr.startswith("dct: error on rank 3: cannot run 'absent.py'")
    assert "Traceback" not in result.stderr
    result = run(cwd=tmp_path)
    assert result.returncode == 2
    assert "no script to run\nusage: torchrun" in result.stderr
    result = run("-m", "absent.train", PIPELINE, cwd=tmp_path)
    assert result.returncode == 2
    assert "cannot run module 'absent.train'" in result.stderr
    assert "Traceback" not in result.stderr
    assert run("--dct-help", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_switched_off_it_leaves_everything_alone(tmp_path: Path) -> None:
    config = write(tmp_path / "off.json", '{"enabled": false}')
    write(
        tmp_path / "x.py", "import sys; print([f for f in sys.meta_path if 'megatron' in type(f).__module__])"
    )
    result = run("x.py", cwd=tmp_path, DCT_CONFIG=str(config))
    assert result.returncode == 0
    assert "switched off" in result.stdout
    assert result.stdout.endswith("[]\n")


# -- versions and signatures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.15.3", False),
        ("0.16.0", True),
        ("0.16.1+abc", True),
        ("0.19.9", True),
        ("0.20.0rc0", False),
        ("0.2.0", False),
    ],
)
def test_supported_versions(version: str, supported: bool) -> None:
    assert (version in versions.SUPPORTED) is supported


@pytest.mark.slow
def test_another_release_stops_the_run(tmp_path: Path) -> None:
    write(tmp_path / "megatron" / "core" / "__init__.py", "__version__ = '0.2.0'")
    write(tmp_path / "x.py", "import megatron.core; print('went on')")
    result = run(PIPELINE, "x.py", cwd=tmp_path)
    assert result.returncode == 1
    assert "went on" not in result.stdout
    assert "megatron-core 0.2.0" in result.stderr
    assert "supported: 0.16.0 up to, not including, 0.20.0" in result.stderr
    assert "what to do: this looks like Megatron-DeepSpeed" in result.stderr
    assert "Traceback" not in result.stderr


def copy_of_core(place: Path) -> Path:
    """The installed megatron-core once more, as links, for one of its files to be changed."""
    assert INSTALLED is not None
    core = place / "megatron" / "core"
    core.mkdir(parents=True)
    for item in INSTALLED.iterdir():
        (core / item.name).symlink_to(item)
    folder = core / "pipeline_parallel"
    folder.unlink()
    folder.mkdir()
    for item in (INSTALLED / "pipeline_parallel").iterdir():
        (folder / item.name).symlink_to(item)
    return core


#: ``python -m dct_plugin.megatron`` in a fork of a process that has imported megatron-core.
AFRESH = """
import runpy
from support.megatron_cpu import forget_megatron
forget_megatron()
runpy.run_module("dct_plugin.megatron", run_name="__main__", alter_sys=True)
"""


@needs_megatron
@pytest.mark.slow
def test_a_changed_signature_stops_the_run_only_if_it_is_needed(tmp_path: Path) -> None:
    core = copy_of_core(tmp_path)
    file = core / "pipeline_parallel" / "p2p_communication.py"
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace("tensor_send_next", "send_next"))
    write(tmp_path / "x.py", "import megatron.core; print('went on from', megatron.core.__file__)")
    with forked_interpreters():
        result = start("-c", AFRESH, PIPELINE, "x.py", cwd=tmp_path)
    assert result.returncode == 1
    assert "went on" not in result.stdout
    assert "P2PCommunicator._communicate (hook pipeline)" in result.stderr
    assert "expected: (self, tensor_send_next, " in result.stderr
    assert "found:    (self, send_next, " in result.stderr
    with forked_interpreters():
        result = start("-c", AFRESH, section(sparsity=0.9), "x.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"went on from {core}" in result.stdout


@needs_megatron
def test_the_installed_megatron_is_what_the_hooks_expect() -> None:
    assert faults(versions.TARGETS) == ""


# -- with megatron-core -------------------------------------------------------------------------------------

# megatron.training is part of a Megatron-LM checkout, a namespace package beside the installed megatron.core.
ARGUMENTS = """\
    import argparse

    def add_megatron_arguments(parser):
        parser.add_argument("--lr", type=float)
        return parser

    def parse_args():
        return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
"""
SCRIPT = """\
    import json
    from megatron.core import mpu
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.training.arguments import parse_args
    import megatron.core, torch

    arguments = vars(parse_args())
    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(pipeline_model_parallel_size=2)
    patched = hasattr(P2PCommunicator._communicate, "__wrapped__")
    print(json.dumps({"patched": patched, "arguments": arguments}, default=str))
    torch.distributed.destroy_process_group()
"""


def two_ranks(folder: Path, *configs: str) -> list[tuple[int, str, str]]:
    """Two processes of one job, each with its own configuration. Rank 1 is a fork."""
    port, python = free_port(), [sys.executable, "-m", "dct_plugin.megatron"]
    with forked_interpreters():
        fork = [sys.executable, "-c", AFRESH]
    ranks = []
    for rank, (config, program) in enumerate(zip(configs, (python, fork), strict=True)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DCT_CONFIG": config}
        ranks.append(
            subprocess.Popen(
                [program[0], "-W", "ignore", *program[1:], "x.py", "--lr", "0.5"],
                cwd=folder, env={**os.environ, **own},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    with ThreadPoolExecutor() as readers:
        written = [readers.submit(process.communicate) for process in ranks]
        wait(written, timeout=200)
        for process in ranks:  # a rank still there waits for one that is gone, whose output says why
            process.kill()
    return [(process.returncode, *text.result()) for process, text in zip(ranks, written, strict=True)]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write(tmp_path / "megatron" / "training" / "arguments.py", ARGUMENTS)
    write(tmp_path / "x.py", SCRIPT)
    for name, sparsity in {"a.json": 0.9, "b.json": 0.8}.items():
        section = {
            "model_parallel": {"pipeline": {"forward": {"method": "threshold", "sparsity": sparsity}}},
            "data_parallel": {"enabled": False},
        }
        write(tmp_path / name, json.dumps({"dct": section}))
    return tmp_path


@needs_megatron
@pytest.mark.slow
def test_hooks_are_in_place(job: Path) -> None:
    results = two_ranks(job, "a.json", "a.json")
    for code, out, err in results:
        assert code == 0, err
        found = json.loads(out.strip().splitlines()[-1])
        assert found["patched"]
        assert found["arguments"]["lr"] == 0.5
    first, second = (out for _, out, _ in results)
    assert "dct: active hooks: pipeline" in first
    assert "data_parallel (dct.data_parallel.enabled = false)" in first
    assert "dct: " not in second


@needs_megatron
@pytest.mark.slow
def test_ranks_with_different_configurations_stop_at_start(job: Path) -> None:
    with forked_interpreters():
        results = two_ranks(job, "a.json", "b.json")
    for code, out, err in results:
        assert code == 1, out
        assert "dct.model_parallel.pipeline.forward differs: {" in err
        assert '"sparsity": 0.9} on rank 0; {' in err
        assert '"sparsity": 0.8} on rank 1' in err
        assert "Traceback" not in err
        assert "patched" not in out


def agree_or_stay_away(rank: int, world_size: int, core_version: str) -> str:
    """The error; rank 1 does not take part."""
    store = dist.distributed_c10d._get_default_store()
    try:
        if rank == 1:
            store.wait(["rank 0 is done"])
        else:
            agree(DCTConfig(), core_version, limit=1.0)
    except DesyncError as error:
        return str(error)
    finally:
        store.set("rank 0 is done", "")
    return ""


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_and_hangs_nobody() -> None:
    error, nothing = processes.run(2, agree_or_stay_away, "0.16.1")
    assert not nothing
    assert "rank 1 did not report within 1 s" in error
    assert "not started through dct_plugin.megatron" in error


@pytest.mark.slow
def test_the_launcher_imports_nothing_heavy() -> None:
    program = (
        "import sys, dct_plugin.integrations.megatron.launch\n"
        "import dct_plugin.integrations.megatron.patch.command\n"
        "heavy = {'torch', 'numpy', 'megatron', 'pydantic'} & sys.modules.keys()\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_rank_is_found_with_every_launcher() -> None:
    assert launcher_rank({"RANK": ""}) is None
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        assert launcher_rank({name: "5"}) == 5
    assert launcher_rank({"SLURM_PROCID": "5", "RANK": "2"}) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graph_impl": "full_iteration"},  # from 0.18
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
    ],
)
def test_cuda_graphs_of_full_iterations_are_refused(settings: dict[str, Any]) -> None:
    from types import SimpleNamespace

    from dct_plugin.integrations.megatron import pipeline

    with pytest.raises(DCTError, match="CUDA graphs of full iterations"):
        pipeline._check(SimpleNamespace(pipeline_dtype=None, **settings))
