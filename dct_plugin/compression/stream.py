"""One tensor stream: threshold, residual, encoding.

Everything that crosses the network passes a stream, becomes a message (most often a
:class:`~dct_plugin.codecs.payload.Payload`), and is a tensor again on the other side. :class:`Compressor` is
the stream of gradients, which keeps what it did not send. That of activations, which drops it, is in
:mod:`dct_plugin.model_parallel`. Below are the few functions that other paths share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..codecs.message import ONE, Key, MessageWriter
from ..codecs.payload import Header, Payload, dense_payload_nbytes, header_bytes
from ..codecs.stats import Stats, Totals, read_stats
from ..codecs.values import ValueDtype
from ..config import DataParallelConfig, KernelConfig
from ..kernels import Backend, Job, Selection, Sums, backend_names, get_backend, serves
from ..kernels.job import GRAD_DTYPES, SMALLEST_TAU, PartedJob, Parts, Tau, refuse_capture
from ..metrics import Record
from .feedback import PackedResidual, Residual, Saved, ScratchBuffers
from .thresholds import Threshold, wanted

#: Multiplier of the position from which a full message is filled; odd and large, so that successive starts
#: spread.
START_STRIDE = 0x9E3779B1
#: The packed types of ``residual_dtype``.
_PACKED = {"bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(slots=True)
class Encoded:
    """The payloads of one tensor (or of its parts).

    Attributes:
        stats: Those of the payloads, in their order.
        numel: Entries of the tensor.
        density: Share of them that was wanted; 1 for what is sent dense, 0 where none was.
        refreshes: Measurements of the threshold that this took.
    """

    stats: list[Stats] = field(default_factory=list)
    numel: int = 0
    density: float = 1.0
    refreshes: int = 0

    def totals(self) -> Totals:
        """Sum the figures of all payloads. Figures on a device are copied to the host in one transfer."""
        if len(self.stats) == 1:  # most often, and every microsecond counts where cores are busy
            return self.stats[0].totals()
        parts = read_stats(self.stats)
        columns = zip((0, 0, 0, False), *(part.counts for part in parts), strict=True)
        nbytes, nnz, above, flagged = map(sum, columns)
        return Totals(nbytes, nnz, above, flagged > 0, max((part.tau for part in parts), default=0.0))

    def record(
        self, cls: str, *, dense_bytes: float, sent_bytes: float, totals: Totals | None = None
    ) -> Record:
        """The metrics' record of it; ``totals`` are its own, where the caller has asked for them."""
        totals = self.totals() if totals is None else totals
        select_ns = encode_ns = 0
        for part in self.stats:
            select_ns += part.select_ns
            encode_ns += part.encode_ns
        return Record(
            cls,
            dense_bytes=round(dense_bytes),
            sent_bytes=round(sent_bytes),
            numel=self.numel,
            nnz=totals.nnz,
            target_density=self.density or totals.nnz / max(self.numel, 1),
            tau=totals.tau,
            refreshes=self.refreshes,
            held_back=totals.above - totals.nnz,
            select_ms=select_ns / 1e6,
            encode_ms=encode_ns / 1e6,
        )


class Stream:
    """The common part of the streams of gradients and of activations.

    Args:
        threshold: How tau is found.
        name: Name in messages.
        kernels: Which kernels run; the defaults when None.
    """

    def __init__(self, threshold: Threshold, *, name: str, kernels: KernelConfig | None) -> None:
        self.name = name
        self.threshold = threshold
        self._kernels = kernels
        self._backend: Backend | None = None

    def backend(self, device: torch.device) -> Backend:
        """Return the kernels in use."""
        if self._backend is None:
            self._backend = get_backend(device, (self._kernels or KernelConfig()).backend)
        return self._backend

    def propose(self, encoded: Encoded, flat: Tensor, residual: Tensor | None = None) -> Tau:
        """Return the threshold for ``flat``."""
        kernels = self._backend or self.backend(flat.device)
        tau, measured = self.threshold.propose(kernels, flat, residual, encoded.density)
        encoded.refreshes = int(measured)
        return tau


def fresh_state(residual: Tensor) -> dict[str, Any]:
    """Return the state of a stream that has a residual, and measures its threshold at its next use."""
    return {"threshold": Threshold().state_dict(), "residual": residual, "shape": None}


class Compressor(Stream):
    """Compressor of one tensor, such as a parameter's gradient; it adds unsent entries to the next one.

    Source: DCT-DP, Gupta et al., KDD 2021, section 3. One pass of a kernel adds the residual, selects and
    encodes entries, and updates the residual. The caller sends the payload.

    Args:
        config: ``data_parallel`` settings; defaults when None.
        name: Name of the stream (the parameter), used in messages and to seed the threshold's sample.
        rank: Rank in the group, seeds the sample too.
        kernels: Which kernels run; the defaults when None.
        transactional: Steps can be undone, see :meth:`end_step`; this needs a second residual.
        scratch: Scratch memory for residuals in bf16 or int8, which streams on one device may share.
        overrides: Single settings over ``config``, for example ``sparsity=0.9``.

    Raises:
        ConfigError: A setting is unknown or out of range.

    Example:
        >>> compressor = Compressor(sparsity=0.99)
        >>> payload = compressor.compress(gradient)       # bytes for the wire; the rest waits in the residual
        >>> received = compressor.decompress(payload)     # fp32, the shape of the gradient
    """

    def __init__(
        self,
        config: DataParallelConfig | None = None,
        *,
        name: str = "tensor",
        rank: int = 0,
        kernels: KernelConfig | None = None,
        transactional: bool = False,
        scratch: ScratchBuffers | None = None,
        **overrides: Any,
    ) -> None:
        if overrides or config is None:
            config = DataParallelConfig.of(None if config is None else config.model_dump(), **overrides)
        threshold = Threshold.of_gradients(name, rank, config.expert)
        super().__init__(threshold, name=name, kernels=kernels)
        self.config = config
        self.schedule = config.schedule
        self.residual: Residual | None = None
        self._transactional = transactional
        self._scratch = scratch
        self._shape: torch.Size | None = None
        self._value_dtype = ValueDtype.parse(config.value_dtype)
        self._saved_threshold: dict[str, Any] | None = None
        self._loaded: Saved | None = None

    def set_value_dtype(self, value_dtype: str | ValueDtype) -> None:
        """Send values in another type from now on."""
        self._value_dtype = ValueDtype.parse(value_dtype)

    # -- the public pair ---

    def compress(self, tensor: Tensor) -> Payload:
        """Encode the entries of ``tensor + residual`` that reach the threshold; the residual keeps the
        others.

        Args:
            tensor: Any shape, fp32, bf16, fp16 (fp64 is rounded to fp32); the same number of entries at every
                call. Left unchanged.

        Returns:
            A payload with memory of its own. When ``tensor`` holds a non-finite entry (or a magnitude of
            ``2**126`` and more) the payload says so, decodes to NaN, and residual and threshold stay bitwise
            as they were.

        Raises:
            TypeError: ``tensor`` is not a floating-point tensor.
            ValueError: The number of entries changed.
        """
        if not tensor.is_floating_point():
            raise TypeError(f"{self.name}: expected a floating-point tensor, got {tensor.dtype}")
        flat = as_flat(tensor)
        writer = MessageWriter(flat.device)
        self.observe(self.encode(flat, writer))
        self._shape = tensor.shape
        return Payload.from_tensor(writer.message.clone(), verify=False)

    def decompress(self, payload: Payload | Tensor) -> Tensor:
        """Decode a payload into an fp32 tensor, with zeros where nothing was sent.

        Returns:
            The shape of the tensors compressed here when the number of entries agrees, else 1-D.

        Raises:
            PayloadError: The payload is malformed.
        """
        if not isinstance(payload, Payload):
            payload = Payload.from_tensor(payload)
        out = torch.zeros(payload.numel, dtype=torch.float32, device=payload.data.device)
        self.backend(out.device).decode_add(payload.data, out)
        return (
            out.view(self._shape) if self._shape is not None and self._shape.numel() == out.numel() else out
        )

    # -- in parts, straight into messages ---

    def encode(
        self,
        grad: Tensor,
        writer: MessageWriter,
        density: float | None = None,
        bounds: Key | None = None,
        receivers: Key = ONE,
        *,
        clear: bool = False,
    ) -> Encoded:
        """Write the payloads of a tensor's parts into the messages of their receivers.

        Each payload is what :meth:`compress` returns, for one part; :meth:`observe` what was written before
        the next call.
        The threshold is that of the whole tensor, the payloads' positions are relative to their part. A part
        that holds a non-finite entry is flagged, and its residual stays as it was; the others are sent.

        Args:
            grad: 1-D contiguous, fp32/bf16/fp16.
            writer: The messages that the payloads are written into.
            density: Share of entries to keep in this step; None follows the stream's own schedule.
            bounds: First entry of each part, and the one behind it; together they cover the tensor once. It
                is one part when None.
            receivers: That of each part.
            clear: Leave zeros in ``grad``.

        Raises:
            DCTError: A CUDA graph is recorded.
        """
        refuse_capture(grad.device)
        numel, step = grad.numel(), self.threshold.step
        encoded = Encoded(numel=numel, density=self.schedule.density(step) if density is None else density)
        if self._transactional and self._saved_threshold is None:
            self._saved_threshold = self.threshold.state_dict()
        residual = self.prepared_residual(numel, grad.device)
        before, after = (None, None) if residual is None else residual.begin()
        dense = encoded.density >= 1.0 or not numel
        tau = 0.0 if dense else self.propose(encoded, grad, before)
        kernels = self._backend or self.backend(grad.device)
        parts = parts_of(bounds, numel, encoded.density, self._value_dtype, kernels.most_kept)
        job = PartedJob(grad, before, tau, after, parts, step * START_STRIDE, clear)
        encoded.stats = kernels.compress_parts(job, writer, receivers)
        if residual is not None and after is not None:
            residual.end(after, step)
        return encoded

    def observe(self, encoded: Encoded, totals: Totals | None = None) -> None:
        """Close the step: the threshold lives on, unless a part was non-finite.

        Args:
            totals: Those of ``encoded``, where the caller has asked for them.
        """
        totals = encoded.totals() if totals is None else totals
        if totals.nonfinite:
            self.threshold.reject()
            return
        if not (self._transactional or self.config.feedback.keeps_residual):
            self.residual = None  # what a run with feedback had left is sent
        if encoded.density < 1.0 and encoded.numel:
            self.threshold.accept(totals.tau)
            self.threshold.observe(totals.above, encoded.numel)
        else:
            self.threshold.step += 1

    def use_residual_memory(self, memory: Tensor) -> None:
        """Keep the residual in ``memory`` of the host (fp32, as many entries as the tensor). Its content
        becomes the residual, unless a state was loaded.
        """
        if self.residual is None or self.residual.current.data_ptr() != memory.data_ptr():
            self.residual = Residual(memory.numel(), memory.device, memory=memory)
            self._adopt_loaded()

    def prepared_residual(self, numel: int, device: torch.device) -> Residual | None:
        """Return the residual, made if need be; None if the configuration keeps none, and nothing is left of
        a run that kept one.
        """
        if self.residual is None:
            if not self.config.feedback.keeps_residual and self._loaded is None:
                return None
            self.residual = self._new_residual(numel, device)
            self._adopt_loaded()
        if self.residual.numel != numel:
            raise ValueError(
                f"{self.name}: the stream has {self.residual.numel} entries, got a tensor of {numel}; one "
                "compressor serves one tensor"
            )
        return self.residual

    # -- optimizer steps ---

    def arm(self) -> None:
        """Keep a second residual from the next step on, so that steps can be undone."""
        self._transactional = True
        if self.residual is not None:
            self.residual.arm()

    def end_step(self, *, skipped: bool = False) -> None:
        """Close an optimizer step. If it was ``skipped``, restore residual and threshold bitwise to the last
        call; a stream that is not transactional loses its residual.
        """
        if skipped and self._saved_threshold is not None:
            self.threshold.load_state_dict(self._saved_threshold)
        self._saved_threshold = None
        if self.residual is not None and skipped:
            self.residual.rollback()
        elif self.residual is not None:
            self.residual.commit()
            if not self.config.feedback.keeps_residual:
                self.residual = None

    def rescale(self, factor: float) -> None:
        """Rescale residual and threshold: the unit of the gradients (loss scale) changed by ``factor``."""
        self.threshold.rescale(factor)
        if self.residual is not None:
            self.residual.rescale(factor)

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Residual (CPU, in its own type), threshold and counters; a resumed run goes on bitwise."""
        return {
            "threshold": self.threshold.state_dict(),
            "residual": self._loaded if self.residual is None else self.residual.saved(),
            "shape": None if self._shape is None else tuple(self._shape),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ValueError: The residual has another number of entries than the stream.
        """
        self.threshold.load_state_dict(state["threshold"])
        self._shape = None if state["shape"] is None else torch.Size(state["shape"])
        self._saved_threshold = None
        self._loaded = state.get("residual")
        self._adopt_loaded()

    # -- inside ---

    def _new_residual(self, numel: int, device: torch.device) -> Residual:
        dtype = _PACKED.get(self.config.residual_dtype)
        if dtype is None:
            return Residual(numel, device, transactional=self._transactional)
        return PackedResidual(
            numel,
            device,
            transactional=self._transactional,
            dtype=dtype,
            kernels=self.backend(device),
            scratch=ScratchBuffers() if self._scratch is None else self._scratch,
            seed=self.threshold.seed,
        )

    def _adopt_loaded(self) -> None:
        if self.residual is not None and self._loaded is not None:
            self.residual.restore(self._loaded)
            self._loaded = None


@functools.lru_cache(maxsize=4096)
def parts_of(
    bounds: Key | None, numel: int, density: float, value_dtype: ValueDtype, most_kept: Callable[..., int]
) -> Parts:
    """Return the parts of a tensor, of which a share is kept, with the room that kernels give them
    (:meth:`.kernels.Backend.most_kept`).
    """
    bounds = Key([(0, numel)]) if bounds is None else bounds
    capacities = []
    for start, stop in bounds:
        kept = most_kept(wanted(density, stop - start), of_part=len(bounds) > 1)
        capacities.append(stop - start if density >= 1.0 else min(stop - start, kept))
    return Parts(bounds, capacities, value_dtype, dense=density >= 1.0 or not bounds[-1][-1])


# -- shared by every path ---


def backend_beside(kernels: KernelConfig | None, device: torch.device) -> Backend:
    """The kernels that the ``kernels`` section asks for (the defaults when None); what ``auto`` takes where
    they serve another device: part of the work on a GPU's tensors is done on the host. Errors are those of
    :func:`.kernels.get_backend`.
    """
    name = (kernels or KernelConfig()).backend
    served = name not in backend_names() or serves(name, device)
    return get_backend(device, name if served else "auto")


def as_flat(tensor: Tensor) -> Tensor:
    """``tensor`` as the kernels read it: detached, 1-D, contiguous; fp32, bf16, fp16 (fp64 is rounded)."""
    flat = tensor if tensor.ndim == 1 and not tensor.requires_grad else tensor.detach().reshape(-1)
    return flat if flat.dtype in GRAD_DTYPES else flat.to(torch.float32)


def wire_dtype(tensor_dtype: torch.dtype, choice: str = "auto", *, dense: bool = False) -> ValueDtype:
    """Type of the values on the wire: ``choice``, or (auto) fp16 for fp16 tensors, else bf16.

    Where everything is sent (``dense``) auto is lossless.
    """
    if choice != "auto":
        return ValueDtype.parse(choice)
    own = ValueDtype.lossless(tensor_dtype)
    return ValueDtype.BF16 if own is ValueDtype.FP32 and not dense else own


def encode_all(
    kernels: Selection,
    flat: Tensor,
    writer: MessageWriter,
    value_dtype: ValueDtype,
    bounds: Key | None = None,
    receivers: Key = ONE,
    *,
    zeros: bool = True,
    clear: bool = False,
) -> Encoded:
    """Write every entry of ``flat`` (:func:`as_flat`) in a type, in payloads of its parts (see
    :meth:`Compressor.encode`).

    Without ``zeros`` every entry but zeros, in one payload; ``clear`` leaves zeros in ``flat``.
    """
    numel = flat.numel()
    if zeros:
        parts = parts_of(bounds, numel, 1.0, value_dtype, kernels.most_kept)
    else:
        parts = Parts.whole(numel, numel, value_dtype)
    job = PartedJob(flat, None, 0.0 if zeros else SMALLEST_TAU, None, parts, clear=clear)
    return Encoded(kernels.compress_parts(job, writer, receivers), numel)


def encode_at(
    kernels: Selection, flat: Tensor, mask: Tensor, value_dtype: ValueDtype
) -> tuple[Tensor, Stats]:
    """Return the message with the values of ``flat`` at the positions of the payload ``mask``, and its
    statistics.

    The message is a dense payload, uint8, of the size that the mask's receiver expects
    (:func:`values_nbytes`).
    """
    values = flat[kernels.positions(mask, flat.numel())]
    message = torch.empty(
        dense_payload_nbytes(values.numel(), value_dtype), dtype=torch.uint8, device=flat.device
    )
    return message, kernels.compress(Job(values, None, 0.0, message, value_dtype=value_dtype))


def values_nbytes(mask: Tensor, value_dtype: ValueDtype) -> int:
    """Return the bytes of the values at the positions of the payload ``mask``."""
    return dense_payload_nbytes(Header.parse(header_bytes(mask), mask.numel()).nnz, value_dtype)


def add_payload(kernels: Sums, payload: Payload | Tensor, out: Tensor) -> None:
    """``out += decoded payload``; ``out`` contiguous, of any floating type."""
    flat = out.view(-1)
    total = flat if flat.dtype == torch.float32 else flat.to(torch.float32)
    kernels.decode_add(payload, total)
    if total is not flat:
        flat.copy_(total)


def add_at(kernels: Backend, payload: Tensor, out: Tensor, mask: Tensor) -> None:
    """Add the values of :func:`encode_at` to ``out``, contiguous, of any floating type.

    Where the tensor of the mask, or the values, overflowed, all of ``out`` becomes NaN.
    """
    flat = out.view(-1)
    # Their headers are read once: on a device the host waits for each.
    positions, sent = (Payload.from_tensor(each, verify=False) for each in (mask, payload))
    at = kernels.positions(positions, flat.numel())
    values = flat[at].to(torch.float32)
    kernels.decode_add(sent, values)
    if positions.nonfinite or sent.nonfinite:
        flat.fill_(torch.nan)
    else:
        flat[at] = values.to(flat.dtype)
