"""``dct config check``: what it says about wrong files, and that it says what the start of the job says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from typer.testing import CliRunner

from dct_plugin import cli

runner = CliRunner()
JOB = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "Adagrad", "params": {"lr": 0.01}}}


def job(section: Any = None, **keys: Any) -> dict[str, Any]:
    return {**JOB, **keys, **({} if section is None else {"dct": section})}


def zero(stage: int, section: Any = None, **keys: Any) -> dict[str, Any]:
    return job({} if section is None else section, zero_optimization={"stage": stage, **keys})


def gradients(**keys: Any) -> dict[str, Any]:
    return {"data_parallel": keys}


#: By what is wrong, the file and the words that help.
WRONG: dict[str, tuple[Any, str]] = {
    "two letters": (job(dctt={}), "a section 'dctt', which nothing reads; did you mean 'dct'?"),
    "capitals": ({"DCT": {"data_parallel": {}}}, "a section 'DCT', which nothing reads; did you mean 'dct'?"),
    "no section": (job(), "a DeepSpeed configuration (it has 'optimizer') without a \"dct\" section"),
    "section in zero_optimization": (
        job(zero_optimization={"stage": 1, "dct": {}}),
        "zero_optimization.dct: nothing reads the section there; move it one level up, to the top",
    ),
    "no dct around it": (
        job(**gradients(sparsity=0.9)),
        "'data_parallel': nothing reads it at the top of the file; write \"dct\": {'data_parallel': ...}",
    ),
    "DeepSpeed's key in it": (
        job({"zero_optimization": {"stage": 1}}),
        'dct.zero_optimization = {"stage": 1}: unknown key; DeepSpeed reads it at the top of the file',
    ),
    "one level too high": (
        job({"sparsity": 0.9}),
        "dct.sparsity = 0.9: unknown key; did you mean dct.data_parallel.sparsity?",
    ),
    "one level too low": (
        job(gradients(metrics={"every": 5})),
        "unknown key; did you mean dct.metrics?",
    ),
    "another section's": (job(gradients(error_bound=0.01)), "did you mean dct.embedding.error_bound?"),
    "hyphen": (job(gradients(feedback="step-ahead")), 'did you mean "step_ahead"?'),
    "value as a key": (job(gradients(step_ahead=True)), 'did you mean "feedback": "step_ahead"?'),
    "misspelt variant": (job(gradients(feedback={"kind": "locl"})), 'did you mean "local"?'),
    "another variant's": (
        {"dct": {"model_parallel": {"pipeline": {"forward": {"method": "quantise", "rate": 4}}}}},
        'dct.model_parallel.pipeline.forward.rate = 4: only "transform" has it',
    ),
    "torch's name of a type": (job(gradients(value_dtype="bfloat16")), 'did you mean "bf16"?'),
    "number in quotes": (job(gradients(sparsity="0.99")), "must be a number in [0, 1); did you mean 0.99?"),
    "percent": (job(gradients(sparsity=99)), "must be a number in [0, 1); did you mean 0.99?"),
    "no such stage": (zero(4), "zero_optimization.stage = 4: must be 0, 1, 2 or 3"),
    "misspelt optimizer": (
        job({}, optimizer={"type": "AdmaW"}),
        'optimizer.type = "AdmaW": DeepSpeed has no such optimizer; did you mean "AdamW"?',
    ),
    "offload": (
        zero(2, offload_optimizer={"device": "cpu"}),
        "dct does not support offloading (zero_optimization.offload_optimizer.device = cpu). Supported is",
    ),
    "quantised gradients": (zero(3, zero_quantized_gradients=True), "zero_quantized_gradients = true"),
    "muon": (job({}, optimizer={"type": "Muon"}), "the optimizer Muon: it needs whole gradient matrices"),
    "1-bit Adam of its own": (
        job({}, optimizer={"type": "OneBitAdam", "params": {"comm_backend_name": "nccl"}}),
        "the optimizer OneBitAdam with optimizer.params.comm_backend_name = 'nccl'",
    ),
    "tensor parallelism": (
        job({}, tensor_parallel={"autotp_size": 2}),
        "tensor parallelism (tensor_parallel.autotp_size = 2)",
    ),
    "autocast": (job({}, torch_autocast={"enabled": True, "dtype": "float16"}), "use the fp16 section"),
    "updates at stage 0": (
        zero(0, gradients(parameters={})),
        "dct.data_parallel.parameters: ZeRO stage 0: every rank has the whole optimizer",
    ),
    "updates at stage 3": (
        zero(3, gradients(parameters={"sparsity": 0.97})),
        "dct.data_parallel.parameters = {} under ZeRO stage 3: modules gather their parameters",
    ),
    "step-ahead at stage 3": (
        zero(3, gradients(feedback="step_ahead")),
        'dct.data_parallel.feedback = "step_ahead" under ZeRO stage 3: no rank has the whole weights',
    ),
    "experts with step-ahead": (
        job({**gradients(feedback="step_ahead"), "model_parallel": {"expert_gradients": True}}),
        "dct.model_parallel.expert_gradients = true: feedback = 'step_ahead' displaces the weights",
    ),
    "step-ahead with Lion": (
        job(gradients(feedback="step_ahead"), optimizer={"type": "Lion"}),
        "dct.data_parallel.feedback = 'step_ahead': the step of Lion is not known",
    ),
    "no JSON": ("{'dct': {}}", "not valid JSON: Expecting property name enclosed in double quotes"),
    "key given twice": ('{"dct": {}, "dct": {}}', "not valid JSON: key 'dct' is given twice"),
}


@pytest.mark.parametrize(("content", "words"), WRONG.values(), ids=WRONG)
def test_wrong_files(content: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    result = runner.invoke(cli.app, ["config", "check", str(file)])
    assert words in result.stderr, result.stderr
    assert result.exit_code == 1
    assert result.stdout == ""


def test_everything_that_is_wrong_is_listed() -> None:
    section = {"sparsity": 0.9, "data_parallel": {"feedback": "step-ahead"}}
    content = zero(3, section, offload_param={"device": "nvme"}, offload_optimizer={"device": "cpu"})
    result = runner.invoke(cli.app, ["config", "check", "-"], input=json.dumps({**content, "optimzer": {}}))
    assert result.exit_code == 1
    first, *lines = result.stderr.splitlines()
    assert first == "error: invalid dct configuration in - (4 faults):"
    wanted = ["dct.sparsity", 'did you mean "step_ahead"', "offload_optimizer", "offload_param", "optimzer"]
    assert len(lines) == len(wanted)
    assert all(words in " ".join(lines) for words in wanted)
    assert lines[-1].startswith("warning: -: 'optimzer' (did you mean 'optimizer'?)")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**job({}, metrics={}), "_comment": 1}, "'metrics' (did you mean dct.metrics?): nothing reads it"),
        (
            job(gradients(feedback="local"), optimizer={"type": "AdamW"}),
            "AdamW with feedback = 'local' at sparsity 0.99 is known to lose 0.2 nats",
        ),
        ({**zero(3), "optimizer": {"type": "Adam"}}, "at sparsity 0.9 instead of 0.99"),
        (job({}, optimizer={"type": "Lion"}), "the step of Lion is not known: local error feedback"),
        (job({}, fp16={"enabled": True}), "divides gradients by the loss scale in fp16 at ZeRO stage 0"),
    ],
)
def test_warnings_do_not_fail(content: Any, words: str) -> None:
    result = runner.invoke(cli.app, ["config", "check", "-"], input=json.dumps(content))
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: -: ")
    assert words in result.stderr
    assert result.stdout.startswith("-: ok (fingerprint ")


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"data_parallel": {"parameters": {}}},  # a bare section: the host is not known
        {"dct": {"data_parallel": {"feedback": "step_ahead"}}},
        zero(1, gradients(parameters={})),
        zero(3, {"enabled": False}, offload_param={"device": "cpu"}),
        {**job({}), "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"},
    ],
)
def test_right_files(content: Any) -> None:
    result = runner.invoke(cli.app, ["config", "check", "-"], input=json.dumps(content))
    assert (result.exit_code, result.stderr) == (0, "")


SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def test_what_the_section_becomes_is_said() -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 400}}
    content = job({}, optimizer={"type": "SGD", "params": {"momentum": 0.9}}, scheduler=schedule)
    result = runner.invoke(cli.app, ["config", "check", "-"], input=json.dumps(content))
    assert "\n  step-ahead for SGD, after 40 dense steps and a ramp of " in result.stdout
    content.pop("optimizer")
    result = runner.invoke(cli.app, ["config", "check", "-"], input=json.dumps(content))
    assert "the script makes the optimizer" in result.stdout


ENGINES: list[dict[str, Any]] = [
    *({"zero_optimization": {"stage": stage}, "optimizer": SGD} for stage in range(4)),
    {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}},
    {"zero_optimization": {"stage": 1, "contiguous_gradients": False}},
    {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    {"compile": {"deepcompile": True}},
]
PROGRAM = """
import dataclasses, json, sys
import deepspeed, torch
from dct_plugin.integrations.deepspeed.job import Job
from dct_plugin.integrations.deepspeed import paths, support
from dct_plugin.config import DCTConfig
# DeepSpeed refuses fp16 on processors without instructions for it; no step is made here.
deepspeed.get_accelerator().is_fp16_supported = lambda: True
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, rank=0, world_size=1,
                           init_method="tcp://127.0.0.1:" + sys.argv[1])
for content in json.load(sys.stdin):
    model = torch.nn.Linear(8, 8)
    optimizer = None if "optimizer" in content else torch.optim.SGD(model.parameters(), lr=0.1)
    content = {"train_batch_size": 8, "zero_allow_untested_optimizer": True,
               "zero_force_ds_cpu_optimizer": False, **content}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer,
                                      model_parameters=model.parameters(), config=dict(content))
    config = DCTConfig()
    job = dataclasses.asdict(support.job_of(engine, paths.gradient_path_of(engine, config)))
    ours = dataclasses.asdict(Job.of_json(content))
    ours["optimizer"] = ours["optimizer"] or "SGD"
    print("found", json.dumps({key: [job[key], ours[key]] for key in job if job[key] != ours[key]}))
"""


@pytest.mark.slow
def test_the_facts_of_a_file_are_those_of_its_engine() -> None:
    pytest.importorskip("deepspeed")
    from dct_plugin.links.team import free_port

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(free_port())],
        input=json.dumps(ENGINES),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
    )
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(found) == len(ENGINES), done.stderr[-3000:]
    assert found == [{}] * len(ENGINES)
