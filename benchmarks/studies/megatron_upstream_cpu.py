"""Megatron-LM's own training code and unit tests on CPU with gloo, on top of ``support.megatron_cpu``.

``install()`` runs at the start of every process, before ``megatron`` is imported: ``upstream_megatron.py``
has it called by ``sitecustomize``. Nothing in the checkout is changed. As a pytest plugin
(``-p benchmarks.studies.megatron_upstream_cpu``) it also replaces what the unit tests' own set-up asks of a
GPU machine.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from support import megatron_cpu

from dct_plugin.integrations.host.patching import when_imported

#: Environment variable: what has sparsity 0 is not left to Megatron, but encoded, sent and decoded, too.
THROUGH_CODEC = "DCT_TEST_THROUGH_CODEC"
#: Environment variable: folder where every rank notes the tests it starts and what becomes of them.
REPORT = "DCT_TEST_REPORT"


def install() -> None:
    """Make CUDA and the parts of ``megatron.training`` that need it serve the CPU."""
    megatron_cpu.install()
    torch.set_num_threads(1)
    cuda = torch.cuda
    properties = types.SimpleNamespace(
        major=8, minor=0, multi_processor_count=1, total_memory=1 << 34, name="cpu"
    )
    cuda.get_device_properties = lambda *a, **k: properties
    for name in ("reset_peak_memory_stats", "ipc_collect"):
        setattr(cuda, name, lambda *a, **k: None)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    for name in ("randint", "eye", "linspace", "rand_like", "randn_like", "empty_strided"):
        megatron_cpu.make_on_cpu(torch, name)
    megatron_cpu.make_on_cpu(torch.Tensor, "new_tensor")
    barrier = torch.distributed.barrier
    # gloo refuses device_ids
    torch.distributed.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    when_imported("megatron.core", lambda module: megatron_cpu.patch_megatron())
    when_imported("megatron.core.datasets", _find_compiled_helpers)
    when_imported("megatron.training.initialize", _initialize_without_gpu)
    when_imported("megatron.training.arguments", _keep_what_is_being_sent)
    when_imported("megatron.legacy.fused_kernels", lambda module: setattr(module, "load", lambda args: None))
    if os.environ.get(THROUGH_CODEC):
        when_imported("dct_plugin.integrations.megatron.hooks", _send_everything_through_the_codec)


def _send_everything_through_the_codec(module: Any) -> None:
    module.install = functools.partial(module.install, pass_through=False)


def _find_compiled_helpers(module: Any) -> None:
    """The index builders are compiled in the wheel; a checkout would run make."""
    for path in sys.path:
        folder = Path(path) / "megatron" / "core" / "datasets"
        if any(folder.glob("helpers_cpp*.so")) and str(folder) not in module.__path__:
            module.__path__.append(str(folder))

    when_imported(
        "megatron.core.datasets.utils", lambda utils: setattr(utils, "compile_helpers", lambda: None)
    )


def _initialize_without_gpu(module: Any) -> None:
    module.initialize_megatron = functools.partial(module.initialize_megatron, allow_no_cuda=True)
    module.set_jit_fusion_options = lambda: None  # warms up compiled kernels on "cuda"


def _keep_what_is_being_sent(module: Any) -> None:
    """Overlapped, Megatron drops an output that is being sent: CUDA's streams allow that, gloo does not."""
    original = module.core_transformer_config_from_args

    @functools.wraps(original)
    def core_transformer_config_from_args(args: Any, *arguments: Any, **keywords: Any) -> Any:
        config = original(args, *arguments, **keywords)
        if args.overlap_p2p_comm:
            config.deallocate_pipeline_outputs = False
        return config

    module.core_transformer_config_from_args = core_transformer_config_from_args


# -- pytest plugin: started by `pytest -p benchmarks.studies.megatron_upstream_cpu` ---


_encoded = 0  # tensors that a hook has sent in the current test


def pytest_configure(config: Any) -> None:
    """Prepare a process of Megatron's unit tests, and install the hooks that ``DCT_CONFIG`` asks for."""
    init_process_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend=None, *a, **k: init_process_group("gloo", *a, **k)
    torch.cuda.device_count = lambda: int(os.environ.get("WORLD_SIZE", "1"))
    torch.Tensor.is_cuda = property(lambda tensor: False)
    sys.path.insert(0, os.getcwd())
    from megatron.core import utils
    from packaging.version import Version

    if utils.get_te_version() is None:
        utils.get_te_version = lambda: Version("0.0")  # the tests' set-up compares it
    try:
        from tests.test_utils.python_scripts import download_unit_tests_dataset as download
    except ImportError:
        pass
    else:
        download.download_and_extract_asset = lambda **keywords: None
    _close_groups_between_tests()
    if os.environ.get("DCT_CONFIG"):
        from dct_plugin.config import DCTConfig
        from dct_plugin.integrations.megatron import hooks

        hooks.install(DCTConfig.from_file(os.environ["DCT_CONFIG"]))
        _count_what_is_encoded()
        _hook_tensors_outside_transformer_layers()


def _close_groups_between_tests() -> None:
    """Megatron keeps its process groups; each has a thread of gloo that wakes up a hundred times a second."""
    from megatron.core import parallel_state

    original = parallel_state.destroy_model_parallel

    @functools.wraps(original)
    def destroy_model_parallel() -> None:
        original()
        world = torch.distributed.GroupMember.WORLD
        for group in list(torch.distributed.distributed_c10d._world.pg_map):
            if world is not None and group is not world:
                torch.distributed.destroy_process_group(group)

    parallel_state.destroy_model_parallel = destroy_model_parallel


def _hook_tensors_outside_transformer_layers() -> None:
    """The unit tests call collectives and layers by themselves, which the hook leaves to Megatron."""
    from dct_plugin.integrations.megatron.tensor import TensorHook, _Site

    original = TensorHook._running

    @functools.wraps(original)
    def running(hook: Any, ranks: Any) -> Any:
        if hook._current is not None:
            return original(hook, ranks)
        hook._current = _Site("unit test", False)
        try:
            return original(hook, ranks)
        finally:
            hook._current = None

    TensorHook._running = running


def _count_what_is_encoded() -> None:
    from dct_plugin.metrics import Metrics

    record = Metrics.record

    @functools.wraps(record)
    def counting(*arguments: Any, **keywords: Any) -> Any:
        global _encoded
        _encoded += 1
        return record(*arguments, **keywords)

    Metrics.record = counting


def _note(**entry: Any) -> None:
    if folder := os.environ.get(REPORT):
        with open(os.path.join(folder, f"{os.environ['RANK']}.jsonl"), "a") as file:
            file.write(json.dumps(entry) + "\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what an earlier job, which did not come to its end, has run already."""
    done = Path(os.environ.get(REPORT, ".")) / "done.json"
    names = set(json.loads(done.read_text())) if done.is_file() else set()
    # The interleaved test with given groups hangs with gloo now and then, with and without hooks.
    names |= {item.nodeid for item in items if item.name.endswith("_with_interleaving_with_custom_pgs")}
    items[:] = [item for item in items if item.nodeid not in names]


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Note a test that starts."""
    global _encoded
    _encoded = 0
    _note(test=nodeid, outcome="started")


def pytest_runtest_logreport(report: Any) -> None:
    """Note a test's outcome, why it was that, and how many tensors went through the hooks."""
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash else report.longrepr).strip().split("\n")[0]
    _note(test=report.nodeid, outcome=report.outcome, reason=reason, encoded=_encoded)
