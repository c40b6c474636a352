"""torch ``DistributedDataParallel``: its own hooks, PowerSGD, top-k and the plugin's hook, on one model.

Nearly all methods share one model with 25 MB buckets, so that they differ in the hook alone. On gloo,
PowerSGD's collectives follow each other in callbacks, whose order differs between the ranks when there are
several buckets: it gets a model with one bucket. With AdamW each setting of the plugin has a model of its
own, since step-ahead follows the passes of the model and the steps of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import dct_plugin
from dct_plugin.config import DCTConfig
from dct_plugin.integrations.ddp import DCTState, dct_hook
from dct_plugin.metrics import Metrics
from dct_plugin.recommender.links.method import Method
from dct_plugin.transport import Exchange

from .perceptron import BATCH, LAYERS, apart, batch, perceptron, width_of

Hook = Callable[[dist.GradBucket], torch.futures.Future[Tensor]]

#: Of the plugin: sparsity and type of values.
SETTINGS = ((0.9, "bf16"), (0.9, "int8"), (0.99, "bf16"), (0.99, "int8"), (0.99, "int4"))
#: The start with AdamW. Sparse settings get step-ahead.
START = {"warmup_steps": 2, "sparsity_warmup_steps": 2}
#: The same with AdamW, by name.
ADAMW_SECTIONS: dict[str, dict[str, Any]] = {
    "DCT 0.99 bf16": {"sparsity": 0.99, "value_dtype": "bf16", **START},
    "DCT 0.96 int4": {"sparsity": 0.96, "value_dtype": "int4", **START},
    "DCT 0 int8": {"sparsity": 0.0, "value_dtype": "int8", "warmup_steps": 2},
    "DCT updates": {"exchange_of": "updates", "warmup_steps": 2},
}
#: The end of a variant's name that trains with AdamW.
ADAMW = ", AdamW"
TOPK_DENSITY = 0.01


def ideal(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sends nothing: what a step takes without communication."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class LatencyFloor:
    """A hook that exchanges eight bytes: no method that communicates can be faster."""

    def __init__(self) -> None:
        self._exchange = Exchange(None, torch.device("cpu"))
        self._message = torch.zeros(8, dtype=torch.uint8)

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self._exchange.all_gather(self._message)
        return ideal(bucket)


class TopK:
    """Top-k with error feedback as it is usually written: an all-gather of values and of positions."""

    def __init__(self, density: float) -> None:
        self.density = density
        self._residuals: dict[int, Tensor] = {}

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat, world_size = bucket.buffer(), dist.get_world_size()
        # By size: buckets are numbered anew after the first step, and parameters do not move between them.
        residual = self._residuals.setdefault(bucket.index(), torch.zeros_like(flat))
        if residual.numel() != flat.numel():
            residual = self._residuals[bucket.index()] = torch.zeros_like(flat)
        residual += flat
        count = max(1, int(self.density * flat.numel()))
        _, positions = torch.topk(residual.abs(), count, sorted=False)
        values = residual[positions]
        residual[positions] = 0
        all_values = [torch.empty_like(values) for _ in range(world_size)]
        all_positions = [torch.empty_like(positions) for _ in range(world_size)]
        dist.all_gather(all_values, values)
        dist.all_gather(all_positions, positions)
        flat.zero_()
        for theirs, where in zip(all_values, all_positions, strict=True):
            flat.index_add_(0, where, theirs)
        flat /= world_size
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future


class Trained:
    """One model under DDP, whose hook is whichever was chosen last.

    Args:
        model: The model.
        data: Samples and targets, see :func:`.perceptron.batch`.
        bucket_cap_mb: The size of DDP's buckets.
        is_adamw: Train with AdamW in place of SGD.
    """

    def __init__(
        self, model: nn.Module, data: tuple[Tensor, Tensor], bucket_cap_mb: float, *, is_adamw: bool = False
    ) -> None:
        self.ddp = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb
        )
        self.hook: Hook = ideal
        self.ddp.register_comm_hook(self, _dispatch)
        kind = torch.optim.AdamW if is_adamw else torch.optim.SGD
        self._optimizer = kind(model.parameters(), lr=1e-4 if is_adamw else 1e-3)
        self._data = data

    def step(self) -> None:
        """One step of the optimizer."""
        _step(self.ddp, self._optimizer, self._data)

    @contextmanager
    def using(self, hook: Hook) -> Iterator[None]:
        """Inside, steps go through ``hook``."""
        self.hook = hook
        yield

    @contextmanager
    def through(self, state: DCTState) -> Iterator[None]:
        """Inside, steps go through the plugin."""
        with self.using(partial(dct_hook, state)):
            yield

    @contextmanager
    def apart(self, hook: Hook) -> Iterator[None]:
        """Inside, steps go through a hook that leaves every rank its own gradients."""
        with self.using(hook), apart(self.ddp.parameters()):
            yield


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]) -> None:
    x, y = data
    optimizer.zero_grad(set_to_none=False)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def _dispatch(trained: Trained, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return trained.hook(bucket)


# DDP checks the annotations of a hook as objects, not as the strings they are in this file.
_dispatch.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})


class DDP:
    """``parameters`` (millions) of the options says how large the model is, ``batch`` how many samples a rank
    has with SGD, the variant the optimizer.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._width, self._per_node = width_of(options["parameters"]), int(options.get("per_node", 1))
        self._samples = int(options.get("batch", BATCH))

    def open(self, variant: str) -> list[Method]:
        adamw = variant.endswith(ADAMW)
        data = batch(self._width, self._samples)
        shared, one_bucket = (Trained(perceptron(self._width), data, mb, is_adamw=adamw) for mb in (25, 1e6))
        ideal_step, *others = methods_of(shared, one_bucket, () if adamw else SETTINGS, self._per_node)
        if adamw:
            others += [with_adamw(self._width, *setting) for setting in ADAMW_SECTIONS.items()]
        latency_floor = Method("latency floor", shared.step, around=partial(shared.apart, LatencyFloor()))
        return [ideal_step, latency_floor, *others]

    def close(self) -> None:
        pass


def methods_of(
    shared: Trained, one_bucket: Trained, settings: Sequence[tuple[float, str]], per_node: int = 1
) -> list[Method]:
    """Every way to reduce a model's gradients; of the plugin, with each sparsity and type of values, and also
    with ``per_node`` ranks summed first.
    """
    group = dist.group.WORLD
    assert group is not None
    methods = [
        Method("ideal", shared.step, around=partial(shared.apart, ideal)),
        _method("fp32", shared, partial(default_hooks.allreduce_hook, group)),
        _method("bf16", shared, partial(default_hooks.bf16_compress_hook, group)),
        _method("fp16", shared, partial(default_hooks.fp16_compress_hook, group)),
    ]
    for rank in (1, 4):
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
        )
        hook = partial(powerSGD_hook.powerSGD_hook, state)
        methods.append(_method(f"PowerSGD {rank}", one_bucket, hook, warmup=5))
    methods.append(_method("top-k 1 %", shared, TopK(TOPK_DENSITY)))
    spread = dict.fromkeys([1, per_node])
    return [*methods, *(_dct(shared, *setting, nodes) for nodes in spread for setting in settings)]


def _method(name: str, trained: Trained, hook: Hook, **more: Any) -> Method:
    return Method(name, trained.step, around=partial(trained.using, hook), **more)


def _dct(trained: Trained, sparsity: float, values: str, nodes: int) -> Method:
    section = {"sparsity": sparsity, "value_dtype": values, "nodes": nodes}
    config = DCTConfig.parse({"data_parallel": section})
    metrics = Metrics(config.metrics, rank=dist.get_rank(), world_size=dist.get_world_size())
    state = DCTState(config)
    state.metrics = metrics  # without a summary at the end
    # Thresholds are measured at steps 0, 1, 2, 4, 8; then the residual has begun to fill.
    return Method(
        f"DCT {sparsity:g} {values}" + (", nodes" if nodes > 1 else ""),
        trained.step,
        around=partial(trained.through, state),
        metrics=[metrics],
        warmup=10,
    )


def with_adamw(width: int, name: str, section: Mapping[str, Any], layers: int = LAYERS) -> Method:
    """Return the steps of a model of its own with AdamW: the plugin shows it other weights in its passes."""
    ddp = nn.parallel.DistributedDataParallel(perceptron(width, layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    state = dct_plugin.attach(ddp, optimizer, {"data_parallel": section})
    step = partial(_step, ddp, optimizer, batch(width))
    return Method(name, step, [state.metrics], warmup=12)
