"""One optimizer for tables and MLPs, with a method of its own for each: recommenders want row-wise Adagrad or
SGD for tables, Adam for the rest, and DeepSpeed takes one optimizer.

Dense and sparse gradients; sparse ones touch their rows only (lazy Adam). Under ZeRO-1 DeepSpeed hands over
flat fp32 vectors: row-wise methods find the rows again by ``width``. It cannot reduce sparse gradients there,
so that tables have to be dense (``sparse=False``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dct_plugin.data_parallel.step_units import StepUnit
from dct_plugin.embedding import ColumnShards, FieldShards, TableShard

from . import METHODS

_Settings = dict[str, Any]


class HybridOptimizer(torch.optim.Optimizer):
    """SGD, Adam, Adagrad or row-wise Adagrad, as each parameter group says.

    Args:
        groups: Parameters or parameter groups. Keys of a group beside those below are kept.
        method: ``sgd``, ``adam``, ``adagrad``, or ``rowwise_adagrad``: one accumulator per row, of the mean
            square of the row's gradient (as in FBGEMM's EXACT_ROWWISE_ADAGRAD).
        lr: Learning rate.
        betas, eps: As in torch.optim; eps defaults to 1e-8 (Adam) and 1e-10.
        width: Entries of a row, for row-wise methods on flat vectors.

    Updates of dense gradients are those of torch.optim with the same settings.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        *,
        method: str = "adam",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__(groups, {"method": method, "lr": lr, "betas": betas, "eps": eps, "width": width})
        for group in self.param_groups:
            if group["method"] not in METHODS:
                raise ValueError(f"method is {group['method']!r}; allowed: {', '.join(METHODS)}")
            if not group["lr"] >= 0:
                raise ValueError(f"lr is {group['lr']}; it must be at least 0")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = getattr(self, "_" + group["method"])
            for parameter in group["params"]:
                gradient, rows = parameter.grad, None
                if gradient is not None and gradient.is_sparse:
                    gradient = gradient.coalesce()
                    gradient, rows = gradient.values(), gradient.indices()[0]
                if gradient is not None and gradient.numel():
                    update(parameter, gradient, rows, self.state[parameter], group)
        return loss

    def step_unit(self, group: Mapping[str, Any]) -> StepUnit:
        """Return the settings of a parameter for step-ahead error feedback."""
        lr, method = float(group["lr"]), group["method"]
        if method == "sgd":
            return StepUnit(lr)
        return StepUnit(lr, True, float(group["betas"][1]) if method == "adam" else None, _eps(group))

    # The gradients belong to some rows of a parameter (``at``), or to all of it: then ``at`` is None.

    @staticmethod
    def _sgd(parameter: Tensor, values: Tensor, at: Tensor | None, _: _Settings, group: _Settings) -> None:
        _add(parameter, at, values, alpha=-group["lr"])

    @staticmethod
    def _adam(
        parameter: Tensor, values: Tensor, at: Tensor | None, state: _Settings, group: _Settings
    ) -> None:
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        mean, square = (_at(state[key], at) for key in ("exp_avg", "exp_avg_sq"))
        mean.lerp_(values, 1 - first)
        square.mul_(second).addcmul_(values, values, value=1 - second)
        denominator = square.sqrt().div_(math.sqrt(1 - second ** state["step"])).add_(_eps(group))
        change = (mean / denominator).mul_(-group["lr"] / (1 - first ** state["step"]))
        _add(parameter, at, change)
        if at is not None:
            state["exp_avg"][at] = mean
            state["exp_avg_sq"][at] = square

    @staticmethod
    def _adagrad(
        parameter: Tensor, values: Tensor, at: Tensor | None, state: _Settings, group: _Settings
    ) -> None:
        if not state:
            state["sum"] = torch.zeros_like(parameter)
        total = _at(state["sum"], at)
        total.addcmul_(values, values)
        change = (values / (total.sqrt() + _eps(group))).mul_(-group["lr"])
        _add(parameter, at, change)
        if at is not None:
            state["sum"][at] = total

    @staticmethod
    def _rowwise_adagrad(
        parameter: Tensor, values: Tensor, at: Tensor | None, state: _Settings, group: _Settings
    ) -> None:
        width = parameter.shape[-1] if parameter.dim() > 1 else group["width"]
        if width is None:
            raise ValueError("rowwise_adagrad needs the parameter group's width for a flat vector of rows")
        rows = parameter.numel() // width  # a flat vector may end in padding
        table = parameter.view(-1)[: rows * width].view(rows, width)
        if not state:
            state["sum"] = torch.zeros(rows, dtype=parameter.dtype, device=parameter.device)
        if at is None:
            values = values.reshape(-1)[: rows * width].view(rows, width)
        square = values.square().mean(dim=1)
        _add(state["sum"], at, square)
        factors = -group["lr"] / (_at(state["sum"], at).sqrt() + _eps(group))
        _add(table, at, values * factors.unsqueeze(1))


def _eps(group: Mapping[str, Any]) -> float:
    default = 1e-8 if group["method"] == "adam" else 1e-10
    return default if group["eps"] is None else float(group["eps"])


def _at(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """The tensor itself, or a copy of some rows."""
    return tensor if rows is None else tensor[rows]


def _add(tensor: Tensor, rows: Tensor | None, change: Tensor, *, alpha: float = 1.0) -> None:
    if rows is None:
        tensor.add_(change, alpha=alpha)
    else:
        tensor.index_add_(0, rows, change, alpha=alpha)


def hybrid_groups(model: nn.Module, *, tables: dict[str, Any], rest: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups of a model in :class:`~dct_plugin.integrations.dlrm.experts.Experts`.

    Args:
        tables: Settings of embedding tables, for example ``{"method": "rowwise_adagrad", "lr": 0.02}``.
            Tables of different width come in groups of their own.
        rest: Settings of all other parameters, shards of a layer's weight among them.
    """
    kinds = (TableShard, FieldShards, ColumnShards)
    of_tables = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    shared: list[nn.Parameter] = []
    own: dict[tuple[int, bool], list[nn.Parameter]] = {}  # by width, tables first
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if getattr(parameter, "allreduce", True):
            shared.append(parameter)
        else:
            own.setdefault((parameter.shape[-1], id(parameter) not in of_tables), []).append(parameter)
    groups: list[dict[str, Any]] = [{"params": shared, **rest}] if shared else []
    for (width, layer), parameters in sorted(own.items()):
        name = getattr(parameters[0], "group_name", None)
        # DeepSpeed knows groups of expert parameters by these two keys.
        expert = {} if name is None else {"moe": True, "name": name}
        groups.append({"params": parameters, "width": width, **expert, **(rest if layer else tables)})
    return groups
