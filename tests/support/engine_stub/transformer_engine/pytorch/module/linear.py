from __future__ import annotations

from typing import Any

import torch

from ..distributed import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim
from .base import TransformerEngineBaseModule, grad_output_preprocess


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, weight: torch.Tensor, bias: Any, linear: Linear) -> torch.Tensor:
        mode, group, size = linear.parallel_mode, linear.tp_group, linear.tp_size
        inputmat = inp.reshape(-1, inp.shape[-1])
        total = inputmat
        if mode == "column" and linear.sequence_parallel:
            total, _ = gather_along_first_dim(inputmat, group, quantizer=None)
        out = torch.nn.functional.linear(total, weight, bias)
        if mode == "row" and size > 1:
            exchange = reduce_scatter_along_first_dim if linear.sequence_parallel else allreduce
            out, _ = exchange(out, group)
        if ctx is not None:
            ctx.save_for_backward(inputmat, weight)
            ctx.parallel_mode, ctx.tp_group, ctx.tp_size = mode, group, size
            ctx.sequence_parallel, ctx.shape = linear.sequence_parallel, inp.shape
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        total, weight = ctx.saved_tensors
        column = ctx.parallel_mode == "column" and ctx.tp_size > 1
        grad_output = grad_output_preprocess(ctx, grad_output)
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
        bias = grad_output.sum(0) if ctx.needs_input_grad[2] else None
        return dgrad.view(ctx.shape), wgrad, bias, None


class Linear(TransformerEngineBaseModule):
    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False, tp_group: Any = None,
        tp_size: int = 1, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32, parallel_mode: str | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            in_features, out_features, sequence_parallel, tp_group, tp_size, parallel_mode, bias,
            return_bias, params_dtype,
        )  # fmt: skip

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        run = (
            _Linear.apply if torch.is_grad_enabled() else lambda *arguments: _Linear.forward(None, *arguments)
        )
        return self.finish(run(inp, self.weight, self.fused_bias, self))
