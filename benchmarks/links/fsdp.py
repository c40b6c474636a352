"""torch FSDP2: its own collectives in fp32 and bf16, and the plugin's exchange, with replicas (HSDP) and
on one mesh.
"""

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
from dct_plugin.data_parallel import exact_updates
from dct_plugin.integrations.fsdp import compress_replicas, compress_shards
from dct_plugin.metrics import Metrics
from dct_plugin.recommender.links.method import Method

from .ddp import ADAMW, ADAMW_SECTIONS
from .perceptron import batch, perceptron, width_of

#: Of the plugin with SGD, by name.
SECTIONS: dict[str, dict[str, Any]] = {
    f"DCT {sparsity:g} {values}": {"sparsity": sparsity, "value_dtype": values}
    for sparsity, values in ((0.9, "bf16"), (0.99, "bf16"), (0.99, "int8"))
}


class Replicas:
    """``parameters`` (millions) says how large the model is, ``per_node`` how many ranks shard it, and the
    variant with which optimizer.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._width, per_node = width_of(options["parameters"]), int(options.get("per_node", 1))
        self._data = batch(self._width)
        shape = dist.get_world_size() // per_node, per_node
        self._mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def open(self, variant: str) -> list[Method]:
        self._is_adamw = variant.endswith(ADAMW)
        methods = [
            Method("ideal", self._training(self._mesh["shard"])[0]),
            Method("fp32", self._training(self._mesh)[0]),
            Method("bf16", self._training(self._mesh, reduce_dtype=torch.bfloat16)[0]),
        ]
        for name, section in (ADAMW_SECTIONS if self._is_adamw else SECTIONS).items():
            step, model, optimizer = self._training(self._mesh)
            metrics = Metrics(
                MetricsConfig(), rank=dist.get_rank(), world_size=self._mesh["replicate"].size()
            )
            compress_replicas(model, {"data_parallel": section}, optimizer=optimizer, metrics=metrics)
            methods.append(Method(name, step, [metrics], warmup=12))
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
        kind = torch.optim.AdamW if self._is_adamw else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=1e-4 if self._is_adamw else 1e-3)
        return partial(self._step, model, optimizer), model, optimizer

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        x, y = self._data
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


class OneMesh:
    """All ranks shard one copy, with AdamW, and gather bf16; options are those of :class:`Replicas`.

    A variant is a learning rate and the micro-batches of a step, of which the last one reduces.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._width, self._per_node = width_of(options["parameters"]), int(options.get("per_node", 1))
        self._data, ranks = batch(self._width), dist.get_world_size()
        self._mesh = init_device_mesh("cpu", (ranks,))
        shape = ranks // self._per_node, self._per_node
        self._replicas = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def open(self, variant: str) -> list[Method]:
        exact_updates.clock = lambda: 0.0  # as on a link where exact updates are the faster way
        rate, micro = variant.split(", ")
        self._rate, self._micro = float(rate), int(micro.split()[0])
        methods = [Method("bf16", self._training(self._mesh, torch.bfloat16)[0])]
        methods.append(Method("fp32", self._training(self._mesh)[0]))
        if self._per_node > 1:
            methods.append(Method("HSDP fp32", self._training(self._replicas)[0]))
        for name, section in (("DCT", {}), ("DCT log4", {"value_dtype": "log4"})):
            step, model, optimizer = self._training(self._mesh)
            metrics = Metrics(MetricsConfig(), rank=dist.get_rank(), world_size=dist.get_world_size())
            config = {"data_parallel": {"nodes": self._per_node, **section}}
            compress_shards(model, config, optimizer=optimizer, metrics=metrics)
            methods.append(Method(name, step, [metrics], warmup=10))
        return methods

    def close(self) -> None:
        pass

    def _training(
        self, mesh: Any, reduced: torch.dtype = torch.float32
    ) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        model = perceptron(self._width)
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        for layer in [*model, model]:
            if isinstance(layer, nn.Linear) or layer is model:
                fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self._rate)
        return partial(self._step, model, optimizer), model, optimizer

    def _step(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        x, y = self._data
        optimizer.zero_grad()
        for at, (part, wanted) in enumerate(zip(x.chunk(self._micro), y.chunk(self._micro), strict=True)):
            model.set_requires_gradient_sync(at == self._micro - 1)
            nn.functional.mse_loss(model(part).float(), wanted).backward()
        optimizer.step()
