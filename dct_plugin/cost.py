"""A model of the time of a training step: computing, coding and sending, for every class of compression.

Source: the cost model of MCBench (Bian et al., MLSys 2024, section 5), with what coding costs added to it:

    T = compute + codec + max(latency, bytes / rate)

Each part is linear in what can be counted of a job: floating-point operations, entries, kept entries, bytes.
The coefficients are a :class:`Machine`, which `dct cost calibrate` measures and writes as JSON. Nothing is
taken to overlap: on a machine whose processors also send, little does.

Units are seconds, bytes and bits per second throughout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from .errors import ConfigError

_Method = Literal["none", "threshold", "quantise", "transform"]
#: Classes of activation compression whose coding takes time.
CODED: tuple[_Method, ...] = ("threshold", "quantise", "transform")
#: Steps of coding and decoding a tensor and its gradient.
_CODING = {
    "crossing": "tensor, whatever its size, for {}",
    "entry": "entry, for {}",
    "number": "number that {} sends of it, one way",
    "product": "multiplication in a matrix product of {}",
}

#: The coefficients that describe a machine: seconds for one of each.
COEFFICIENTS: Mapping[str, str] = {
    "flop": "floating-point operation of a matrix product",
    "activation": "entry of a layer's output, for all that is done element by element",
    "score": "entry of an attention matrix",
    "parameter": "parameter, for gradients and the optimizer",
    "layer": "layer, whatever its size",
    "byte": "byte through the transport: copying, adding up, system calls",
    "round": "message round of a bucket, without a link",
    "cast": "entry rounded to bf16 and back",
    "select": "entry that passes a threshold's selection, residual included",
    "kept": "kept entry that is written, or read and added",
    "powersgd": "entry, for a low-rank product whatever its rank",
    "powersgd_rank": "entry and rank of a low-rank product",
    **{f"{method}_{count}": what.format(method) for method in CODED for count, what in _CODING.items()},
}

#: DDP's buckets, bytes: the first one, and the others.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
#: Entries below which the plugin sends a tensor dense; its default.
_SMALL = 4096
#: Header and checksums of a payload, bytes.
_HEADER = 40


@dataclass(frozen=True)
class Link:
    """A network between machines: bits per second in each direction of a rank's link, and seconds for a
    message to arrive. An infinite rate leaves the transport itself, which is the machine's ``byte``.
    """

    rate: float = math.inf
    latency: float = 0.0

    def seconds(self, sent: float, rounds: float = 1.0) -> float:
        """Return the time for so many bytes in so many rounds, one behind the other."""
        return max(rounds * self.latency, 8.0 * sent / self.rate)


@dataclass(frozen=True)
class Transformer:
    """Blocks of a transformer and what one rank feeds them in a step.

    Attributes:
        layers: Blocks.
        hidden: Width; attention heads are 64 wide, the MLP four times ``hidden``.
        batch: Sequences per rank and step.
        sequence: Tokens of a sequence.
    """

    layers: int
    hidden: int
    batch: int
    sequence: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 64)

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The shapes of all weight matrices."""
        h = self.hidden
        return [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)] * self.layers

    @property
    def vectors(self) -> int:
        """The number of entries of biases and norms."""
        return 13 * self.hidden * self.layers

    @property
    def parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices) + self.vectors

    def counts(self) -> dict[str, float]:
        """Count what a step computes: forward, backward and in the optimizer."""
        scores = self.batch * self.heads * self.sequence**2 * self.layers
        products = 2.0 * self.tokens * sum(rows * columns for rows, columns in self.matrices)
        # A backward pass makes two products of each, and attention has two of its own.
        flops = 3.0 * (products + 4.0 * scores * self.hidden / self.heads)
        return {
            "flop": flops,
            "activation": float(self.tokens * self.hidden * self.layers),
            "score": float(scores),
            "parameter": float(self.parameters),
            "layer": float(self.layers),
        }


@dataclass(frozen=True)
class Machine:
    """A kind of machine: coefficients as in :data:`COEFFICIENTS`, in seconds each.

    Attributes:
        name: For people.
        cores: Ranks that compute at full speed beside each other; more of them share.
        coefficients: One that is missing is 0.
        fitted_on: What was measured, in words.
    """

    name: str
    cores: int
    coefficients: Mapping[str, float] = field(default_factory=dict)
    fitted_on: str = ""

    def seconds(self, counts: Mapping[str, float], ranks_here: int = 1) -> float:
        """Return the time of a rank with these counts while ``ranks_here`` ranks do the same there."""
        alone = sum(self.coefficients.get(name, 0.0) * count for name, count in counts.items())
        return alone * max(1.0, ranks_here / self.cores)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigError: It cannot be read, or says something else; names file and key.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or not isinstance(content.get("coefficients"), dict):
                raise ConfigError(f"{path}: not a machine as `dct cost calibrate` writes it")
            if strange := sorted(content["coefficients"].keys() - COEFFICIENTS.keys()):
                raise ConfigError(
                    f"{path}: coefficients: {strange[0]} is unknown; known: {', '.join(COEFFICIENTS)}"
                )
            for key, value in content["coefficients"].items():
                if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                    raise ConfigError(f"{path}: coefficients.{key} = {value!r}: must be seconds, at least 0")
            if not isinstance(content.get("cores"), int) or content["cores"] < 1:
                raise ConfigError(f"{path}: cores = {content.get('cores')!r}: must be an integer >= 1")
            return cls(
                str(content.get("name", path.stem)),
                content["cores"],
                content["coefficients"],
                str(content.get("fitted_on", "")),
            )
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Gradient:
    """A class of gradient compression.

    Attributes:
        kind: ``dense`` all-reduce, ``threshold`` (DCT) or ``powersgd``.
        bits: Of a value on the wire; those that share scales (int8, int4, int2) have them on top.
        density: Share of the entries that a threshold keeps.
        rank: Of PowerSGD.
    """

    kind: Literal["dense", "threshold", "powersgd"]
    bits: int = 32
    density: float = 1.0
    rank: int = 0


#: Gradient classes by name.
GRADIENTS: Mapping[str, Gradient] = {
    "fp32": Gradient("dense"),
    "bf16": Gradient("dense", 16),
    "PowerSGD 1": Gradient("powersgd", rank=1),
    "PowerSGD 4": Gradient("powersgd", rank=4),
    **{
        f"DCT {sparsity:g} {values}": Gradient("threshold", bits, density)
        for sparsity, density in ((0.9, 0.1), (0.99, 0.01))
        for values, bits in (("bf16", 16), ("int8", 8), ("int4", 4))
    },
}


@dataclass(frozen=True)
class Activation:
    """A class of activation compression at a pipeline boundary, with its gradients compressed alike.

    Attributes:
        method: As in ``dct.model_parallel.pipeline``.
        bits: Of a number on the wire.
        density: Share of the entries that ``threshold`` sends.
        rate: Bits per entry of ``transform``.
        group: Numbers below 16 bits that share a scale, but for ``threshold``.
    """

    method: _Method
    bits: int = 16
    density: float = 1.0
    group: int = 128
    rate: float = 0.0

    def crossing(self, model: Transformer) -> tuple[float, float]:
        """Bits per entry of the boundary's tensor, forward and backward, positions and scales included."""
        number = self.bits + (16.0 / self.group if self.bits < 16 else 0.0)
        if self.method == "threshold":
            values = self.density * _scaled(self.bits)
            return values + self.density * positions(self.density), values
        if self.method == "transform":
            # Means and scales, and directions in a tenth of the steps.
            beside = 16.0 * (1.0 + self.directions) + 0.825 * model.hidden * self.directions
            return (self.rate + beside / model.tokens,) * 2
        return (number * self.density,) * 2

    @property
    def directions(self) -> float:
        """The share of the directions that ``transform`` keeps."""
        return min(1.0, 0.375 * self.rate)

    def coding(self, rows: int, hidden: int, messages: int = 1) -> dict[str, float]:
        """Count what coding and decoding a [rows, hidden] tensor and its gradient takes.

        ``messages`` cross in a step.
        """
        entries = float(rows * hidden)
        if self.method == "none":
            return {} if self.bits == 32 else {"cast": 2.0 * entries}
        density, products = self.density, 0.0
        if self.method == "transform":
            density, products = self.directions, (4.0 * self.directions + 2.0 / messages) * hidden * entries
        numbers = density * entries
        counts = {"crossing": 1.0, "entry": entries, "number": numbers, "product": products}
        return {f"{self.method}_{name}": count for name, count in counts.items()}


def positions(density: float) -> float:
    """Bits that the place of a kept entry takes: what a random subset needs at least, and 2 % (measured for
    the Rice code from 0.5 to 0.001).
    """
    if not 0.0 < density < 1.0:
        return 0.0
    rest = 1.0 - density
    return -1.02 * (density * math.log2(density) + rest * math.log2(rest)) / density


def _scaled(bits: int) -> float:
    """Bits of a value with its share of the scales of 256."""
    return bits + (32.0 / 256.0 if bits < 16 else 0.0)


#: Activation classes by name.
ACTIVATIONS: Mapping[str, Activation] = {
    "fp32": Activation("none", 32),
    "bf16": Activation("none"),
    "threshold 0.75 bf16": Activation("threshold", density=0.25),
    "threshold 0.9 bf16": Activation("threshold", density=0.1),
    "threshold 0.9 int8": Activation("threshold", 8, 0.1),
    **{f"quantise {bits}": Activation("quantise", bits) for bits in (8, 4, 2)},
    "transform 1.42 bits": Activation("transform", rate=1.42),
}


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by where they go, and bytes that a rank sends in it."""

    compute: float
    codec: float
    exchange: float
    sent: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.codec + self.exchange


def data_parallel(
    machine: Machine,
    model: Transformer,
    method: Gradient,
    *,
    ranks: int,
    link: Link,
    ranks_here: int | None = None,
) -> Estimate:
    """A step of data-parallel training.

    Args:
        machine: Of every rank.
        model: With the batch of one rank.
        method: What becomes of the gradients, in DDP's buckets.
        ranks: In the group; the plugin's ``exchange: "auto"`` decides between direct and two phases.
        link: Of every rank.
        ranks_here: Of them, on one machine; None: all.

    Raises:
        ConfigError: Fewer than two ranks.
    """
    if ranks < 2:
        raise ConfigError(f"ranks = {ranks}: must be at least 2, one rank sends nothing")
    here = ranks if ranks_here is None else ranks_here
    counts, sent, rounds = reduction(model, method, ranks)
    return Estimate(
        compute=machine.seconds(model.counts(), here),
        # Ranks that wait for the network leave the processor to the others.
        codec=machine.seconds({k: n for k, n in counts.items() if k in _TRANSPORT})
        + machine.seconds({k: n for k, n in counts.items() if k not in _TRANSPORT}, here),
        exchange=link.seconds(sent, rounds),
        sent=sent,
    )


_TRANSPORT = ("byte", "round")


def reduction(model: Transformer, method: Gradient, ranks: int) -> tuple[dict[str, float], float, float]:
    """Count one reduction of the gradients: counts beside computing, bytes a rank sends, rounds."""
    numel, share = model.parameters, (ranks - 1) / ranks
    buckets = 1 + max(0, math.ceil((4 * numel - _FIRST_BUCKET) / _BUCKET))
    if method.kind == "dense":
        sent, rounds = 2 * share * numel * method.bits / 8, 2.0 * (ranks - 1) * buckets
        counts = {"cast": float(numel)} if method.bits < 32 else {}
    elif method.kind == "powersgd":
        factors = method.rank * sum(rows + columns for rows, columns in model.matrices) + model.vectors
        sent, rounds = 2 * share * 4 * factors, 3 * 2.0 * (ranks - 1)
        counts = {"powersgd": float(numel), "powersgd_rank": float(numel * method.rank)}
    else:
        counts, sent, rounds = _thresholded(model, method, ranks, buckets)
    return {**counts, "byte": sent, "round": rounds}, sent, rounds


def _thresholded(
    model: Transformer, method: Gradient, ranks: int, buckets: int
) -> tuple[dict[str, float], float, float]:
    numel = sum(rows * columns for rows, columns in model.matrices if rows * columns >= _SMALL)
    small = model.parameters - numel
    kept, direct, share = method.density * numel, ranks == 2, (ranks - 1) / ranks
    crossings = ranks - 1.0 if direct else 2 * share
    entry = (_scaled(method.bits) + positions(method.density)) / 8
    sent = crossings * (kept * entry + 4 * small + _HEADER * len(model.matrices))
    # Owners select among sums, and every rank reads what all owners answer.
    selected = numel * (1.0 if direct else 1.0 + 1.0 / ranks)
    handled = kept * ((1.0 + ranks) if direct else 3.0 + 1.0 / ranks)
    return {"select": selected, "kept": handled}, sent, (1.0 if direct else 2.0) * buckets


def pipeline(
    machine: Machine,
    model: Transformer,
    method: Activation,
    *,
    stages: int,
    micro_batches: int,
    link: Link,
    ranks_here: int | None = None,
) -> Estimate:
    """A step of 1F1B pipeline training, whose transfers are waited for (Megatron without overlap).

    The first micro-batch passes every boundary, and each one behind it adds a transfer each way at the
    slowest: ``micro_batches + stages - 2`` of them in sequence, and one more turn of computing.

    Args:
        machine: Of every stage.
        model: All layers, with the batch of one micro-batch; stages share them evenly.
        method: What becomes of activations and their gradients.
        stages: At least 2.
        micro_batches: Of a step.
        link: Between stages.
        ranks_here: Stages on one machine; None: all.

    Raises:
        ConfigError: Fewer than two stages, or no micro-batch.
    """
    if stages < 2 or micro_batches < 1:
        raise ConfigError(
            f"stages = {stages}, micro_batches = {micro_batches}: must be at least 2 stages, 1 micro-batch"
        )
    here = stages if ranks_here is None else ranks_here
    turns, crossings = micro_batches + stages - 1, micro_batches + stages - 2
    entries = model.tokens * model.hidden
    work = {name: count / stages for name, count in model.counts().items()}
    parameter = work.pop("parameter")  # the optimizer steps once
    ways = [entries * bits / 8 for bits in method.crossing(model)]
    return Estimate(
        compute=turns * machine.seconds(work, here) + machine.seconds({"parameter": parameter}, here),
        codec=crossings
        * machine.seconds(
            {"byte": sum(ways), "round": 2.0, **method.coding(model.tokens, model.hidden, micro_batches)}
        ),
        exchange=crossings * sum(link.seconds(sent) for sent in ways),
        sent=micro_batches * max(ways),
    )


def pays_below(fast: Estimate, dense: Estimate) -> float:
    """Link rate, bits per second, below which ``fast`` takes less time than ``dense``; both estimated on a
    link without a limit. 0: nowhere; infinite: everywhere.
    """
    price, saved = fast.total - dense.total, 8.0 * (dense.sent - fast.sent)
    if price <= 0.0:
        return math.inf if saved >= 0.0 else 0.0
    return max(0.0, saved / price)


#: Two cores of an AMD EPYC, gloo, one thread per rank; what `dct cost` takes without a file.
MEASURED = Machine(
    "CPU, 2 cores",
    2,
    {
        "flop": 8.942e-12,
        "activation": 8.981e-08,
        "score": 8.152e-09,
        "parameter": 6.804e-10,
        "layer": 0.001244,
        "byte": 1.145e-09,
        "round": 0.001633,
        "cast": 6.2e-10,
        "select": 2.134e-09,
        "kept": 7.252e-09,
        "powersgd": 2.253e-09,
        "powersgd_rank": 1.148e-09,
        "threshold_crossing": 0.0001616,
        "threshold_entry": 3.458e-10,
        "threshold_number": 1.461e-08,
        "quantise_crossing": 0.0002472,
        "quantise_entry": 6.657e-09,
        "transform_crossing": 0.001072,
        "transform_number": 7.895e-09,
        "transform_product": 2.441e-11,
    },
    "2026-11-22: 2 ranks, no limit: 1 x 128, batch 4 x 64; 4 x 128, batch 8 x 32; 2 x 256, batch 8 x 128; "
    "1 x 512, batch 16 x 64; 2 x 256, batch 4 x 64; 2 x 512, batch 4 x 64",
)
