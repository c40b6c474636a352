"""What every kernel backend offers, and the argument checks they share.

The host never has to wait for a kernel between two tensors. Thresholds may stay on the device, from
:meth:`Backend.sample_threshold` into :meth:`Backend.compress`; so may the :class:`~dct_plugin.codecs.Stats`
that come back, which :func:`~dct_plugin.codecs.read_stats` or :func:`~dct_plugin.codecs.read_messages` read
for all tensors of a collective at once. What the host needs in between, the room for a payload, follows from
``numel`` and ``capacity`` alone (:func:`~dct_plugin.codecs.payload_bound`).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..codecs.index import CODECS, MAX_NUMEL, NO_POSITIONS, IndexEncoding
from ..codecs.message import MessageWriter
from ..codecs.payload import Header, Payload, check_numel, parse_payload, payload_bound, verify_checksum
from ..codecs.stats import Stats
from ..codecs.values import ValueDtype
from ..errors import PayloadError

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_TAU = float(torch.finfo(torch.float32).tiny)  # smallest positive normal fp32
#: Entries of a residual in int8 that share an exponent, see :meth:`Backend.pack`.
PACK_BLOCK = 64
#: The smallest and the largest of these.
PACK_EXPONENTS = (-112, 121)
Tau: TypeAlias = float | Tensor
"""A threshold: on the host, or fp32 [] on the gradient's device."""


class Backend(Protocol):
    """The hot loops. All tensors are 1-D, contiguous and on one device; the residual is fp32.

    Every backend writes the same bytes, residuals and decoded values, bit for bit. A payload is given as a
    uint8 tensor, or as a :class:`~dct_plugin.codecs.Payload`, whose header the host knows already.
    """

    name: str

    def compress(
        self,
        grad: Tensor,
        residual: Tensor | None,
        tau: Tau,
        out: Tensor,
        *,
        residual_out: Tensor | None = None,
        capacity: int | None = None,
        start: int = 0,
        value_dtype: int = ValueDtype.FP32,
        encoding: int | None = None,
        clear: bool = False,
    ) -> Stats:
        """Error feedback, selection and encoding in one go (DCT, Gupta et al., KDD 2021, section 3).

        ``acc = float32(grad) + residual``; entries with ``|acc| >= tau`` are kept, at most ``capacity`` of
        them, taken in positional order beginning at ``start`` and wrapping around. The payload goes to
        ``out[:nbytes]``; ``residual_out`` becomes ``acc - decoded value`` where kept and ``acc`` elsewhere.

        Args:
            grad: fp32, bf16 or fp16 [numel]; left alone, unless ``clear``.
            residual: fp32 [numel], finite; None: no error feedback (zeros).
            tau: threshold > 0, may be inf; the number 0 sends every entry (dense, ``capacity`` ignored). A
                tensor is not read: it is taken to be positive and raised to :data:`SMALLEST_TAU`.
            out: uint8, at least ``payload_bound(numel, capacity, value_dtype, encoding)`` bytes.
            residual_out: fp32 [numel], either ``residual`` itself (default) or apart from it.
            encoding: force an index encoding (tests, benchmarks).
            clear: leave zeros in ``grad``, where the sum of all ranks can be added up then
                (:meth:`sum_messages`).
        Raises:
            ValueError, TypeError: arguments that do not fit each other; nothing has been changed then.
        If ``grad`` holds a non-finite entry or one of magnitude >= 2**126, ``residual_out`` gets the old
        residual bitwise and the payload is flagged: it decodes to NaN in every entry.
        """
        ...

    def decode_add(self, payload: Payload | Tensor, out: Tensor) -> int:
        """``out[index] += value``; ``out`` is fp32 [numel]. Returns nnz.

        Raises:
            PayloadError: the payload is not valid, or not of ``out.numel()`` entries; ``out`` is untouched
                then.
        """
        ...

    def sum_messages(self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float = 1.0) -> None:
        """``outs[i] = scale * sum of the messages' i-th payloads``, in fp32, in the order of the messages.

        A flagged payload makes all of its ``outs[i]`` NaN. ``scale`` may be multiplied in before the sum
        where that changes no bit of a normal number (powers of 2). The time it takes depends on what the
        payloads hold, not on the size of ``outs``.

        Args:
            messages: uint8; ``len(outs)`` payloads each, one behind the other.
            outs: fp32, bf16 or fp16 [numel], zeros on entry (:meth:`compress` leaves them); each is rounded
                once.
        Raises:
            PayloadError: a payload is not valid, or not of ``outs[i].numel()`` entries; ``message`` tells
                which. Some of ``outs`` may have been written.
        """
        ...

    def decode_mask(self, payload: Payload | Tensor, numel: int) -> Tensor:
        """Which entries a payload keeps, bool [numel]. Raises :class:`PayloadError`."""
        ...

    def encode_shared(
        self, source: Tensor, index_payload: Payload | Tensor, value_dtype: int, out: Tensor
    ) -> Stats:
        """Values of ``source`` (fp32, bf16 or fp16 [numel]) at the positions of an earlier payload, without
        the positions.

        ``out``: uint8, at least ``payload_bound(numel, nnz, value_dtype, IndexEncoding.SHARED_MASK)`` bytes.
        Only the entries that are sent are checked for overflow; an earlier payload that is flagged non-finite
        makes this one so too.
        """
        ...

    def decode_shared_add(
        self, payload: Payload | Tensor, index_payload: Payload | Tensor, out: Tensor
    ) -> int:
        """:meth:`decode_add` for a payload of :meth:`encode_shared`, at ``index_payload``'s positions."""
        ...

    def sample_threshold(
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> Tau:
        """Threshold that keeps about ``keep_fraction`` of ``|grad + residual|``, from ``num_samples`` random
        positions.

        Exact over all entries when ``num_samples >= numel``. Non-finite entries are ignored; the result is
        never below the smallest positive normal fp32 number.
        """
        ...

    def exact_threshold(self, grad: Tensor, residual: Tensor | None, k: int) -> Tau:
        """The ``k``-th largest ``|grad + residual|``; non-finite and tiny as in :meth:`sample_threshold`."""
        ...

    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        """Round a residual to a smaller type, stochastically: in expectation nothing changes.

        bf16: to one of the two numbers beside the entry. int8: to a multiple of ``2**exponent``, the smallest
        power of two of which 127 reach the largest of the :data:`PACK_BLOCK` entries that share it; for the
        expectation, entries count as multiples of ``2**(exponent - 15)``. What :meth:`unpack` gives is packed
        to the same values again, whatever the seed.

        Args:
            values: fp32 [numel], no NaN; beyond ``127 * 2**121`` they are cut.
            out: bf16 or int8 [numel].
            exponents: int8 [ceil(numel / PACK_BLOCK)], in [-112, 121]; None for bf16.
            seed: Of the random numbers, which depend on it and on the position alone.
        Raises:
            ValueError, TypeError: arguments that do not fit each other.
        """
        ...

    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        """The values (fp32) that :meth:`pack` wrote, exactly."""
        ...

    def accumulate(
        self, grad: Tensor, velocity: Tensor, momentum: float, kept: Tensor, *, clear: bool = False
    ) -> Tensor:
        """``momentum * velocity + grad``, fp32, rounded twice, in memory of its own (momentum correction; Lin
        et al., ICLR 2018, section 3.2).

        Args:
            grad: fp32, bf16 or fp16 [numel]; left alone, unless ``clear``.
            velocity: fp32 [numel].
            kept: fp32 [numel], ``velocity`` itself or apart from it: becomes the sum, or the velocity as it
                was where :meth:`compress` would refuse the sum.
            clear: leave zeros in ``grad``.
        """
        ...

    def difference(self, wanted: Tensor, held: Tensor, out: Tensor) -> None:
        """``out = wanted - held``, fp32; ``wanted`` is rounded to the type of ``held`` before.

        Args:
            wanted, held: Of any floating-point types, [numel].
            out: fp32 [numel], apart from both.
        """
        ...

    def encode_indices(
        self, idx: Tensor, numel: int, encoding: int | None = None
    ) -> tuple[IndexEncoding, int, Tensor]:
        """See :func:`dct_plugin.codecs.index.encode_indices`."""
        ...

    def decode_indices(self, encoding: int, param: int, data: Tensor, nnz: int, numel: int) -> Tensor:
        """See :func:`dct_plugin.codecs.index.decode_indices`."""
        ...


@runtime_checkable
class Framing(Protocol):
    """What a :class:`Backend` offers besides whose payloads' sizes stay on the device: messages in frames
    (:mod:`dct_plugin.codecs.frames`), of which the host knows neither size nor content.
    """

    def write_frame(
        self, writer: MessageWriter, out: Tensor, fingerprint: int, incomplete: Tensor | None = None
    ) -> None:
        """Put the message of ``writer``, of which no figure was read, into a frame, as far as it fits.

        Args:
            out: uint8, the frame, which begins at a multiple of 8 bytes.
            fingerprint: of the operation.
            incomplete: int64 [], for the frame's word of that name; 0 when None.
        """
        ...

    def sum_frames(
        self, buffer: Tensor, bounds: Sequence[tuple[int, int]], outs: Sequence[Tensor], scale: float
    ) -> tuple[Tensor, Tensor]:
        """:meth:`Backend.sum_messages` for messages in frames. A frame that does not hold its message makes
        all outputs NaN.

        Args:
            buffer: uint8, with the frames.
            bounds: first byte of each (a multiple of 8), and the one behind it.
            outs, scale: as there.

        Returns:
            int32 [frames]: what is wrong with a message (:data:`~dct_plugin.codecs.stats.KERNEL_ERRORS`; 0:
            nothing), of which payloads are not added then; int64 [frames]: 1 where it is not there.
        """
        ...

    def add_frame(
        self, buffer: Tensor, bounds: tuple[int, int], outs: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Add the message in one frame to ``outs`` (fp32, bf16 or fp16 [numel]), which hold anything: each
        entry's sum is formed in fp32 and rounded. A frame that does not hold its message leaves them alone.

        Returns:
            As of :meth:`sum_frames`.
        """
        ...


@runtime_checkable
class Batching(Protocol):
    """What a :class:`Backend` offers besides that writes the payloads of many tensors with a fixed number of
    launches.
    """

    def together(self) -> AbstractContextManager[None]:
        """What this thread compresses and samples in the block is done when it ends, or when a figure is read
        or another kernel called that may need it: neither tensors nor payloads are to be touched until then.
        """
        ...


def together(backend: Backend) -> AbstractContextManager[None]:
    """:meth:`Batching.together`, where there is such a thing."""
    return backend.together() if _batches(type(backend)) else nullcontext()  # type: ignore[attr-defined]


@functools.cache
def _batches(kind: type) -> bool:
    return issubclass(kind, Batching)


class CompressArgs(NamedTuple):
    """Checked and normalised arguments of :meth:`Backend.compress`."""

    numel: int
    tau: Tau  # exactly representable in fp32; of a device as it is, see applied()
    dense: bool
    capacity: int
    start: int
    value_dtype: ValueDtype
    encoding: IndexEncoding | None
    residual_out: Tensor | None

    def applied(self) -> Tau:
        """The threshold that entries are compared with."""
        return self.tau.clamp(min=SMALLEST_TAU) if isinstance(self.tau, Tensor) else self.tau


def check_vector(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int | None = None
) -> None:
    """Raise unless ``tensor`` is a contiguous vector of one of ``dtypes`` (and ``numel`` entries)."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(d) for d in dtypes)
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {allowed}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and 1-D, got shape {tuple(tensor.shape)}")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} entries, expected {numel}")


def check_out(out: Tensor, needed: int) -> None:
    check_vector("out", out, (torch.uint8,))
    if out.numel() < needed:
        raise ValueError(f"out has {out.numel()} bytes, this payload may need {needed}")


def check_compress(
    grad: Tensor,
    residual: Tensor | None,
    tau: Tau,
    out: Tensor,
    residual_out: Tensor | None,
    capacity: int | None,
    start: int,
    value_dtype: int,
    encoding: int | None,
) -> CompressArgs:
    check_pair(grad, residual)
    numel = grad.numel()
    if numel > MAX_NUMEL:
        raise ValueError(f"grad has {numel} entries, a payload holds at most {MAX_NUMEL}")
    if residual_out is None:
        residual_out = residual
    elif residual_out is not residual:
        check_vector("residual_out", residual_out, (torch.float32,), numel)
    tau, dense = _check_tau(tau)
    vt = ValueDtype.parse(value_dtype)
    enc = None if encoding is None else IndexEncoding.parse(encoding)
    # Some entries may or may not be kept: the encoding has to hold any number of them, none for example.
    if enc is not None and not CODECS[enc].can_hold(numel if dense else 0, numel):
        raise ValueError(f"index encoding {enc.label} cannot be forced here")
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity is {capacity}; it must be at least 0")
    limit = numel if dense or capacity is None else min(int(capacity), numel)
    check_out(out, payload_bound(numel, limit, vt, enc))
    device = grad.device
    for other in (residual, residual_out, out, tau):
        if isinstance(other, Tensor) and other.device != device:
            raise ValueError(f"grad is on {grad.device}, another argument on {other.device}")
    return CompressArgs(numel, tau, dense, limit, int(start) % max(numel, 1), vt, enc, residual_out)


def _check_tau(tau: Tau) -> tuple[Tau, bool]:
    """The threshold, and whether it sends everything; a tensor is not read."""
    if isinstance(tau, Tensor):
        if tau.dtype != torch.float32 or tau.dim():
            raise ValueError(f"tau must be a number or fp32 [], got {tau.dtype} of shape {tuple(tau.shape)}")
        return tau, False
    if not tau >= 0:
        raise ValueError(f"tau is {tau}; it must be 0 (send everything) or positive")
    return (max(ctypes.c_float(tau).value, SMALLEST_TAU), False) if tau else (0.0, True)


def check_pair(grad: Tensor, residual: Tensor | None) -> None:
    check_vector("grad", grad, GRAD_DTYPES)
    if residual is not None:
        check_vector("residual", residual, (torch.float32,), grad.numel())


def check_sample(grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int) -> None:
    check_pair(grad, residual)
    if not 0 < keep_fraction <= 1:
        raise ValueError(f"keep_fraction is {keep_fraction}; it must be in (0, 1]")
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; it must be at least 1")


def check_exact(grad: Tensor, residual: Tensor | None, k: int) -> None:
    check_pair(grad, residual)
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")


def check_accumulate(grad: Tensor, velocity: Tensor, kept: Tensor) -> None:
    check_pair(grad, velocity)
    check_vector("kept", kept, (torch.float32,), grad.numel())


def check_difference(wanted: Tensor, held: Tensor, out: Tensor) -> None:
    for name, tensor in (("wanted", wanted), ("held", held)):
        check_vector(name, tensor, (*GRAD_DTYPES, torch.float64), out.numel())
    check_vector("out", out, (torch.float32,))


def check_pack(values: Tensor, packed: Tensor, exponents: Tensor | None) -> None:
    numel = values.numel()
    check_vector("values", values, (torch.float32,))
    check_vector("packed", packed, (torch.bfloat16, torch.int8), numel)
    if (exponents is None) != (packed.dtype == torch.bfloat16):
        raise ValueError(f"{packed.dtype} {'needs' if exponents is None else 'has no'} exponents")
    if exponents is not None:
        check_vector("exponents", exponents, (torch.int8,), -(-numel // PACK_BLOCK))


def open_payload(payload: Payload | Tensor, numel: int, *, verify: bool = True) -> Payload:
    """``payload`` with its header, checked; ``verify=False`` leaves the checksum to the kernel.

    Raises:
        PayloadError: the payload is not valid, or not of ``numel`` entries.
    """
    if not isinstance(payload, Payload):
        return Payload(payload, parse_payload(payload, numel, verify=verify))
    check_numel(payload.header, numel)
    if verify:
        verify_checksum(payload.header, payload.data)
    return payload


def open_positions(payload: Payload | Tensor, numel: int, *, verify: bool = True) -> Payload:
    """:func:`open_payload` for one that has to hold its own positions."""
    opened = open_payload(payload, numel, verify=verify)
    if opened.header.encoding is IndexEncoding.SHARED_MASK:
        raise PayloadError(NO_POSITIONS)
    return opened


def split_message(messages: Sequence[Tensor], which: int, outs: Sequence[Tensor]) -> list[Payload]:
    """The payloads of ``messages[which]``, which has to hold one for each of ``outs``; checksums are left to
    the kernel.

    Raises:
        PayloadError: it does not.
    """
    with naming_message(which):
        payloads = Payload.split(messages[which], verify=False)
        if len(payloads) != len(outs):
            raise PayloadError(f"the message holds {len(payloads)} payloads, expected {len(outs)}")
        for payload, out in zip(payloads, outs, strict=True):
            check_numel(payload.header, out.numel())
        return payloads


@contextmanager
def naming_message(which: int) -> Iterator[None]:
    """A :class:`PayloadError` of the block is about message ``which``."""
    try:
        yield
    except PayloadError as error:
        error.message = which
        raise


def scales_first(messages: int, scale: float) -> bool:
    """Whether :meth:`Backend.sum_messages` may multiply before it adds: no bit of a normal number changes."""
    return messages == 1 or math.frexp(scale)[0] == 0.5


def check_encode_shared(
    source: Tensor, index_payload: Payload | Tensor, value_dtype: int, out: Tensor, *, verify: bool = True
) -> tuple[Payload, Header]:
    """Check the arguments of :meth:`Backend.encode_shared`.

    Returns:
        the payload of the mask, and the header to write if no value that is sent overflows.
    """
    check_vector("source", source, GRAD_DTYPES)
    vt = ValueDtype.parse(value_dtype)
    mask = open_positions(index_payload, source.numel(), verify=verify)
    check_out(out, payload_bound(mask.numel, mask.nnz, vt, IndexEncoding.SHARED_MASK))
    if mask.nonfinite:
        return mask, Header.flagged(vt, mask.numel)
    return mask, Header(IndexEncoding.SHARED_MASK, vt, False, 0, mask.numel, mask.nnz, 0)


def check_shared(payload: Payload, mask: Payload) -> None:
    """Raise :class:`PayloadError` unless a shared-mask payload fits the payload its mask comes from."""
    if payload.header.encoding is not IndexEncoding.SHARED_MASK:
        raise PayloadError(f"payload has encoding {payload.encoding}, expected shared_mask")
    if mask.nonfinite:
        raise PayloadError("the payload given for the mask is flagged non-finite and holds no positions")
    if mask.nnz != payload.nnz:
        raise PayloadError(f"payload has {payload.nnz} values, the mask {mask.nnz} positions")
