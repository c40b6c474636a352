from __future__ import annotations

from typing import Any

import torch

from ..distributed import gather_along_first_dim


def grad_output_preprocess(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
    """Gather what a row-parallel linear's reduce-scatter has cut."""
    grad_output = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
    if ctx.parallel_mode == "row" and ctx.sequence_parallel:
        grad_output, _ = gather_along_first_dim(grad_output, ctx.tp_group)
    return grad_output


class TransformerEngineBaseModule(torch.nn.Module):
    """A linear's weight, bias and parallelism."""

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool, tp_group: Any, tp_size: int,
        parallel_mode: str | None, bias: bool, return_bias: bool, params_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.parallel_mode = parallel_mode
        out_features //= self.tp_size if parallel_mode == "column" else 1
        in_features //= self.tp_size if parallel_mode == "row" else 1
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.gemm_bias_unfused_add = parallel_mode == "row" and self.apply_bias
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else None
        for parameter in (self.weight, self.bias) if parallel_mode == "column" else (self.weight,):
            if parameter is not None:  # Megatron's norm of gradients counts others on one rank
                parameter.tensor_model_parallel = parallel_mode is not None

    def finish(self, output: torch.Tensor) -> Any:
        """Add a row-parallel linear's bias behind the sum, or return it."""
        if self.gemm_bias_unfused_add:
            output = output + self.bias
        return (output, self.bias) if self.return_bias else output

    @property
    def fused_bias(self) -> torch.Tensor | None:
        """The bias that is added with the product."""
        return self.bias if self.apply_bias and not self.gemm_bias_unfused_add else None
