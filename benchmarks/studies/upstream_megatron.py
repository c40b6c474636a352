"""Run an unmodified Megatron-LM checkout with the plugin, on CPU with gloo: trainings, unit tests, advice.

    MEGATRON_LM=~/Megatron-LM python benchmarks/studies/upstream_megatron.py
    MEGATRON_LM=~/Megatron-LM python benchmarks/studies/upstream_megatron.py --case pp2 --mode plain
    MEGATRON_LM=~/Megatron-LM python benchmarks/studies/upstream_megatron.py --unit-tests
    MEGATRON_LM=~/Megatron-LM python benchmarks/studies/upstream_megatron.py --advise

Needs six, regex, pyyaml and triton (megatron.training imports them), and pytest, pytest-mock, pytest-asyncio,
click and requests for the unit tests. Modes of training:

    plain   torchrun pretrain_gpt.py, without the plugin
    zero    through the launch wrapper, every sparsity 0
    codec   the same, but nothing is left to Megatron: every entry is encoded, sent and decoded
    sparse  sparsity 0.9 in model parallelism, 0.99 in data parallelism

With ``zero`` and ``codec`` every printed loss and gradient norm must equal that of ``plain``. The plugin's
values must stand in Megatron's dump of its arguments and, with ``sparse``, in the arguments of a checkpoint.
CPU times say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

COMMON = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style constant --weight-decay 0.0 --clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 255 --split 90,5,5 --eval-iters 1 --eval-interval 1000 --log-interval 1
    --distributed-backend gloo --transformer-impl local --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-save-optim --no-save-rng --num-workers 0
""")


class Case(NamedTuple):
    """A parallel layout: processes, Megatron's arguments for it, and the hooks it is there for."""

    processes: int
    arguments: str
    hooks: str


CASES = {
    "pp2": Case(2, "--pipeline-model-parallel-size 2", "pipeline"),
    "pp2_bf16": Case(2, "--pipeline-model-parallel-size 2 --bf16", "pipeline"),
    "tp2": Case(2, "--tensor-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0", "tensor"),
    "tp2_sp": Case(2, "--tensor-model-parallel-size 2 --sequence-parallel", "tensor"),
    "dp2": Case(2, "", "data_parallel"),
    "dp2_distopt": Case(2, "--use-distributed-optimizer --overlap-grad-reduce --bf16", "data_parallel"),
    "tp2_pp2": Case(
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
        "pipeline tensor",
    ),
    "tp2_pp2_nosp": Case(
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--attention-dropout 0 --hidden-dropout 0",
        "pipeline tensor",
    ),
    # Two virtual stages on each rank: messages overlapped, one by one; with four ranks in batches.
    "pp2_vpp2": Case(
        2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", "pipeline"
    ),
    "pp4_vpp2": Case(
        4,
        "--pipeline-model-parallel-size 4 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1 "
        "--no-overlap-p2p-communication",
        "pipeline",
    ),
    "pp2_recompute": Case(
        2,
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "pipeline",
    ),
    "pp2_dp2": Case(
        4,
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --bf16",
        "pipeline data_parallel",
    ),
}

_FP32 = {"forward": {"method": "threshold", "sparsity": 0, "value_dtype": "fp32"}}
_SPARSE = {"forward": {"method": "threshold", "sparsity": 0.9}}
_ZERO = {
    "data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 0},
    "model_parallel": {"pipeline": _FP32, "tensor": _FP32},
}
SECTIONS = {
    "zero": _ZERO,
    "codec": _ZERO,
    "sparse": {
        "data_parallel": {"sparsity": 0.99},
        "model_parallel": {"pipeline": _SPARSE, "tensor": _SPARSE},
    },
}
THROUGH_CODEC = {"DCT_TEST_THROUGH_CODEC": "1"}

# Megatron's tests that communicate, one job for each group. Left out: FSDP, bucket sizes, and communicators
# between two models (thousands of threads of gloo).
_TESTS = "tests/unit_tests"
_DISTRIBUTED = f"{_TESTS}/distributed"
UNIT_TESTS = [
    [f"{_TESTS}/tensor_parallel"],
    [f"{_TESTS}/pipeline_parallel/test_{name}.py" for name in ("helpers", "pipeline_layout", "schedules")],
    [
        f"{_DISTRIBUTED}/test_distributed_data_parallel.py",
        f"{_DISTRIBUTED}/test_param_and_grad_buffer.py::test_grad_sync",
        f"{_DISTRIBUTED}/test_param_and_grad_buffer.py::test_force_all_reduce_uses_correct_collective",
        f"{_DISTRIBUTED}/test_grad_reduce_for_replicated_embedder.py",
        f"{_DISTRIBUTED}/test_reduce_scatter_with_fp32_accumulation.py",
        f"{_DISTRIBUTED}/test_finalize_model_grads.py",
        f"{_DISTRIBUTED}/test_grad_sync_with_expert_parallel.py",
    ],
]


def main() -> int:
    """Run what was asked for, print a report; the exit status is 1 if something differs or fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", default=os.environ.get("MEGATRON_LM"), help="default: $MEGATRON_LM")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--mode", action="append", choices=["plain", *SECTIONS], help="default: all")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument(
        "--unit-tests", action="store_true", help="run Megatron's unit tests instead of trainings"
    )
    parser.add_argument("--advise", action="store_true", help="run `dct advise` on pretrain_gpt.py, DP 2")
    parser.add_argument("--test", action="append", help="unit-test files instead of the usual ones")
    parser.add_argument(
        "--processes", type=int, default=8, help="ranks of the unit tests (default and most tests' need: 8)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300,
        help="seconds for each training, and for each unit test until it counts as hanging (default 300)",
    )
    options = parser.parse_args()
    if not options.checkout or not (Path(options.checkout) / "pretrain_gpt.py").is_file():
        parser.error("set MEGATRON_LM to a checkout of Megatron-LM")
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(options.checkout).resolve(), Path(folder), options.timeout)
        if options.advise:
            return runner.advise()
        if options.unit_tests:
            return unit_tests(runner, [options.test] if options.test else UNIT_TESTS, options.processes)
        modes = options.mode or ["plain", *SECTIONS]
        return trainings(runner, options.case or list(CASES), modes, options.iterations)


class Runner:
    """Starts jobs in processes where CUDA is the CPU, and reads what they print."""

    def __init__(self, checkout: Path, folder: Path, timeout: float) -> None:
        self.checkout = checkout
        self.folder = folder
        self.timeout = timeout
        (folder / "sitecustomize.py").write_text(
            "from benchmarks.studies import megatron_upstream_cpu as cpu; cpu.install()\n"
        )
        for name, section in SECTIONS.items():
            (folder / f"{name}.json").write_text(json.dumps({"dct": section}))
        self.environment = {key: value for key, value in os.environ.items() if key != "DCT_CONFIG"} | {
            "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT / "tests", ROOT))),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
        }

    def advise(self) -> int:
        """Exit status of ``dct advise`` on the training of a small GPT in two data-parallel ranks."""
        larger = "--hidden-size 256 --ffn-hidden-size 1024 --seq-length 128 --max-position-embeddings 128"
        job = [*_TORCHRUN, "--nproc-per-node", "2", "pretrain_gpt.py", *COMMON, *larger.split()]
        job += ["--vocab-size", "1023", "--train-iters", "1000"]
        command = [sys.executable, "-m", "dct_plugin.cli", "advise"]
        command += ["--link", "1gbit", "--link", "100mbit", "--", *job]
        return subprocess.run(command, cwd=self.checkout, env=self.environment, check=False).returncode

    def run(self, arguments: list[str], watched: Path | None = None, **environment: str) -> tuple[int, str]:
        """Exit status and output of ``torchrun`` with these arguments.

        The status is 124 when the time was over: of the whole job, or since a file in ``watched`` changed.
        """
        command = [*_TORCHRUN, *arguments]
        with tempfile.TemporaryFile("w+", dir=self.folder) as output:
            process = subprocess.Popen(
                command,
                cwd=self.checkout,
                env={**self.environment, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            began = time.time()
            try:
                while (code := process.poll()) is None:
                    changes = [file.stat().st_mtime for file in watched.iterdir()] if watched else []
                    if time.time() - max([began, *changes]) > self.timeout:
                        code = 124
                        break
                    time.sleep(0.5)
            finally:
                _stop(process)
            output.seek(0)
            return code, output.read()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which has to end its workers: they are in process groups of their own."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(60)  # after 30 s torchrun kills workers that do not end
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def trainings(runner: Runner, cases: list[str], modes: list[str], iterations: int) -> int:
    """Every case in every mode; losses and gradient norms are compared as they are printed."""
    failed = False
    for name in cases:
        case = CASES[name]
        reference: list[tuple[str, str]] | None = None
        for mode in modes:
            script = [str(runner.checkout / "pretrain_gpt.py"), *COMMON, "--train-iters", str(iterations)]
            script += case.arguments.split()
            if mode != "plain":
                script = [
                    "-m",
                    "dct_plugin.megatron",
                    "--dct-config",
                    str(runner.folder / f"{mode}.json"),
                    *script,
                ]
            if mode == "sparse":
                saved = runner.folder / f"saved-{name}"
                script += ["--save", str(saved), "--save-interval", str(iterations), "--ckpt-format", "torch"]
            began = time.monotonic()
            environment = THROUGH_CODEC if mode == "codec" else {}
            code, output = runner.run(["--nproc-per-node", str(case.processes), *script], **environment)
            found = losses(output)
            took = f"{time.monotonic() - began:.0f} s"
            if code or len([kind for kind, _ in found if kind == "training"]) != iterations:
                failed = True
                print(f"{name:12} {mode:7} FAILED with {code} ({took})\n" + tail(output), flush=True)
                continue
            verdict = ""
            shown = re.search(r"^ *dct_fingerprint \.+ (\w+)$", output, re.MULTILINE)
            if mode != "plain" and not shown:
                failed = True
                verdict = "NOT in Megatron's dump of arguments"
            if mode == "sparse" and shown and not in_checkpoints(runner, saved, shown[1]):
                failed = True
                verdict = "NOT in the checkpoints' arguments"
            if mode == "plain":
                reference = found
            elif mode in ("zero", "codec") and reference is not None:
                same = found == reference
                failed |= not same
                verdict += (
                    "equal to plain" if same else f"DIFFERS from plain: {first_difference(reference, found)}"
                )
            summary = [
                line for line in output.splitlines() if re.match(r"dct: (?!dct-plugin|megatron)", line)
            ]
            print(f"{name:12} {mode:7} {found[-1][1]} {verdict} ({took})", flush=True)
            for line in summary:
                print(f"{'':21}{line}", flush=True)
    return int(failed)


def in_checkpoints(runner: Runner, folder: Path, fingerprint: str) -> bool:
    """Whether all files of a checkpoint hold Megatron's arguments with this ``dct_fingerprint``."""
    import torch

    sys.path.insert(0, str(runner.checkout))  # the pickled objects are Megatron's
    try:
        files = sorted(folder.glob("iter_*/*/model_optim_rng.pt"))
        loaded = [torch.load(file, weights_only=False, map_location="cpu") for file in files]
    finally:
        sys.path.remove(str(runner.checkout))
    return bool(files) and all(
        getattr(state["args"], "dct_fingerprint", None) == fingerprint for state in loaded
    )


def losses(output: str) -> list[tuple[str, str]]:
    """``(kind, printed numbers)`` of every training iteration and evaluation."""
    found = []
    for line in output.splitlines():
        if match := re.search(r"iteration +\d+/ +\d+ \|.*lm loss: (\S+) \|.*grad norm: (\S+) \|", line):
            found.append(("training", f"loss {match[1]} grad norm {match[2]}"))
        elif match := re.search(r"loss at iteration.*lm loss value: (\S+)", line):
            found.append(("evaluation", f"evaluation {match[1]}"))
    return found


def first_difference(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> str:
    """The first entries that are not equal."""
    for number, (mine, theirs) in enumerate(zip(one, other, strict=False), 1):
        if mine != theirs:
            return f"entry {number}: {mine[1]} != {theirs[1]}"
    return f"{len(one)} != {len(other)} entries"


def unit_tests(runner: Runner, groups: list[list[str]], processes: int) -> int:
    """Megatron's own tests, without hooks and with every entry going through them, as a Markdown table."""
    print("| tests | without hooks | with hooks | tensors through hooks |\n|---|---|---|---|", flush=True)
    remarks = []
    failed = False
    for files in groups:
        plain = run_tests(runner, files, processes, hooks=False)
        hooked = run_tests(runner, files, processes, hooks=True)
        failed |= not plain
        names = list(dict.fromkeys([*plain, *hooked]))
        for file in dict.fromkeys(name.partition("::")[0] for name in names):
            one, other = (
                {name: result for name, result in results.items() if name.partition("::")[0] == file}
                for results in (plain, hooked)
            )
            encoded = sum(result.encoded for result in other.values())
            short = file.removeprefix(f"{_TESTS}/")
            print(f"| `{short}` | {counts(one)} | {counts(other)} | {encoded} |", flush=True)
        for name in names:
            missing = Test("not run", "", 0)
            one, other = plain.get(name, missing), hooked.get(name, missing)
            short = name.removeprefix(f"{_TESTS}/")
            if one.outcome != other.outcome:
                failed = True
                remarks.append(
                    f"DIFFERS {short}: {one.outcome} ({one.reason}), "
                    f"with hooks {other.outcome} ({other.reason})"
                )
            elif one.outcome not in ("passed", "skipped"):
                remarks.append(f"{one.outcome} without hooks, too: {short}: {one.reason}")
    print("\n".join(["", *remarks]))
    return int(failed)


class Test(NamedTuple):
    """What became of a test on all ranks, why, and how many tensors went through hooks on rank 0."""

    outcome: str
    reason: str
    encoded: int


def run_tests(runner: Runner, files: list[str], processes: int, *, hooks: bool) -> dict[str, Test]:
    """Every test's outcome. A job that hangs or dies is started again with the tests that are left."""
    found: dict[str, Test] = {}
    arguments = ["--nproc-per-node", str(processes), "-m", "pytest", "-q", "-o", "addopts="]
    arguments += ["-p", "benchmarks.studies.megatron_upstream_cpu", "-p", "no:cacheprovider", *files]
    for _ in range(10):
        with tempfile.TemporaryDirectory(dir=runner.folder) as folder:
            (Path(folder) / "done.json").write_text(json.dumps(list(found)))
            environment = {"DCT_TEST_REPORT": folder}
            if hooks:
                environment |= {"DCT_CONFIG": str(runner.folder / "codec.json"), **THROUGH_CODEC}
            code, output = runner.run(arguments, Path(folder), **environment)
            new, complete = outcomes(Path(folder), processes)
        found |= new
        if not new and code not in (0, 5):  # 5: no tests are left
            print(f"{' '.join(files)}: exit status {code}\n{tail(output)}", file=sys.stderr, flush=True)
        if complete:
            break
    return found


def outcomes(folder: Path, processes: int) -> tuple[dict[str, Test], bool]:
    """What the ranks noted, and whether no rank was stopped in a test.

    A test has passed if it has on all ranks, and hangs if one has not come to its end and none has failed.
    """
    ranks: list[dict[str, dict[str, Any]]] = []
    for file in sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem)):
        entries = [json.loads(line) for line in file.read_text().splitlines()]
        ranks.append({})
        for entry in entries:
            if ranks[-1].get(entry["test"], {}).get("outcome") != "failed":  # also in its teardown
                ranks[-1][entry["test"]] = entry
    found, complete = {}, True
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        notes = [rank[name] for rank in ranks if name in rank]
        kinds = {note["outcome"] for note in notes}
        bad = next((note for note in notes if note["outcome"] == "failed"), notes[0])
        complete &= "started" not in kinds and len(notes) == processes
        if "failed" in kinds:
            outcome = "failed"
        elif "started" in kinds or len(notes) < processes:
            outcome = "hangs"
        else:
            outcome = "passed" if "passed" in kinds else "skipped"
        found[name] = Test(outcome, bad.get("reason", ""), notes[0].get("encoded", 0))
    return found, complete


def counts(results: dict[str, Test]) -> str:
    """``3 passed, 1 failed``."""
    kinds = [result.outcome for result in results.values()]
    return ", ".join(
        f"{kinds.count(kind)} {kind}" for kind in ("passed", "failed", "hangs", "skipped") if kind in kinds
    )


def tail(output: str) -> str:
    """What matters at the end of a failed job's output."""
    # torchrun's own report says nothing about the cause.
    theirs = r"^.*(?:failed \(exitcode: |Received \d+ death signal)"
    mine = re.split(theirs, output, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in mine.splitlines() if line.strip() and "Warning" not in line]
    return "\n".join(f"    {line}" for line in lines[-25:])


if __name__ == "__main__":
    sys.exit(main())
