"""Step-ahead error feedback: gradients are taken where the weights will be once the residual has arrived.

Source: Xu, Huo, Huang, *Step-Ahead Error Feedback for Distributed Training with Compressed Gradient*, AAAI
2021. Under error feedback a rank takes its gradient at weights that lack what it has not sent: up to a
hundred steps' worth at 99 % sparsity. Adam and momentum lose quality by that delay. So forward and backward
passes run at displaced weights:

    w - coefficient * (the step that the optimizer would make with this rank's residual)

The optimizer, checkpoints and evaluation keep ``w``. Let E be the residual. Then the step is

- ``lr * E / (1 - mu)`` for SGD with momentum mu;
- ``lr * E / (s * sqrt(D) + eps)`` for the Adam family. D is the second moment of this rank's *dense*
  gradients (:mod:`.second_moments`). The optimizer gets the mean gradient of the ranks, which has less noise.
  So s is the size of the mean gradient relative to the own one (:mod:`.residual_coefficients`); between few
  ranks it is 1.

D must not come from the optimizer's own state: that one sees thresholded gradients, and with it training
diverged. Both E and D are in the unit of the gradients that reach the stream (loss scale, division by the
number of ranks), so their ratio has no unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...compression.feedback import ScratchBuffers
from ...console import listed, log_once, logger
from ...errors import ConfigError
from ...kernels import Residuals
from ...kernels.displacement import Displacement
from ...kernels.job import part_of
from ...kernels.reference import ReferenceBackend
from ...policy.rules import FEW_COMPRESSORS
from ..add_on import AddOn, ReducerContext
from ..passes import register, remove, unregister
from ..plan import Entries, Part, PlannedTensor, ReductionPlan, Shard, common
from ..step_units import StepUnit
from .displaced_weights import Coverage, DisplacedWeights, Event, State, TrainingPasses
from .residual_coefficients import INTERVAL, ResidualCoefficients
from .second_moments import Moments, SecondMoments, is_dense

if TYPE_CHECKING:
    from ..nodes.ranks import NodeRanks

#: Agreement of the ranks' residuals below which their data are of different kinds. Two ranks with two texts
#: had 0.6 (docs/quality.md#data-that-differ-between-ranks).
LEAST_AGREEMENT = 0.8
#: The greatest factor by which an owner multiplies what it holds back (see :class:`StepAhead`). With the
#: number of ranks as the factor the mean of the displacements is exact. But a larger displacement disturbs
#: the owner's own gradient in second order, in proportion to the factor. At eight ranks 8 lost a third less
#: than 4 (docs/quality.md#many-compressors).
MAX_OWNER_FACTOR = 8


def displacement(
    weight: Tensor,
    expected: tuple[Tensor | None, float],
    moments: Moments | None,
    unit: StepUnit,
    *,
    gradient_unit: float = 1.0,
    first: int = 0,
    ratio: float = 1.0,
    update: tuple[Tensor, int, int] | None = None,
    out: Tensor,
) -> Displacement:
    """Return what sets ``out`` to ``weight - (the optimizer's step with coefficient * residual) + factor *
    update``; for :meth:`.kernels.Backend.displace`.

    Entries without residual and update are bitwise those of ``weight``. With a second moment the step
    of an entry is at most the learning rate times the coefficient times :meth:`Moments.limit`.

    Args:
        weight: 1-D, of any floating type, contiguous.
        expected: A residual, fp32 [numel] in the unit of the stream's gradients (None for none), and its
            coefficient.
        moments: Second moments of the stream's gradients; needed for preconditioned units.
        unit: Unit of the optimizer's steps.
        gradient_unit: Factor from the stream's gradients to the optimizer's (one over the loss scale).
        first: First entry of the weight among those of ``moments``.
        ratio: Size of the ranks' mean gradient, by which the optimizer divides, relative to the stream's.
        update: An update (fp32) that a part of the weights has not got yet, its first entry, and its factor.
        out: A tensor like ``weight``.
    """
    residual, coefficient = expected
    scale = -unit.lr * coefficient
    if not unit.preconditioned or residual is None:
        return Displacement(weight, out, residual, scale * gradient_unit, pending=update)
    assert moments is not None
    moment = moments.moment(unit, gradient_unit=gradient_unit, first=first, ratio=ratio)
    return Displacement(weight, out, residual, scale, moment, moments.limit(unit.decay), update)


class Unsent(NamedTuple):
    """Functions that return what this rank has not sent of a stream so far.

    The tensors may share memory with those of the next call: read them before it.

    Attributes:
        residual: Returns the residual of a stream (fp32 [numel]): before this step, if a step can be taken
            back, else as it is. None if it keeps none.
        owner_residuals: Takes a stream and its number of entries. Yields each part of the ranks' *sum* that
            this rank owns, and the residual of that part (fp32): what this rank has not sent back of the sum.
        pending: Returns the part of the stream's weights that this rank owns, and the updates that it has not
            sent to the other ranks (fp32, in the weights' unit); None if there are none.
        lasting: True if ``residual`` returns the memory in which a residual is kept, not a copy.
        newest: Returns the residual as it is; None: ``residual`` does.
        in_memory_order: True if the entries of a tensor that is dense but not contiguous (``channels_last``)
            are in the order of the parameter's memory.
    """

    residual: Callable[[str], Tensor | None]
    owner_residuals: Callable[[str, int], Iterable[tuple[Shard, Tensor]]] = lambda *_: ()
    pending: Callable[[str], tuple[Shard, Tensor] | None] = lambda _: None
    lasting: bool = False
    newest: Callable[[str], Tensor | None] | None = None
    in_memory_order: bool = False


class StepAhead:
    """Runs a model's training passes at displaced weights. All else sees the weights themselves.

    Displaced weights lie in buffers of their own, and a parameter's ``data`` points there from a training
    forward pass to the end of its backward pass (:mod:`.displaced_weights`). Nothing is added to the weights
    and nothing has to be subtracted from them, so ranks stay bitwise equal.

    An owner alone knows what it holds back of its part of the sum (two-phase exchange). So it multiplies this
    displacement by the number of ranks, at most by :data:`MAX_OWNER_FACTOR`. Then the mean of the ranks'
    displacements is as if all ranks knew it, and so is, to first order, the mean of their gradients. With
    thresholded updates of weights the owner alone knows the pending updates, and multiplies them, too: by the
    ranks of its node, if those alone have parts of the optimizer.

    Parameters that are not contiguous (``channels_last``) are displaced where the host lays out gradients in
    the order of memory, and as long as they keep their strides.

    Args:
        parameters: ``(name of the stream, parameter)``; streams that keep no residual are never displaced.
        unit_of: Returns the unit of the optimizer's steps for a parameter; None if the optimizer does not
            have it. It is called in every step, since schedulers change the unit.
        unsent: Returns what this rank has not sent.
        world_size: Ranks whose gradients are averaged.
        coefficient: Factor of the displacement, in (0, 1]; None: measured.
        gradient_unit: Returns the factor from a stream's gradients to the optimizer's.
        kernels: The kernels of the parameters' device; plain torch by default.
        node: The ranks of this rank's node, each of which has a part of the node's residuals.
        held: By name, the range of entries that a parameter's ``data`` holds, if the host gathers weights
            inside the node. None: parameters are whole. Each rank of a node displaces its part of them, and
            the parts are gathered here.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        unit_of: Callable[[torch.nn.Parameter], StepUnit | None],
        unsent: Unsent,
        *,
        world_size: int,
        coefficient: float | None = None,
        gradient_unit: Callable[[], float] = lambda: 1.0,
        kernels: Residuals | None = None,
        node: NodeRanks | None = None,
        held: Mapping[str, Part] | None = None,
    ) -> None:
        self._parameters, self._node, self._held = dict(parameters), node, held
        self._kernels = ReferenceBackend() if kernels is None else kernels
        self._unit_of, self._unsent, self._gradient_unit = unit_of, unsent, gradient_unit
        self._world_size, self._owner_factor = world_size, min(world_size, MAX_OWNER_FACTOR)
        self.moments = SecondMoments(self._parameters, unit_of, node, unsent.in_memory_order)
        self.coefficients = ResidualCoefficients(
            self._parameters, unsent.newest or unsent.residual, world_size=world_size, fixed=coefficient
        )
        self._strides = {
            name: parameter.stride()
            for name, parameter in self._parameters.items()
            if unsent.in_memory_order and not parameter.is_contiguous() and is_dense(parameter)
        }
        """Strides of the parameters that are not contiguous, and displaced."""
        self._scratch = ScratchBuffers()
        self._device_types = {parameter.device.type for parameter in self._parameters.values()}
        self._displaced = DisplacedWeights(self._compute)
        self._passes = TrainingPasses(self._displaced)
        self.coverage = Coverage(self._is_displaceable)
        self._handles: list[Any] = []

    # -- where passes run ---

    def attach(self, module: torch.nn.Module, *optimizers: Any) -> None:
        """Displace the weights in the passes of ``module`` with gradients, forward and backward. Saving,
        loading, passes without gradients and the steps of ``optimizers`` see the weights themselves.

        Args:
            module: Called for forward passes; passes of its parts alone are not displaced.
            optimizers: Those of torch; other hosts call :meth:`restore` before their steps.

        Raises:
            ConfigError: A part of the module replays a CUDA graph, which reads the weights themselves.
        """
        rescaled: dict[int, str] = {}
        for name, part in module.named_modules():
            if "make_graphed_callables" in getattr(part.__dict__.get("forward"), "__qualname__", ""):
                raise ConfigError(
                    f"dct.data_parallel.feedback = 'step_ahead': {name or 'the model'} replays a CUDA graph, "
                    "which does not see displaced weights; set it to 'local', or make no graph"
                )
            if getattr(part, "max_norm", None) is not None:  # it writes its weights in forward passes
                rescaled |= {id(each): name for each in part.parameters(recurse=False)}
        if rescaled:
            names = listed([*dict.fromkeys(rescaled.values())])
            log_once(
                f"dct: step-ahead: weights of {names} get local feedback, since forward passes limit their "
                "norm (max_norm)"
            )
            unit_of = self._unit_of
            self._unit_of = lambda parameter: None if id(parameter) in rescaled else unit_of(parameter)
        register(module, self._displaced)
        self._handles += self._passes.register(module)
        for optimizer in filter(lambda each: hasattr(each, "register_step_pre_hook"), optimizers):
            # The step may be compiled, its hooks cannot be.
            self._handles += [
                optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)),
                optimizer.register_step_post_hook(torch.compiler.disable(lambda *_: self.forget())),
            ]

    def detach(self) -> None:
        """Undo :meth:`attach`; the parameters' data are the weights.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        remove(self._handles)
        unregister(self._displaced)
        self._passes.step()

    def displace(self) -> None:
        """Let the parameters' data be the displaced weights, which are computed once per optimizer step, for
        a host that knows its passes.
        """
        self._displaced.on(Event.FORWARD)

    def restore(self) -> None:
        """Let the parameters' data be the weights again, up to the next :meth:`displace`.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        self._displaced.on(Event.PAUSE, thorough=True)

    def weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter's weight, also while its data are the displaced ones."""
        return self._displaced.weight(parameter)

    def forget(self) -> None:
        """Follow a change of the weights: restore them, and compute displaced ones anew for the next pass.

        Within a forward pass that runs (an optimizer steps in Lightning's ``training_step``) that is now.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        self._passes.step()
        if self._passes.runs:
            self._displaced.on(Event.FORWARD)

    def _before_step(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Restore the weights for an optimizer's step, also after the passes of its closure."""
        self._passes.step()
        optimizer, *rest = arguments
        closure = rest[0] if rest else keywords.get("closure")
        if closure is None:
            return None

        def restoring() -> Any:
            loss = closure()
            self._passes.step()
            return loss

        return (optimizer, restoring, *rest[1:]), {k: v for k, v in keywords.items() if k != "closure"}

    def _compute(self) -> list[tuple[str, torch.nn.Parameter, Tensor]]:
        """Compute the displaced weights, also of parameters that are frozen now."""
        self._passes.reduced = False
        with torch.no_grad(), ExitStack() as stack:
            for kind in self._device_types:
                stack.enter_context(torch.autocast(kind, enabled=False))
            computed = self._compute_all()
        self.coverage.show(name for name, *_ in computed)
        return computed

    def _compute_all(self) -> list[tuple[str, torch.nn.Parameter, Tensor]]:
        node, computed, flat, jobs = self._node if self._held is None else None, [], [], []
        gradient_unit = self._gradient_unit()
        if node is not None and all(self._unsent.residual(name) is None for name in self._parameters):
            return []  # so it is on all ranks of the node
        for name, parameter in self._parameters.items():
            numel = (weight := parameter.data).numel()
            if node is not None and not node.is_divided(numel):
                continue
            start, stop = (0, numel) if node is None else node.part(name, numel)
            residual, coefficient, lasting = self._expected(name, stop - start)
            pending = None if node is not None else self._unsent.pending(name)
            if residual is None and pending is None and node is None:
                continue
            unit, strides = self._unit_of(parameter), self._strides.get(name)
            is_laid_out = weight.is_contiguous() if strides is None else weight.stride() == strides
            if unit is None or not is_laid_out:
                continue
            buffer = self._displaced.buffers.get(name)
            if buffer is None or buffer.shape != weight.shape or buffer.dtype != weight.dtype:
                buffer = self._displaced.buffers[name] = torch.empty_like(weight)
            out = buffer.as_strided((numel,), (1,))  # in the order of memory
            job = displacement(
                part_of(weight.as_strided((numel,), (1,)), start, stop),
                (residual, coefficient),
                self.moments.of(name),
                unit,
                gradient_unit=gradient_unit,
                first=start if self._held is None else self._held[name][0],
                ratio=self.coefficients.gradient_ratio(name),
                update=None if pending is None else (pending[1], pending[0].start, self._owner_factor),
                out=part_of(out, start, stop),
            )
            if lasting and pending is None:
                jobs.append(job)
            else:  # the next call may overwrite the tensors
                self._kernels.displace([job], self._scratch.take)
            computed.append((name, parameter, buffer))
            flat.append((name, out))
        self._kernels.displace(jobs, self._scratch.take)
        if node is not None:
            node.gather("step-ahead", flat)
            for name, out in flat:  # this rank's updates are of any part
                if owned := self._unsent.pending(name):
                    span = out[owned[0].start : owned[0].stop]
                    span.add_(owned[1], alpha=min(node.size, MAX_OWNER_FACTOR))
        return computed  # from here on buffers must not be written

    def _expected(self, name: str, numel: int) -> tuple[Tensor | None, float, bool]:
        """Return what this rank has not sent of a parameter's gradients, its coefficient, and whether the
        tensor lasts beyond the next call.
        """
        if self.moments.of(name) is None:
            return None, 0.0, False
        residual, lasting = self._unsent.residual(name), self._unsent.lasting
        if residual is not None and self._node is not None and self._held is not None:
            parameter, held = self._parameters[name], self._held[name]
            known = self._node.part(name, parameter.numel())
            if held != known and residual.numel() == known[1] - known[0]:
                # Hosts and nodes divide a tensor at places that differ by a few entries.
                (start, stop), out = common(held, known), self._scratch.take("held", parameter.data).zero_()
                out[start - held[0] : stop - held[0]] = residual[start - known[0] : stop - known[0]]
                residual, lasting = out, False
        if residual is None or residual.numel() != numel:
            return None, 0.0, False
        coefficient = self.coefficients.of(name)
        both = None  # the residual times its coefficient, and what is held back
        for shard, part in self._unsent.owner_residuals(name, numel):
            if both is None:
                both = torch.mul(residual, coefficient, out=self._scratch.take("both", residual))
            both[shard.start : shard.stop].add_(part, alpha=self._owner_factor / self._world_size)
        return (residual, coefficient, lasting) if both is None else (both, 1.0, False)

    # -- gradients and steps ---

    def observe(self, entries: Entries) -> None:
        """Add gradients of this rank (1-D, in their unit) to the second moments, before they are reduced."""
        self._passes.reduced = True
        self.coverage.reduce(dict(entries))
        self.moments.observe(entries, self._kernels, self._scratch)

    def _is_displaceable(self, name: str) -> bool:
        """Return whether a pass with gradients would have displaced a parameter, but for its layout."""
        parameter = self._parameters.get(name)
        if parameter is None or self.moments.of(name) is None or self._unit_of(parameter) is None:
            return False
        if self._node is not None and self._held is None and not self._node.is_divided(parameter.numel()):
            return False
        return self._unsent.residual(name) is not None

    def why_missed(self, name: str) -> str:
        """Return why a parameter was not displaced in this step, in words."""
        weight, strides = self._parameters[name].data, self._strides.get(name)
        if not (weight.is_contiguous() if strides is None else weight.stride() == strides):
            return "they are not contiguous (channels_last, or transposed), or were not so at attach"
        if self._passes.transformed:
            return "a forward pass ran within a transform of torch.func, where weights cannot be displaced"
        return (
            "no forward pass with gradients of the attached module was seen. Call the module itself, not its "
            "parts or its forward method"
        )

    def end_step(self, *, skipped: bool, waiting: Collection[str] = ()) -> tuple[int, list[str]]:
        """Close an optimizer step; a ``skipped`` one leaves no trace. ``waiting`` streams stay open.
        Return :meth:`.Coverage.end_step`.
        """
        is_displaced = self._displaced.state is State.DISPLACED
        covered = self.coverage.end_step(shown=self._displaced.names if is_displaced else ())
        if not is_displaced or self._passes.runs:
            self.forget()
        # Else it is a rejected step, which ends as the gradients of the next pass come.
        self.coefficients.end_step(skipped=skipped)
        self.moments.end_step(skipped=skipped, waiting=waiting)
        return covered

    def undo(self, names: Collection[str], *, lost: bool) -> None:
        """Forget the gradients of streams in this step. If residuals were ``lost``, displace weights anew in
        the next pass; one that runs ends as it began.
        """
        self.moments.forget(names)
        if lost and self._displaced.state is not State.DISPLACED:
            self.forget()

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        self.moments.rescale(factor)
        self.coefficients.rescale(factor)

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the second moments of this rank's gradients, and what the coefficients come from."""
        return {"moments": self.moments.state_dict(), **self.coefficients.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int = 0) -> None:
        """Restore :meth:`state_dict`; None starts afresh, ``step`` optimizer steps into the training."""
        self.forget()
        saved = state or {"moments": {}}
        self.moments.load_state_dict(saved["moments"], step=step)
        self.coefficients.load_state_dict(saved)


class StepAheadAddOn(AddOn):
    """Gives a reducer the :class:`StepAhead` of its model: gradients before and after they are reduced."""

    key, option = "ahead", "feedback"

    def __init__(self, context: ReducerContext) -> None:
        self._group, self._config, self._topologies = context.group, context.config, context.topologies
        self._ahead: StepAhead | None = None
        self._loaded: dict[str, Any] | None = None
        self._is_small: dict[str, bool] = {}
        self._warned = False
        # With few ranks steps are in the unit of a rank's own gradients: all results were measured so. At two
        # ranks, steps in the unit of the mean gradient lost 0.006 nats.
        self._has_many_ranks = context.group.world_size > FEW_COMPRESSORS

    @classmethod
    def configured(cls, context: ReducerContext) -> StepAheadAddOn | None:
        return cls(context) if context.config.feedback.looks_ahead else None

    def prepare(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        unit_of: Callable[[torch.nn.Parameter], StepUnit | None],
        *,
        unit: float = 1.0,
        pending_of: Callable[[str], tuple[Shard, Tensor] | None] = lambda _: None,
        held: Mapping[str, Part] | None = None,
        in_memory_order: bool = False,
    ) -> StepAhead:
        """Make the :class:`StepAhead` from what the host knows. To be called before the first reduction.

        Args:
            parameters: ``(name in the entries, parameter)``.
            unit_of: Returns the optimizer's settings for a parameter as they are now; None for others.
            unit: Factor, besides the loss scale, from the optimizer's gradients to the stream's. If the host
                makes a gradient of the sum over the ranks by a factor, one over that factor and over the
                number of ranks.
            pending_of: See :attr:`Unsent.pending`; given if updates of the weights are thresholded.
            held: See :class:`StepAhead`; given if a rank has slices of a node's weights.
            in_memory_order: See :attr:`Unsent.in_memory_order`.

        Returns:
            An object to attach to the model, or to ask to displace and restore its weights.
        """
        group, parameters = self._group, list(parameters)
        lasting = self._config.residual_dtype in ("auto", "fp32")
        self._ahead = StepAhead(
            parameters,
            unit_of,
            Unsent(
                self._residual_of,
                self._owner_residuals_of,
                pending_of,
                lasting,
                partial(self._residual_of, committed=False),
                in_memory_order,
            ),
            world_size=group.world_size,
            coefficient=self._config.expert.step_ahead_coefficient,
            gradient_unit=lambda: 1.0 / (unit * group.loss_scale),
            kernels=group.backend,
            node=group.node,
            held=held,
        )
        self._ahead.coefficients.read = partial(group.exchange.received, what="comparison of residuals")
        self._ahead.load_state_dict(self._loaded, step=group.step)
        return self._ahead

    def before_compression(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        if self._ahead is None:
            raise ConfigError(
                "dct.data_parallel.feedback = 'step_ahead': this host has not said which "
                "parameters and which optimizer are meant (StepAheadAddOn.prepare); set it to 'local'"
            )
        if self._group.world_size > 1 and not self._group.sends_all:
            is_small, named = self._is_small, dict(entries)
            for name in named.keys() - is_small.keys():
                is_small[name] = self._group.is_small(name, named[name].numel())
            large = [pair for pair in entries if not is_small[pair[0]]]
            self._ahead.observe(large)
            if self._has_many_ranks and self._measures:
                self._ahead.coefficients.observe(large)

    def compared(self, names: Iterable[str]) -> list[str]:
        return self._ahead.coefficients.due(names) if self._ahead is not None and self._measures else []

    @property
    def _measures(self) -> bool:
        """True in a step in which the ranks compare residuals and gradients."""
        group, fixed = self._group, self._config.expert.step_ahead_coefficient
        return not group.sends_all and fixed is None and group.step % INTERVAL == 0

    def after_reduce(self, plan: ReductionPlan) -> None:
        """Compare the residuals and gradients of the tensors that are due."""
        if self._ahead is None or not plan.compared:
            return
        group, names = self._group, plan.compared
        tensors = {tensor.name: tensor for tensor in plan.tensors}
        own = self._ahead.coefficients.samples(names, group.step, group.device)
        reduced = [self._square_of_reduced(plan, tensors[n]) for n in names] if self._has_many_ranks else []
        mean = torch.cat([own, *(square.to(own).view(1) for square in reduced)])
        group.exchange.all_reduce(mean)
        mean /= group.world_size
        self._ahead.coefficients.measure(names, own, mean[: own.numel()])
        if reduced:
            self._ahead.coefficients.measure_gradients(names, mean[own.numel() :])

    def _square_of_reduced(self, plan: ReductionPlan, tensor: PlannedTensor) -> Tensor:
        """Return the part of this rank in the sum of the squares of the mean gradient: the ranks' mean of
        these numbers is that sum.
        """
        device, ranks = tensor.tensor.device, self._group.world_size
        total = torch.zeros((), dtype=torch.float32, device=device)
        for start, stop in plan.parts_held(tensor, self._group.rank):
            total += tensor.tensor[start:stop].float().square().sum()
        return total * ((1 if plan.sums_everywhere else ranks) / (plan.scale * ranks) ** 2)

    def end_step(self, *, skipped: bool) -> None:
        if self._ahead is not None:
            covered = self._ahead.end_step(skipped=skipped, waiting=self._group.waiting)
            if not skipped:
                self._ahead.coverage.report(self._group, *covered, self._ahead.why_missed)
            self._warn_of_different_data(self._ahead.coefficients)

    def undo(self, names: Collection[str], *, lost: bool) -> None:
        if self._ahead is not None:
            self._ahead.undo(names, lost=lost)

    def _warn_of_different_data(self, coefficients: ResidualCoefficients) -> None:
        """Say once, after the start, that the ranks' residuals cancel out."""
        group = self._group
        if self._warned or group.rank or group.step % INTERVAL or group.schedule.starting(group.step - 1):
            return
        if (agreement := coefficients.agreement()) < LEAST_AGREEMENT:
            self._warned = True
            logger.warning(
                f"dct: the ranks' residuals cancel out (agreement {agreement:.2f}; 1 is chance): their data "
                "are of different kinds, and thresholds lose more than with shuffled data. Shuffle them over "
                'the ranks, or send all entries ("sparsity": 0, "value_dtype": "int8"), which lost nothing '
                "(docs/quality.md#data-that-differ-between-ranks)"
            )

    def rescale(self, factor: float) -> None:
        if self._ahead is not None:
            self._ahead.rescale(factor)

    def state_dict(self) -> dict[str, Any] | None:
        return self._loaded if self._ahead is None else self._ahead.state_dict()

    @staticmethod
    def in_unit(state: Any, ratio: float) -> Any:
        if state is None:
            return None
        square = ratio * ratio
        moments = {
            name: {**saved, "rows": saved["rows"] * square, "columns": saved["columns"] * square}
            for name, saved in state["moments"].items()
        }
        products = {
            key: {name: (own * square, other * square) for name, (own, other) in state.get(key, {}).items()}
            for key in ("products", "gradients")
        }
        return {**state, "moments": moments, **products}

    def load_state_dict(self, state: Any, *, step: int) -> None:
        self._loaded = state
        if self._ahead is not None:
            self._ahead.load_state_dict(state, step=step)

    def _residual_of(self, name: str, use: str = "pass", committed: bool = True) -> Tensor | None:
        """Return the residual of a stream. It may share memory with the next one of the same ``use``."""
        group = self._group
        if group.sends_all:
            return None
        return group.streams.residual_of(name, use, group.device, committed=committed)

    def _owner_residuals_of(self, name: str, numel: int) -> Iterator[tuple[Shard, Tensor]]:
        """Yield the parts of the sum that this rank owns, and what it has not sent back of each."""
        for shard, stream in self._topologies.all_reduce.owner_residuals(name, numel):
            residual = self._residual_of(stream, "part")
            if residual is not None:
                yield shard, residual
