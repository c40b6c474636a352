"""The suites of ``make test-hosts``, and the tests in which the plugin refuses to run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Source:
    """A repository whose tests are fetched, and never committed.

    Attributes:
        package: The installed package whose tests they are.
        version: Its version that the tag is of.
        url, tag: Where the tests come from.
        folder: The folder that is needed.
    """

    package: str
    version: str
    url: str
    tag: str
    folder: str


@dataclass(frozen=True)
class Refusal:
    """Tests in which the plugin refuses to run.

    Attributes:
        tests: Regular expression that is found in the tests' names; empty for all tests of the suite.
        error: A part of the plugin's message.
        reason: Why it refuses.
    """

    tests: str
    error: str
    reason: str


@dataclass(frozen=True)
class Suite:
    """Tests of one host.

    Attributes:
        paths: Files and folders of tests, in ``folder``.
        folder: Folder of the tests, as a path; None for that of ``source``.
        source: What is fetched; None for tests that are installed or here.
        refused: Tests that the plugin refuses.
        options: Options of pytest.
        environment: Variables for the tests.
        seconds: Limit for one test.
    """

    paths: tuple[str, ...]
    folder: Path | None = None
    source: Source | None = None
    refused: tuple[Refusal, ...] = ()
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    seconds: int = 120


def _folder_of(package: str) -> Path:
    found = find_spec(package)
    return Path(package) if found is None or found.origin is None else Path(found.origin).parent


SUITES = {
    # Tests of FSDP2 need two GPUs, and so do most of DistributedDataParallel's.
    "torch": Suite(paths=("torch_ddp.py",), folder=HERE),
    "torch-fetched": Suite(
        paths=("test_c10d_gloo.py", "_composable/test_replicate.py"),
        source=Source("torch", "2.13.0", "https://github.com/pytorch/pytorch", "v2.13.0", "test/distributed"),
        options=("-c", os.devnull, "-k", "DistributedDataParallelTest or Replicate"),
    ),
    "accelerate": Suite(paths=("accelerate_scripts.py",), folder=HERE, seconds=250),
    "torchft": Suite(
        paths=(
            "manager_test.py",
            "manager_integ_test.py",
            "process_group_test.py",
            "local_sgd_test.py",
            "local_sgd_integ_test.py",
            "ddp_test.py",
            "fsdp_test.py",
            "parameter_server_test.py",
            "optim_test.py",
            "diloco_regression_test.py",
        ),
        folder=_folder_of("torchft"),
        options=("-c", os.devnull, "--rootdir", str(_folder_of("torchft"))),
        refused=(
            Refusal(
                r"process_group_test\.py::(NormalGlooMultiPgTest|ProcessGroupTest)|parameter_server_test\.py",
                "does not know its manager",
                "without a Manager nobody says which steps were committed",
            ),
        ),
        environment={"RUST_LOG": "error"},
    ),
    "deepspeed": Suite(
        paths=(
            "unit/checkpoint",
            "unit/pipe",
            "unit/runtime/half_precision",
            "unit/runtime/pipe",
            "unit/runtime/test_ds_initialize.py",
            "unit/runtime/test_multiple_models.py",
            "unit/runtime/test_no_sync_ctxt.py",
            "unit/runtime/zero",
            "unit/v1/half_precision",
            "unit/v1/moe",
            "unit/v1/zero",
        ),
        refused=tuple(
            Refusal("", f"dct does not support {feature}", reason)
            for feature, reason in (
                ("zero_optimization.zero_quantized_gradients", "DeepSpeed quantises the gradients itself"),
                ("offloading (zero_optimization.", "gradients and optimizer are not where they are reduced"),
                ("ZenFlow", "its optimizer chooses gradients itself"),
                ("the optimizer Muon", "without ZeRO nothing orthogonalises its gradients"),
                ("sequence parallelism", "gradients are summed over other ranks than the data's"),
                ("a data-parallel group of", "tensor parallelism reduces over groups that are not known"),
                ("torch_autocast with dtype float16", "it scales the loss out of sight"),
                ("DeepCompile", "it reduces gradients inside the compiled graph"),
                ("AutoEP parameter folding", "it moves gradients between groups itself"),
                ("the optimizer wrapper", "its master weights are its own"),
                ("the engine", "its own loop reduces gradients"),
            )
        ),
        options=("--ignore", "unit/runtime/half_precision/onebit"),  # 0.19 has no such optimizers
        source=Source("deepspeed", "0.19.8", "https://github.com/deepspeedai/DeepSpeed", "v0.19.8", "tests"),
        environment={
            "DCT_PRELOAD": "deepspeed",
            "DS_ACCELERATOR": "cpu",
            "DS_DISABLE_REUSE_DIST_ENV": "1",
            "DS_UNITTEST_TIMEOUT": "280",  # the first test compiles operators
            "LOCAL_SIZE": "4",  # DeepSpeed's number of CPU devices
        },
        seconds=300,
    ),
}
