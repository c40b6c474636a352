"""Calibration of the cost model: measure a machine, fit the model, check it where it was not fitted."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dct_plugin.config import PipelineConfig
from dct_plugin.config.options import models
from dct_plugin.cost import (
    CODED,
    COEFFICIENTS,
    GRADIENTS,
    Activation,
    Link,
    Machine,
    Transformer,
    data_parallel,
    reduction,
)
from dct_plugin.links.interleave import interleaved, warmed
from dct_plugin.links.namespaces import Links
from dct_plugin.links.rates import bits_per_second, rate_name
from dct_plugin.links.team import NETWORKS, Team
from dct_plugin.model_parallel import ActivationStream, FixedMessages

#: Shapes whose computing is measured, and those at which every class is, too.
COMPUTED = (
    Transformer(1, 128, 4, 64),
    Transformer(4, 128, 8, 32),
    Transformer(2, 256, 8, 128),
    Transformer(1, 512, 16, 64),
)
COMPARED = (Transformer(2, 256, 4, 64), Transformer(2, 512, 4, 64))
#: Of activations: rows and hidden size, share of the entries that is sent.
CODED_AT = tuple(
    (rows, hidden, density)
    for rows, hidden in ((256, 128), (1024, 96), (640, 384), (512, 512), (2048, 160))
    for density in (0.05, 0.1, 0.25)
)


@dataclass(frozen=True)
class Measured:
    """Seconds per step of each method at a shape, a number of ranks and a rate (None: no limit), and bytes
    that a rank's interface sent in a step, headers included.
    """

    shape: Transformer
    ranks: int
    rate: str | None
    seconds: Mapping[str, float]
    sent: Mapping[str, float]


@dataclass(frozen=True)
class Checked:
    """A method's seconds per step beside the model's."""

    shape: Transformer
    ranks: int
    rate: str | None
    method: str
    measured: float
    estimated: float

    @property
    def error(self) -> float:
        """The relative error, signed."""
        return self.estimated / self.measured - 1.0


def measure(
    ranks: int,
    shapes: Sequence[tuple[Transformer, bool]],
    rates: Sequence[str | None],
    folder: Path,
    follow: Callable[[str], None],
    *,
    seconds: float = 1.0,
) -> Iterator[Measured]:
    """Measure steps of local ranks on links of limited rate.

    Args:
        ranks: Processes.
        shapes: And whether all methods are measured there, or a step that sends nothing alone.
        rates: In the notation of ``tc``; None: no limit.
        folder: For the ranks' output.
        follow: Told what was measured, in words.
        seconds: For each shape and rate; at least three rounds are made.

    Raises:
        LinksError: No namespaces can be made.
        TeamError: A rank failed.
    """
    workload = "dct_plugin.tools.bench.transformer:Transformers"
    with (
        Links(ranks, NETWORKS) as links,
        Team(workload, ranks, links, options={}, folder=folder, name=f"cost-{ranks}") as team,
    ):
        for shape, everything in shapes:
            links.limit(None)
            variant = f"{shape.layers},{shape.hidden},{shape.batch},{shape.sequence}"
            methods = team.open(variant if everything else f"{variant},ideal")
            warmed(team.block, methods)
            for rate in rates if everything else (None,):
                links.limit(rate)
                figures = interleaved(team.block, list(methods), seconds)
                taken = {f.name: f.median / 1e3 for f in figures}
                found = Measured(shape, ranks, rate, taken, {f.name: f.sent / ranks for f in figures})
                ideal = 1e3 * found.seconds["ideal"]
                follow(f"{ranks} ranks, {name_of(rate)}, {words(shape)}: ideal {ideal:.0f} ms")
                yield found
            team.close()


def words(shape: Transformer) -> str:
    """Describe a shape for people."""
    return f"{shape.layers} x {shape.hidden}, batch {shape.batch} x {shape.sequence}"


def name_of(rate: str | None) -> str:
    """Name a rate for people."""
    return "no limit" if rate is None else rate_name(rate)


def calibrate(folder: Path, follow: Callable[[str], None]) -> tuple[Machine, list[Measured]]:
    """Measure this machine, about a minute: two ranks, links without a limit.

    Raises:
        LinksError, TeamError: As :func:`measure`.
    """
    shapes = [(shape, False) for shape in COMPUTED] + [(shape, True) for shape in COMPARED]
    found = list(measure(2, shapes, (None,), folder, follow))
    cores = os.cpu_count() or 1
    fitted_on = f"{date.today()}: 2 ranks, no limit: " + "; ".join(words(shape) for shape, _ in shapes)
    coefficients = {**fitted(found), **fitted_coding([coded(*each) for each in activations(CODED_AT)])}
    return Machine(f"{platform.machine()}, {cores} cores", cores, coefficients, fitted_on), found


def fitted(found: Sequence[Measured]) -> dict[str, float]:
    """Coefficients, none negative, that make the relative errors of all steps smallest in the square."""
    rows = []
    for each in found:
        for method, seconds in each.seconds.items():
            counts = each.shape.counts()
            if method != "ideal":
                counts |= reduction(each.shape, GRADIENTS[method], each.ranks)[0]
            rows.append((counts, seconds))
    return _fitted([name for name in COEFFICIENTS if name.partition("_")[0] not in CODED], rows)


def _fitted(names: Sequence[str], found: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Coefficients of counts, none negative, for the seconds that they took."""
    from scipy.optimize import nnls

    rows = [[counts.get(name, 0.0) for name in names] for counts, _ in found]
    weights = [1.0 / seconds for _, seconds in found]
    table = np.array(rows) * np.array(weights)[:, None]
    scale = table.max(axis=0)  # counts differ by ten orders of magnitude
    scale[scale == 0.0] = 1.0
    solution, _ = nnls(table / scale, np.ones(len(rows)))
    return dict(zip(names, (solution / scale).tolist(), strict=True))


@dataclass(frozen=True)
class Coded:
    """A class of activations at [rows, hidden]: seconds to code and decode a tensor and its gradient."""

    method: Activation
    rows: int
    hidden: int
    seconds: float


def activations(at: Sequence[tuple[int, int, float]]) -> Iterator[tuple[Activation, int, int]]:
    """Every class at every one of some shapes and strengths."""
    for name in CODED:
        for rows, hidden, density in at:
            if name == "transform":
                yield Activation(name, rate=8 * density), rows, hidden
            elif name == "quantise":
                yield Activation(name, 4), rows, hidden
            else:
                yield Activation(name, 16, density), rows, hidden


def _forward(method: Activation) -> dict[str, Any]:
    """Return the section of a method, with the settings that it has."""
    known = {"bits": method.bits, "sparsity": 1.0 - method.density, "rate": method.rate}
    settings = {kind.label(): kind.model_fields for kind in models(PipelineConfig.model_fields["forward"])}
    own = {key: value for key, value in known.items() if key in settings[method.method]}
    return {"method": method.method, **own}


def coded(method: Activation, rows: int, hidden: int, *, rounds: int = 20) -> Coded:
    """Measure one, on one thread, without a network: the least of some rounds."""
    section = PipelineConfig.of(forward=_forward(method))
    sender, receiver = (FixedMessages(ActivationStream(section, name="x", rank=rank)) for rank in range(2))
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(rows, hidden, generator=generator) for _ in range(2))
    arrived, back, taken = torch.empty_like(x), torch.empty_like(x), []
    # glibc keeps blocks up to the largest one that was freed; in a process that trains that is a large one.
    torch.empty(31 << 18)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number in range(rounds + 9):
        began = time.perf_counter()
        message, kept, _ = sender.encode(x, number)
        received = receiver.decode(message, arrived)
        answer, _ = receiver.encode_gradient(gradient, received, exact=True)
        sender.decode_gradient(answer, {number: kept}, back)
        for end in (sender, receiver):
            end.stream.end_step()
        taken.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return Coded(method, rows, hidden, min(taken[9:]))


def fitted_coding(found: Sequence[Coded]) -> dict[str, float]:
    """Coefficients of all classes' coding."""
    coefficients: dict[str, float] = {}
    for name in CODED:
        own = [(one.method.coding(one.rows, one.hidden), one.seconds) for one in found]
        rows = [(counts, seconds) for counts, seconds in own if f"{name}_entry" in counts]
        if rows:
            coefficients |= _fitted([key for key in COEFFICIENTS if key.startswith(f"{name}_")], rows)
    return coefficients


def check(machine: Machine, found: Sequence[Measured]) -> list[Checked]:
    """The model's figures beside measured ones."""
    checked = []
    for each in found:
        link = Link() if each.rate is None else Link(bits_per_second(each.rate))
        for method, seconds in each.seconds.items():
            if method == "ideal":
                estimated = machine.seconds(each.shape.counts(), each.ranks)
            else:
                ways = GRADIENTS[method]
                estimated = data_parallel(machine, each.shape, ways, ranks=each.ranks, link=link).total
            checked.append(Checked(each.shape, each.ranks, each.rate, method, seconds, estimated))
    return checked
