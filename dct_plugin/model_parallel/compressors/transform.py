"""Coordinates in the principal directions, each in as many bits as its variance earns."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...codecs.copies import SideStream, start_to_host, to_device
from ...codecs.planes import GROUP
from ...codecs.quantised import round_rows
from ...compression.stream import backend_beside
from ...config.model_parallel import TransformMethod
from ...errors import PayloadError
from .compressor import ActivationCompressor, Site, add, rows_of, size_of_rows

#: Bits of a direction's entries beyond those of its coordinates.
_MORE_BITS = 2
#: Share of normal values' variance that 0, 1, ... bits leave, at best (Max, IRE Trans. Inf. Theory 1960).
_LEFT = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000869)
_MOST_BITS = len(_LEFT) - 1
#: Weight of the covariance known so far when a step adds its own.
_DECAY = 0.8
#: Steps of the power iteration, from random directions and from those of before.
_ITERATIONS, _MORE_ITERATIONS = 4, 2
#: Most steps from one set of directions that crosses to the next.
_BASIS_INTERVAL = 10


class Transformed(ActivationCompressor[TransformMethod]):
    """Rows X [rows, hidden] cross as their mean m and the coordinates of X - m in some directions.

    Transform coding (Huang and Schultheiss, IEEE Trans. Commun. Syst. 1963): a row takes ``rate`` times
    ``hidden`` bits, of which a direction has as many as lower the squared error most, 8 to none. Directions
    are the principal ones by the covariance of the last steps' first messages. They cross, with their bits,
    in every step at first, then ever less often, at last in every tenth step. A direction that is used finely
    is written finely; coordinates are those of least squares in the directions as they are written. Gradients
    pass straight through and have directions of their own: what they say outside those of the activations is
    what lets new ones grow.

    The host waits for nothing: bits stay on the device. Directions that arrive damaged decode to NaN, and
    raise a :class:`~dct_plugin.errors.PayloadError` in :meth:`end_step`.
    """

    def __init__(self, config: Any, site: Site, name: str = "") -> None:
        super().__init__(config, site, name)
        self._states: dict[int, _State] = {}  # by hidden
        self._side = SideStream()

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        rows, hidden = size_of_rows(shape)
        sizes = self._sizes(hidden)
        head = sizes.code if self._sends_directions(self._state(hidden)) else 0
        return head + 2 * hidden + _nbytes(sizes.directions, sizes.bits, rows)

    def encode_one(self, part: Tensor) -> tuple[Tensor, None]:
        rows = rows_of(part)
        state = self._state(part.shape[-1])
        mean = (rows.sum(dim=0) / max(rows.shape[0], 1)).to(torch.bfloat16)
        rows = rows - mean.to(torch.float32)
        if self.site.training and state.scatter is None:
            state.scatter = rows.t() @ rows
        self._side.join()
        if state.own is None:  # before a step is over, every message has directions of its own
            code = self._fitted(rows.t() @ rows, None)
        else:
            code = state.own = state.own.on(part.device)
        head = [code.stored] if self._sends_directions(state) else []
        written = self._write(code.dual.t() @ rows.t(), code.bits, self._sizes(part.shape[-1]).bits)
        return torch.cat([*head, mean.view(torch.uint8), written]), None

    def decode(self, message: Tensor, out: Tensor, peer: int) -> None:
        rows, hidden = size_of_rows(out.shape)
        state, sizes = self._state(hidden), self._sizes(hidden)
        needed = self.nbytes(out.shape, out.dtype)
        if message.numel() < needed:
            raise PayloadError(f"{rows} rows take {needed} bytes, got {message.numel()}")
        code = state.peers.get(peer)
        if self._sends_directions(state):
            code, valid = self._read_code(message[: sizes.code].clone(), hidden)
            state.valid[peer] = start_to_host(valid)
            message = message[sizes.code :]
        if code is None:
            raise PayloadError(f"directions of rank {peer} of the group have not arrived")
        code = code.on(out.device)
        if self.site.training:
            state.arrived[peer] = code
        mean = message[: 2 * hidden].clone().view(torch.bfloat16).to(torch.float32)
        coordinates = self._read(message[2 * hidden :], code.bits, sizes.bits, rows)
        add(out, coordinates.t() @ code.basis.t() + mean)

    def end_step(self) -> None:
        for state in self._states.values():
            for peer, valid in state.valid.items():
                if not bool(valid()):
                    raise PayloadError(f"{self.name}: directions of rank {peer} of the group are damaged")
            state.valid = {}
            if state.scatter is None and not state.arrived:
                continue
            state.age += 1
            state.peers |= state.arrived
            if state.scatter is not None:
                with self._side.queue(state.scatter, *(state.own or ())):
                    covariance = state.update_covariance(state.scatter)
                    if self._sends_directions(state):
                        state.own = self._fitted(covariance, state.own)
            state.scatter, state.arrived = None, {}

    def state_dict(self) -> dict[str, Any]:
        self._side.join()
        return {"directions": {hidden: state.state_dict() for hidden, state in self._states.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._states = {}
        for hidden, part in state["directions"].items():
            self._states[hidden] = mine = _State(part["age"], part["covariance"])
            if part["own"] is not None:
                mine.own = self._read_code(part["own"], hidden)[0].for_sending()
            mine.peers = {peer: self._read_code(code, hidden)[0] for peer, code in part["peers"].items()}

    def _state(self, hidden: int) -> _State:
        return self._states.setdefault(hidden, _State())

    def _sends_directions(self, state: _State) -> bool:
        """Return True if messages of this step carry directions; both ends count alike."""
        return state.age % max(1, min(_BASIS_INTERVAL, state.age // 4)) == 0

    def _sizes(self, hidden: int) -> _Sizes:
        bits = max(1, round(self.config.rate * hidden))
        directions = min(max(1, 3 * bits // 10), hidden)  # most of which bear a bit
        code = directions + _nbytes(directions, bits + _MORE_BITS * directions, hidden)
        return _Sizes(directions, bits, code)

    # -- numbers: rows of few bits, with a step of bf16 each, then their bit planes ---

    def _write(self, x: Tensor, bits: Tensor, total: int) -> Tensor:
        """Write ``x``, fp32 [directions, n], in ``bits`` (int64 [directions], ``total`` in all) each."""
        x = torch.nn.functional.pad(x, (0, _groups(x.shape[1]) * GROUP - x.shape[1]))
        numbers, steps = round_rows(x, bits)
        groups = torch.full_like(bits, x.shape[1] // GROUP)
        kernels = backend_beside(self.site.kernels, x.device)
        planes = kernels.planes.pack(numbers.view(-1, GROUP), bits, groups, total * x.shape[1] // GROUP)
        return torch.cat([steps.to(torch.bfloat16).view(-1).view(torch.uint8), planes])

    def _read(self, data: Tensor, bits: Tensor, total: int, n: int) -> Tensor:
        """Read what :meth:`_write` wrote; more bytes may follow. Return fp32 [directions, n]."""
        count, groups = len(bits), _groups(n)
        steps = data[: 2 * count].clone().view(torch.bfloat16).to(torch.float32).unsqueeze(1)
        planes = data[2 * count : 2 * count + total * groups]
        kernels = backend_beside(self.site.kernels, data.device)
        numbers = kernels.planes.unpack(planes, bits, torch.full_like(bits, groups), count * groups)
        return (numbers.view(count, -1)[:, :n] + 0.5) * steps

    # -- directions ---

    def _fitted(self, covariance: Tensor, before: _Code | None) -> _Code:
        """Find principal directions and their bits, by block power iteration from those ``before``."""
        hidden, device = covariance.shape[0], covariance.device
        sizes = self._sizes(hidden)
        unknown = torch.eye(hidden, device=device, dtype=torch.float32)
        covariance = torch.where(torch.isfinite(covariance).all(), covariance, unknown)
        if before is None:
            generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
            basis = to_device(
                torch.randn(hidden, sizes.directions, generator=generator, dtype=torch.float32, device="cpu"),
                device,
            )
        else:
            basis = before.on(device).basis
        for _ in range(_ITERATIONS if before is None else _MORE_ITERATIONS):
            basis = torch.linalg.qr(covariance @ basis)[0]
        variances = ((covariance @ basis) * basis).sum(dim=0).clamp_min(0.0)
        earned = variances.unsqueeze(1) * -to_device(
            torch.tensor(_LEFT, dtype=torch.float32, device="cpu").diff(), device
        )
        taken = earned.reshape(-1).topk(sizes.bits).indices // _MOST_BITS
        bits = torch.zeros(sizes.directions, dtype=torch.int64, device=device)
        bits.index_add_(0, taken, torch.ones_like(taken))
        total = sizes.bits + _MORE_BITS * sizes.directions
        written = self._write(basis.t(), bits + _MORE_BITS, total)
        return self._read_code(torch.cat([bits.to(torch.uint8), written]), hidden)[0].for_sending()

    def _read_code(self, stored: Tensor, hidden: int) -> tuple[_Code, Tensor]:
        """Return the stored form of :meth:`_fitted` as both ends use it, and whether it is valid, bool [].

        An invalid one has directions of NaN.
        """
        sizes = self._sizes(hidden)
        bits = stored[: sizes.directions].to(torch.int64)
        valid = (bits.sum() == sizes.bits) & (bits.max() <= _MOST_BITS)
        others = sizes.bits - _MOST_BITS * torch.arange(sizes.directions, device=bits.device)
        bits = torch.where(valid, bits, others.clamp(0, _MOST_BITS))
        total = sizes.bits + _MORE_BITS * sizes.directions
        basis = self._read(stored[sizes.directions :], bits + _MORE_BITS, total, hidden).t()
        return _Code(stored, torch.where(valid, basis, torch.nan), bits, basis), valid


def _groups(n: int) -> int:
    return max(1, -(-n // GROUP))


def _nbytes(directions: int, bits: int, n: int) -> int:
    """Return the bytes of ``n`` numbers of each direction, with ``bits`` bits in all."""
    return 2 * directions + bits * _groups(n)


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
    bits: Tensor
    """Bits of each direction, int64."""
    dual: Tensor
    """fp32 [hidden, directions]: X times it are the coordinates of X by least squares, at the sender."""

    def on(self, device: torch.device) -> _Code:
        """Return the code on a device."""
        same = self.bits.device == device
        return self if same else _Code(*(to_device(each, device) for each in self))

    def for_sending(self) -> _Code:
        """Return the code with its ``dual``."""
        gram = self.basis.t() @ self.basis
        gram.diagonal().add_(1e-3)
        factor = torch.linalg.cholesky_ex(gram)[0]  # the one that does not wait
        return self._replace(dual=torch.cholesky_solve(self.basis.t(), factor).t())


class _State:
    """The memory of one end for tensors of one hidden size.

    Attributes:
        age: Optimizer steps in which something crossed.
        covariance: fp32 [hidden, hidden], of trace 1, where this end sends.
        own: Directions of this end's messages; None in the first step.
        peers: Directions of the messages it receives, by rank of the group.
        scatter: Scatter matrix of the first message of the step.
        arrived: Directions that arrived in this step; the next ``peers``.
        valid: Whether they are what a sender may send, by rank; copies to the host that were started.
    """

    def __init__(self, age: int = 0, covariance: Tensor | None = None) -> None:
        self.age, self.covariance = age, covariance
        self.own: _Code | None = None
        self.peers: dict[int, _Code] = {}
        self.scatter: Tensor | None = None
        self.arrived: dict[int, _Code] = {}
        self.valid: dict[int, Callable[[], Tensor]] = {}

    def update_covariance(self, scatter: Tensor) -> Tensor:
        """Add the step's covariance to those before, and return it; leave out one of NaN, infinity or zeros
        alone.
        """
        trace, hidden = scatter.trace(), scatter.shape[0]
        usable = torch.isfinite(scatter).all() & (trace > 0)
        known, unknown = self.covariance, torch.eye(hidden, device=trace.device, dtype=torch.float32) / hidden
        before = unknown if known is None else to_device(known, trace.device)
        after = before.lerp(scatter / trace, 1.0 if known is None else 1 - _DECAY)
        self.covariance = torch.where(usable, after, before)
        return self.covariance

    def state_dict(self) -> dict[str, Any]:
        return {
            "age": self.age,
            "covariance": None if self.covariance is None else self.covariance.cpu(),
            "own": None if self.own is None else self.own.stored.cpu(),
            "peers": {rank: code.stored.cpu() for rank, code in self.peers.items()},
        }
