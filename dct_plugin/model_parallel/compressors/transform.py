"""Coordinates in the principal directions, each in as many bits as its variance earns."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...codecs.quantised import Quantiser
from ...config.methods import TransformMethod
from ...errors import PayloadError
from .compressor import ActivationCompressor, Site, add, rows_of, size_of_rows

#: The code of directions that cross: 8 bits an entry, with a scale for as many entries.
_DIRECTIONS = Quantiser(bits=8, group=64)
#: Share of normal values' variance that 0, 1, ... bits leave, at best (Max, IRE Trans. Inf. Theory 1960).
_LEFT = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000869)
_MOST_BITS = len(_LEFT) - 1
#: Weight of the covariance known so far when a step adds its own.
_DECAY = 0.8
_ITERATIONS = 3
#: Most steps from one set of directions that crosses to the next.
_BASIS_INTERVAL = 10


class Transformed(ActivationCompressor[TransformMethod]):
    """Rows X [rows, hidden] cross as their mean m and coordinates (X - m) V, V [hidden, directions].

    Transform coding (Huang and Schultheiss, IEEE Trans. Commun. Syst. 1963): a row takes ``rate`` times
    ``hidden`` bits, of which a direction has as many as lower the squared error most, 8 to none. V
    are principal directions by the covariance of the last steps' first messages. They cross, with their bits,
    in every step at first, then ever less often, at last in every tenth step. Gradients pass
    straight through and have directions of their own: what they say outside those of the activations is what
    lets new ones grow.
    """

    def __init__(self, config: Any, site: Site) -> None:
        super().__init__(config, site)
        self._states: dict[int, _State] = {}  # by hidden

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        rows, hidden = size_of_rows(shape)
        sizes = self._sizes(hidden)
        head = sizes.code if self._sends_directions(self._state(hidden)) else 0
        return head + 2 * hidden + 2 * sizes.directions + sizes.bits * -(-rows // 8)

    def encode_one(self, part: Tensor) -> tuple[Tensor, None]:
        rows = rows_of(part)
        state = self._state(part.shape[-1])
        mean = (rows.sum(dim=0) / max(rows.shape[0], 1)).to(torch.bfloat16)
        rows = rows - mean.to(torch.float32)
        if self.site.training and state.scatter is None:
            state.scatter = rows.t() @ rows
        # Before a step is over, every message has directions of its own.
        code = state.own or self._code(rows.t() @ rows, None)
        head = [code.stored.to(part.device)] if self._sends_directions(state) else []
        sections = [*head, mean.view(torch.uint8)]
        coordinates = torch.nn.functional.pad(
            (rows @ code.basis.to(part.device)).t(), (0, -rows.shape[0] % 8)
        )
        for quantiser, place in code.widths(coordinates.shape[1]):
            sections.append(quantiser.encode(coordinates[place]))
        spare = self.nbytes(part.shape, part.dtype) - sum(section.numel() for section in sections)
        return torch.cat([*sections, rows.new_zeros(spare, dtype=torch.uint8)]), None

    def decode(self, message: Tensor, out: Tensor, peer: int) -> None:
        rows, hidden = size_of_rows(out.shape)
        state = self._state(hidden)
        needed = self.nbytes(out.shape, out.dtype)
        if message.numel() < needed:
            raise PayloadError(f"{rows} rows take {needed} bytes, got {message.numel()}")
        code = state.peers.get(peer)
        if self._sends_directions(state):
            size = self._sizes(hidden).code
            code, message = self._read(message[:size].clone(), hidden), message[size:]
        if code is None:
            raise PayloadError(f"directions of rank {peer} of the group have not arrived")
        mean = message[: 2 * hidden].clone().view(torch.bfloat16).to(torch.float32)
        message = message[2 * hidden :]
        if self.site.training:
            state.arrived[peer] = code
        padded = rows + -rows % 8
        basis = code.basis.to(out.device)
        coordinates = torch.zeros(basis.shape[1], padded, device=out.device)
        for quantiser, place in code.widths(padded):
            count = (place.stop - place.start) * padded
            coordinates[place] = quantiser.decode(message, count).view(place.stop - place.start, padded)
            message = message[quantiser.nbytes(count) :]
        add(out, coordinates[:, :rows].t() @ basis.t() + mean)

    def end_step(self) -> None:
        for state in self._states.values():
            if state.scatter is None and not state.arrived:
                continue
            state.age += 1
            state.peers |= state.arrived
            if state.scatter is not None:
                state.update_covariance()
                if self._sends_directions(state):
                    assert state.covariance is not None
                    state.own = self._code(state.covariance, state.own)
            state.scatter, state.arrived = None, {}

    def state_dict(self) -> dict[str, Any]:
        return {"transform": {hidden: state.state_dict() for hidden, state in self._states.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._states = {}
        for hidden, part in state["transform"].items():
            self._states[hidden] = mine = _State(part["age"], part["covariance"])
            mine.own = None if part["own"] is None else self._read(part["own"], hidden)
            mine.peers = {peer: self._read(code, hidden) for peer, code in part["peers"].items()}

    def _state(self, hidden: int) -> _State:
        return self._states.setdefault(hidden, _State())

    def _sends_directions(self, state: _State) -> bool:
        """Return True if messages of this step carry directions; both ends count alike."""
        return state.age % max(1, min(_BASIS_INTERVAL, state.age // 4)) == 0

    def _sizes(self, hidden: int) -> _Sizes:
        bits = max(1, round(self.config.rate * hidden))
        directions = min(max(1, 3 * bits // 8), hidden)  # of activations half of these bear a bit, or fewer
        return _Sizes(directions, bits, directions + _DIRECTIONS.nbytes(hidden * directions))

    def _code(self, covariance: Tensor, before: _Code | None) -> _Code:
        """Find principal directions and their bits, by block power iteration from those ``before``."""
        hidden, device = covariance.shape[0], covariance.device
        sizes = self._sizes(hidden)
        if not bool(torch.isfinite(covariance).all()):
            covariance = torch.eye(hidden, device=device)
        if before is None:
            basis = _random_basis(self.site.name, hidden, sizes.directions).to(device)
        else:
            basis = before.basis.to(device)
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(covariance @ basis)[0]
        variances, turn = torch.linalg.eigh(basis.t() @ covariance @ basis)
        earned = variances.flip(0).unsqueeze(1) * -torch.tensor(_LEFT, device=device).diff()
        taken = earned.reshape(-1).topk(sizes.bits).indices // _MOST_BITS
        bits = taken.bincount(minlength=sizes.directions).sort(descending=True)[0]
        stored = torch.cat([bits.to(torch.uint8), _DIRECTIONS.encode((basis @ turn).flip(1))])
        return self._read(stored, hidden)

    def _read(self, stored: Tensor, hidden: int) -> _Code:
        """Return the stored form of :meth:`_code` as both ends use it."""
        sizes = self._sizes(hidden)
        bits = stored[: sizes.directions].tolist()
        if sum(bits) != sizes.bits or max(bits) > _MOST_BITS or bits != sorted(bits, reverse=True):
            raise PayloadError(f"bits of {sizes.directions} directions are {bits}, not {sizes.bits} in all")
        basis = _DIRECTIONS.decode(stored[sizes.directions :], hidden * sizes.directions)
        return _Code(stored, basis.view(hidden, sizes.directions), bits)


def _random_basis(name: str, hidden: int, rank: int) -> Tensor:
    """Return an orthonormal basis, fp32 [hidden, rank], that depends on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.linalg.qr(torch.randn(hidden, rank, generator=generator))[0].contiguous()


class _Sizes(NamedTuple):
    directions: int
    bits: int
    """Bits of a row."""
    code: int
    """Bytes of directions and their bits."""


class _Code(NamedTuple):
    stored: Tensor
    """As it crosses, uint8."""
    basis: Tensor
    """fp32 [hidden, directions]"""
    bits: list[int]
    """Bits of each direction, descending."""

    def widths(self, rows: int) -> Iterator[tuple[Quantiser, slice]]:
        """Yield directions with the same number of bits, and the code of ``rows`` coordinates of each."""
        start = 0
        while start < len(self.bits) and self.bits[start]:
            width = self.bits[start]
            count = self.bits.count(width)
            yield Quantiser(width, max(rows, 8)), slice(start, start + count)
            start += count


class _State:
    """The memory of one end for tensors of one hidden size.

    Attributes:
        age: Optimizer steps in which something crossed.
        covariance: fp32 [hidden, hidden], of trace 1, where this end sends.
        own: Directions of this end's messages; None in the first step.
        peers: Directions of the messages it receives, by rank of the group.
        scatter: Scatter matrix of the first message of the step.
        arrived: Directions that arrived in this step; the next ``peers``.
    """

    def __init__(self, age: int = 0, covariance: Tensor | None = None) -> None:
        self.age, self.covariance = age, covariance
        self.own: _Code | None = None
        self.peers: dict[int, _Code] = {}
        self.scatter: Tensor | None = None
        self.arrived: dict[int, _Code] = {}

    def update_covariance(self) -> None:
        """Add the step's covariance to those before; leave out one of NaN, infinity or zeros alone."""
        assert self.scatter is not None
        trace = self.scatter.trace()
        usable = bool(torch.isfinite(self.scatter).all() & (trace > 0))
        if self.covariance is None:
            hidden = self.scatter.shape[0]
            unknown = torch.eye(hidden, device=self.scatter.device) / hidden
            self.covariance = self.scatter / trace if usable else unknown
        elif usable:
            before = self.covariance.to(trace.device)
            self.covariance = before.lerp(self.scatter / trace, 1 - _DECAY)

    def state_dict(self) -> dict[str, Any]:
        return {
            "age": self.age,
            "covariance": None if self.covariance is None else self.covariance.cpu(),
            "own": None if self.own is None else self.own.stored.cpu(),
            "peers": {rank: code.stored.cpu() for rank, code in self.peers.items()},
        }
