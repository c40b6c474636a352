"""The versions of megatron-core that are supported, and what the hooks replace in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..host import versions
from ..host.versions import Target, VersionRange, parse, unsupported

SUPPORTED = VersionRange("0.16.0", "0.20.0")

_TENSORS = "tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape"
_OPS = "tensor_send_prev tensor_recv_prev tensor_send_next tensor_recv_next group"

_PIPELINE, _TENSOR, _DATA = "hook pipeline", "hook tensor", "hook data_parallel"
_SCHEDULES = "pipeline_parallel.schedules"
_P2P = "pipeline_parallel.p2p_communication"
_LAYERS = "tensor_parallel.layers"
_DDP, _BUCKETS = "distributed.distributed_data_parallel", "distributed.param_and_grad_buffer"
_DISTRIBUTED = "optimizer.distrib_optimizer"

# Part of the integration, module, function, and its first parameters. These are the same in 0.16.1, 0.17.1,
# 0.18.2 and 0.19.0.
TARGETS = tuple(
    Target(f"megatron.core.{module}", name, parameters, part)
    for part, module, name, parameters in (
        ("schedules", _SCHEDULES, "get_forward_backward_func", ""),
        ("schedules", _SCHEDULES, "forward_backward_no_pipelining", "forward_step_func"),
        ("schedules", _SCHEDULES, "forward_backward_pipelining_with_interleaving", "forward_step_func"),
        ("schedules", _SCHEDULES, "forward_backward_pipelining_without_interleaving", "forward_step_func"),
        (_PIPELINE, _P2P, "P2PCommunicator._communicate", f"self {_TENSORS} wait_on_reqs"),
        (_PIPELINE, _P2P, "_batched_p2p_ops", _OPS),
        (_PIPELINE, _P2P, "_p2p_ops", _OPS),
        (_PIPELINE, _SCHEDULES, "forward_step", "forward_step_func data_iterator model"),
        (_TENSOR, _LAYERS, "RowParallelLinear.forward", "self input_"),
        (_TENSOR, _LAYERS, "ColumnParallelLinear.forward", "self input_"),
        (_TENSOR, "transformer.transformer_layer", "TransformerLayer.forward", "self"),
        (_DATA, _BUCKETS, "_ParamAndGradBucket.__init__", "self"),
        (_DATA, _BUCKETS, "_ParamAndGradBucketGroup.start_grad_sync", "self force_all_reduce"),
        (_DATA, _BUCKETS, "_ParamAndGradBucketGroup.start_param_sync", "self force_sync"),
        (_DATA, _DDP, "DistributedDataParallel.__init__", "self config ddp_config module"),
        (_DATA, _DISTRIBUTED, "DistributedOptimizer.__init__", "self optimizer config"),
        (_DATA, _DISTRIBUTED, "DistributedOptimizer._copy_main_params_to_model_params", "self"),
        (_DATA, _DISTRIBUTED, "DistributedOptimizer._get_model_param_range_map", "self param"),
        (_DATA, "optimizer.optimizer", "MixedPrecisionOptimizer.prepare_grads", "self"),
        (_DATA, "optimizer.optimizer", "MegatronOptimizer.__init__", "self optimizer"),
    )
)


def require_supported(core: Any, hooks: Sequence[str]) -> None:
    """Stop unless the imported ``megatron.core`` is one that the hooks are made for.

    Args:
        core: The module ``megatron.core``.
        hooks: Names of the hooks whose targets are looked at.

    Raises:
        VersionError: Says what was found, what is supported, and what to do.
    """
    version = str(getattr(core, "__version__", "unknown"))
    folder = os.path.dirname(getattr(core, "__file__", None) or "unknown place")
    found = f"megatron-core {version} ({folder})"
    if version not in SUPPORTED:
        raise unsupported(found, SUPPORTED, _advice(version, folder))
    parts = {"schedules", *(f"hook {name}" for name in hooks)} if hooks else ()
    remedy = f"use an unmodified megatron-core {SUPPORTED}, or switch these hooks off in the dct section"
    targets = [target for target in TARGETS if target.part in parts]
    versions.require(targets, found, SUPPORTED, remedy)


def _advice(version: str, folder: str) -> str:
    if parse(version) < (0, 5):
        return (
            "this looks like Megatron-DeepSpeed, where DeepSpeed communicates: put the dct section into the "
            "DeepSpeed JSON and launch the script without dct_plugin.megatron"
        )
    if "site-packages" in folder:
        return f"pip install 'megatron-core>={SUPPORTED.first},<{SUPPORTED.end}'"
    return "check out a supported release of Megatron-LM, e.g. git checkout core_v0.16.1"
