from __future__ import annotations

from typing import Any

import torch

from ..distributed import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim
from .base import TransformerEngineBaseModule, grad_output_preprocess


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, ln_weight: torch.Tensor, ln_bias: torch.Tensor, weight: torch.Tensor,
        bias: Any, linear: LayerNormLinear,
    ) -> torch.Tensor:  # fmt: skip
        inputmat = inp.reshape(-1, inp.shape[-1])
        ln_out, mean, rstd = torch.native_layer_norm(
            inputmat, inputmat.shape[-1:], ln_weight, ln_bias, linear.eps
        )
        total = ln_out
        if linear.parallel_mode == "column" and linear.sequence_parallel:
            total, _ = gather_along_first_dim(ln_out, linear.tp_group, quantizer=linear.quantizer)
        out = torch.nn.functional.linear(total, weight, bias)
        if ctx is not None:
            ctx.save_for_backward(inputmat, ln_weight, ln_bias, weight, ln_out, mean, rstd)
            ctx.parallel_mode, ctx.tp_group, ctx.tp_size = (
                linear.parallel_mode,
                linear.tp_group,
                linear.tp_size,
            )
            ctx.sequence_parallel, ctx.shape = linear.sequence_parallel, inp.shape
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        inputmat, ln_weight, ln_bias, weight, total, mean, rstd = ctx.saved_tensors
        column = ctx.parallel_mode == "column" and ctx.tp_size > 1
        grad_output = grad_output_preprocess(ctx, grad_outputs[0])
        total_work = dgrad_work = wgrad = None
        if column and ctx.sequence_parallel and weight.requires_grad:
            total, total_work = gather_along_first_dim(total, ctx.tp_group, async_op=True, quantizer=None)
        dgrad = grad_output @ weight
        if column:
            exchange = reduce_scatter_along_first_dim if ctx.sequence_parallel else allreduce
            dgrad, dgrad_work = exchange(dgrad, ctx.tp_group, async_op=True)
        if total_work is not None:
            total_work.wait()
        if weight.requires_grad:
            wgrad = grad_output.t() @ total
        if dgrad_work is not None:
            dgrad_work.wait()
        inner, gamma, beta = torch.ops.aten.native_layer_norm_backward(
            dgrad, inputmat, inputmat.shape[-1:], mean, rstd, ln_weight, ln_bias, [True, True, True]
        )
        bias = grad_output.sum(0) if ctx.needs_input_grad[4] else None
        return inner.view(ctx.shape), gamma, beta, wgrad, bias, None


class LayerNormLinear(TransformerEngineBaseModule):
    quantizer: Any = None

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        tp_group: Any = None, tp_size: int = 1, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32, parallel_mode: str | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            in_features, out_features, sequence_parallel, tp_group, tp_size, parallel_mode, bias,
            return_bias, params_dtype,
        )  # fmt: skip
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=params_dtype))
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            parameter.sequence_parallel = self.sequence_parallel

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        norm = (self.layer_norm_weight, self.layer_norm_bias)
        run = _LayerNormLinear.apply if torch.is_grad_enabled() else _without_gradients
        return self.finish(run(inp, *norm, self.weight, self.fused_bias, self))


def _without_gradients(*arguments: Any) -> torch.Tensor:
    return _LayerNormLinear.forward(None, *arguments)
