"""The trainer's step under several configurations, measured beside each other on links of a limited rate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import numpy as np

from dct_plugin.config import DCTConfig
from dct_plugin.recommender.links.method import Method

from .data import epoch_batches, load
from .trainer import Training, reporter, tensors_of


class Trainings:
    """A workload for :class:`~dct_plugin.recommender.links.team.Team`.

    Options: ``format``, ``data`` (a file or null) and ``max_rows`` of the data, and ``configs``: by variant
    and name, a DeepSpeed JSON with a ``dlrm`` section and, for what is compressed, a ``dct`` section.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        deepspeed.init_distributed()
        self._clicks = load(options["format"], options["data"], max_rows=options["max_rows"])
        self._configs = options["configs"]
        self._trainings: list[Training] = []

    def open(self, variant: str) -> list[Method]:
        """One method for every configuration of the variant."""
        return [self._method(name, config) for name, config in self._configs[variant].items()]

    def close(self) -> None:
        """Free the engines."""
        for training in self._trainings:
            training.close()
        self._trainings.clear()

    def _method(self, name: str, config: Mapping[str, Any]) -> Method:
        training = Training(name, config, self._clicks, seed=0, epochs=1, report=reporter(None))
        self._trainings.append(training)
        attached = training.engine.__dict__.get("dct")
        metrics = [training.metrics, *([] if attached is None else [attached.metrics])]
        step = _stepper(training, self._batches(training.batch_size))
        return Method(name, step, metrics, warmup=_warmup(config))

    def _batches(self, size: int) -> Iterator[np.ndarray]:
        for epoch in itertools.count():
            yield from epoch_batches(self._clicks.num_train, size, seed=0, epoch=epoch)


def _stepper(training: Training, batches: Iterator[np.ndarray]) -> Callable[[], None]:
    to_tensors = tensors_of(training.clicks.train, training.engine)
    numbers = itertools.count(1)

    def step() -> None:
        training.step(next(batches), to_tensors)
        training.metrics.step(next(numbers))

    return step


def _warmup(config: Mapping[str, Any]) -> int:
    """Steps until what is sent is what will be sent."""
    if "dct" not in config:
        return 3
    gradients = DCTConfig.parse(config["dct"]).data_parallel
    return 10 + gradients.dense_steps + gradients.ramp_steps
