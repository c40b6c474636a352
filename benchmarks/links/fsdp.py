"""torch FSDP2 with replicas (HSDP): its own all-reduce in fp32 and bf16, and the plugin's exchange."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dct_plugin.config import MetricsConfig
from dct_plugin.integrations.fsdp import compress_replicas
from dct_plugin.metrics import Metrics
from dct_plugin.recommender.links.method import Method

from .perceptron import batch, perceptron, width_of

#: Of the plugin: sparsity and type of values.
SETTINGS = ((0.9, "bf16"), (0.99, "bf16"), (0.99, "int8"))


class Replicas:
    """``parameters`` (millions) says how large the model is, ``per_node`` how many ranks shard it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._width, per_node = width_of(options["parameters"]), int(options.get("per_node", 1))
        self._data = batch(self._width)
        shape = dist.get_world_size() // per_node, per_node
        self._mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def open(self, variant: str) -> list[Method]:
        methods = [
            Method("ideal", self._training(self._mesh["shard"])[0]),
            Method("fp32", self._training(self._mesh)[0]),
            Method("bf16", self._training(self._mesh, reduce_dtype=torch.bfloat16)[0]),
        ]
        for sparsity, values in SETTINGS:
            step, model, optimizer = self._training(self._mesh)
            metrics = Metrics(
                MetricsConfig(), rank=dist.get_rank(), world_size=self._mesh["replicate"].size()
            )
            section = {"sparsity": sparsity, "value_dtype": values}
            compress_replicas(model, {"data_parallel": section}, optimizer=optimizer, metrics=metrics)
            methods.append(Method(f"DCT {sparsity:g} {values}", step, [metrics], warmup=10))
        return methods

    def close(self) -> None:
        pass

    def _training(self, mesh: Any, **policy: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        """Return a step of a model of its own, the model and its optimizer."""
        model, mixed = perceptron(self._width), MixedPrecisionPolicy(**policy)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=mixed)
        fully_shard(model, mesh=mesh, mp_policy=mixed)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return partial(self._step, model, optimizer), model, optimizer

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        x, y = self._data
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
