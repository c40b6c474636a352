"""``dct config check``: what it says about wrong files, and that it says what the start of the job says."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import COMPLETED, LENIENT, TAKEN
from support import ROOT
from support.forked import forked_interpreters
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.integrations.deepspeed import file_check
from dct_plugin.integrations.host.versions import installed

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
    "section in zero_optimization": (
        job(zero_optimization={"stage": 1, "dct": {}}),
        "zero_optimization.dct: nothing reads the section there; move it one level up, to the top",
    ),
    "keys beside dct": (job({}, **gradients(sparsity=0.9)), "'data_parallel': nothing reads it at the top"),
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
    "hyphen": (job(gradients(feedback="step-ahead")), 'one of "auto", "local", "step_ahead", "none"'),
    "misspelt variant": (job(gradients(feedback={"kind": "locl"})), 'one of "auto", "local", "step_ahead"'),
    "another variant's": (
        {"dct": {"model_parallel": {"pipeline": {"forward": {"method": "quantise", "rate": 4}}}}},
        'dct.model_parallel.pipeline.forward.rate = 4: only "transform" has it',
    ),
    "torch's name of a type": (job(gradients(value_dtype="bfloat16")), 'must be one of "fp32", "bf16"'),
    "number in quotes": (job(gradients(sparsity="0.99")), 'sparsity = "0.99": must be a number in [0, 1)'),
    "percent": (job(gradients(sparsity=99)), "sparsity = 99: must be a number in [0, 1)"),
    "offload": (
        zero(2, offload_optimizer={"device": "cpu"}),
        "dct does not support offloading (zero_optimization.offload_optimizer.device = cpu). Supported is",
    ),
    "quantised gradients": (zero(3, zero_quantized_gradients=True), "zero_quantized_gradients = true"),
    "muon": (
        job({}, optimizer={"type": "Muon"}),
        "the optimizer Muon without ZeRO, or before DeepSpeed 0.19.8",
    ),
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
        "dct.data_parallel.parameters = {}: ZeRO stage 0 to 2: every rank has the whole optimizer",
    ),
    "updates at stage 3": (
        zero(3, gradients(parameters={"sparsity": 0.97})),
        "dct.data_parallel.parameters = {}: ZeRO stage 3: updates with thresholds go to copies",
    ),
    "step-ahead at stage 3": (
        zero(3, gradients(feedback="step_ahead")),
        'dct.data_parallel.feedback = "step_ahead": under ZeRO stage 3 no rank has the whole weights',
    ),
    "experts with step-ahead": (
        job({**gradients(feedback="step_ahead"), "model_parallel": {"expert_gradients": True}}),
        'dct.data_parallel.feedback = "step_ahead": expert_gradients: step-ahead displaces the weights',
    ),
    "step-ahead with Lion": (
        job(gradients(feedback="step_ahead"), optimizer={"type": "Lion"}),
        "dct.data_parallel.feedback = 'step_ahead': the step of Lion is not known",
    ),
    "no JSON": ('{"dct": {"enabled": true}', "not valid JSON: Expecting ',' delimiter"),
    "a text": ("hello", "must hold a JSON object"),
    "empty": ("", "not valid JSON"),
    "key given twice": ('{"dct": {}, "dct": {}}', "not valid JSON: key 'dct' is given twice"),
}


MOMENTUM = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
#: By what it is, a file that starts, and the words of its warning or note.
WARNED: dict[str, tuple[Any, str]] = {
    "local feedback with AdamW": (
        job(gradients(feedback="local"), optimizer={"type": "AdamW"}),
        "AdamW with feedback = 'local' at sparsity 0.99 is known to lose 0.2 nats",
    ),
    "clipped momentum": (
        job(gradients(feedback="step_ahead"), optimizer=MOMENTUM, gradient_clipping=1.0),
        "is known to lose 0.05 nats at 0.99 where gradients are clipped",
    ),
    "stage 3": (
        {**zero(3, gradients(sparsity=0.9)), "optimizer": {"type": "Adam"}},
        "(known to lose 0.05 nats at 0.9 (char GPT, AdamW, 1,200 steps, 2 ranks); better: leave",
    ),
    "Lion": (
        job(gradients(sparsity=0.99), optimizer={"type": "Lion"}),
        "; with nothing written: sparsity 0, int8 values, feedback local, if faster than dense)",
    ),
    "density": (
        job(gradients(sparsity=0.01)),
        "dct.data_parallel.sparsity = 0.01 sends 99 % of the entries; did you mean 0.99?",
    ),
    "density of a bare section": (gradients(sparsity=0.05), "did you mean 0.95?"),
}
NOTED: dict[str, tuple[Any, str]] = {
    "momentum": (job({}, optimizer=MOMENTUM), "step-ahead for SGD, after"),
    "any Lion": (job({}, optimizer={"type": "Lion"}), "the step of Lion is not known: all entries are sent"),
    "any stage 3": ({**zero(3), "optimizer": {"type": "Adam"}}, "displaces (it can displace copies in nodes"),
    "length of the run": (
        job(gradients(total_steps=300), optimizer={"type": "AdamW"}),
        "a run of 300 steps is too short for the start of thresholds that loses nothing",
    ),
    "no section": (job(), 'ok (no "dct" section: the job trains without the plugin)'),
    "ZeRO-2 with accumulation": (
        {**zero(2), "gradient_accumulation_steps": 4},
        "after each of the 4 micro-batches of a step; stage 1 sends them once, 1/4 of the bytes",
    ),
    **{name: (text, "not strict JSON, which Hugging Face's") for name, text in LENIENT.items()},
}
RIGHT: dict[str, Any] = {
    "empty section": {},
    "parameters": {"data_parallel": {"parameters": {}}},  # a bare section: the host is not known
    "section alone": {"dct": {"data_parallel": {"feedback": "step_ahead"}}},
    "ZeRO-1": zero(1, gradients(parameters={})),
    "disabled": zero(3, {"enabled": False}, offload_param={"device": "cpu"}),
    "auto": {**job({}), "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"},
    "old ZeRO": job(gradients(parameters={}), zero_optimization=True),
    "old ZeRO with AdamW": {**COMPLETED["everything"], "zero_optimization": True, "dct": {}},
    **{f"completed: {name}": {**content, "dct": {}} for name, content in COMPLETED.items()},
}


@dataclasses.dataclass
class Said:
    """The output of the command about one file."""

    out: str = ""
    err: str = ""


def run(files: dict[str, Any], folder: Path, *options: str) -> tuple[int, dict[str, Said]]:
    """Have one command judge files; return its exit status and, by name, what it said."""
    names = {f"file{number}.json": name for number, name in enumerate(files)}
    for path, name in names.items():
        text = files[name] if isinstance(files[name], str) else json.dumps(files[name])
        (folder / path).write_text(text, encoding="utf-8")
    paths = [str(folder / path) for path in names]
    result = runner.invoke(cli.app, ["config", "check", *options, *paths])
    said = {name: Said() for name in files}
    for stream in ("out", "err"):
        about = None
        for line in getattr(result, f"std{stream}").splitlines(keepends=True):
            if found := re.search(r"file\d+\.json", line):
                about = said[names[found[0]]]
            setattr(about, stream, getattr(about, stream) + line)
    return result.exit_code, said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """Run the command once on all files; return what it says, by name of the file."""
    files = {name: content for table in (WRONG, WARNED, NOTED) for name, (content, _) in table.items()}
    files |= RIGHT | {f"taken: {name}": {**each, "dct": {}} for name, (each, _) in TAKEN.items()}
    return run(files, tmp_path_factory.mktemp("files"))[1]


def test_wrong_files(said: dict[str, Said]) -> None:
    for name, (_, words) in WRONG.items():
        assert words in said[name].err, (name, said[name])
        assert said[name].out == "", (name, said[name])
        assert said[name].err.startswith("error: ")


def test_warnings_and_notes_do_not_fail(said: dict[str, Said]) -> None:
    for name, (_, words) in WARNED.items():
        assert "error: " not in said[name].err, (name, said[name])
        assert words in said[name].err, (name, said[name])
        assert ": ok (fingerprint " in said[name].out
    for name, (_, words) in NOTED.items():
        assert words in said[name].out, (name, said[name])
        assert said[name].err == ""


def test_right_files(said: dict[str, Said]) -> None:
    for name in RIGHT:
        assert ": ok (fingerprint " in said[name].out, (name, said[name])
        assert said[name].err == ""
    for name, (_, right) in TAKEN.items():
        assert (": ok (" in said[f"taken: {name}"].out) == right, (name, said[f"taken: {name}"])
        assert right or "dct does not support" in said[f"taken: {name}"].err


def test_everything_that_is_wrong_is_listed() -> None:
    section = {"sparsity": 0.9, "data_parallel": {"feedback": "step-ahead"}}
    content = zero(3, section, offload_param={"device": "nvme"}, offload_optimizer={"device": "cpu"})
    result = runner.invoke(cli.app, ["config", "check", "--ranks", "3", "-"], input=json.dumps(content))
    assert result.exit_code == 1
    first, *lines = result.stderr.splitlines()
    assert first == "error: invalid dct configuration in - (3 faults):"
    offloaded = "offload_optimizer.device = cpu, zero_optimization.offload_param"
    wanted = ["dct.sparsity", 'must be one of "auto", "local", "step_ahead"', offloaded]
    assert len(lines) == len(wanted)
    assert all(words in " ".join(lines) for words in wanted)


SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def test_what_the_section_becomes_is_said() -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 4000}}
    content = job({}, optimizer={"type": "SGD", "params": {"momentum": 0.9}}, scheduler=schedule)
    notes = "\n".join(file_check.check(content).notes)
    assert "step-ahead for SGD, after 40 dense steps and a ramp of " in notes
    content.pop("optimizer")
    assert "the script makes the optimizer" in "\n".join(file_check.check(content).notes)


ENGINES: list[dict[str, Any]] = [
    *({"zero_optimization": {"stage": stage}, "optimizer": SGD} for stage in range(4)),
    {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}},
    {"zero_optimization": {"stage": 1, "contiguous_gradients": False}},
    {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    {"compile": {"deepcompile": True}},
    {"managed_gradient_accumulation": False},
]
PROGRAM = """
import dataclasses, json, sys
import deepspeed, torch
from dct_plugin.integrations.deepspeed.section import Job
from dct_plugin.integrations.deepspeed import attachment, engine as of_engine
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
    job = dataclasses.asdict(of_engine.job_of(engine, attachment.gradient_path_of(engine)))
    ours = dataclasses.asdict(Job.of_json(content))
    ours["optimizer"] = ours["optimizer"] or "SGD"
    print("found", json.dumps({key: [job[key], ours[key]] for key in job if job[key] != ours[key]}))
"""


@pytest.mark.slow
def test_files_and_their_engines() -> None:
    """The facts of a file are those of its engine."""
    if installed("deepspeed") is None:
        pytest.skip("without DeepSpeed")
    from dct_plugin.recommender.links.team import free_port

    with forked_interpreters():
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(free_port())],
            input=json.dumps(ENGINES),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        )
    lines = done.stdout.splitlines()
    found = [json.loads(line[6:]) for line in lines if line.startswith("found ")]
    assert len(found) == len(ENGINES), done.stderr[-3000:]
    assert found == [{}] * len(ENGINES)
