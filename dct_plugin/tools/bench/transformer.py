"""Blocks of a transformer under torch DDP, of any shape: what the cost model is fitted and checked on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_plugin.cost import Transformer
from dct_plugin.links.method import Method

from .ddp import Trained, methods_of

#: Sparsity and type of values.
SETTINGS = ((0.9, "bf16"), (0.99, "bf16"), (0.99, "int8"), (0.99, "int4"))
#: Of the other methods; fp16 costs what bf16 does, top-k is no option at its price.
LEFT_OUT = ("fp16", "top-k 1 %")


class Blocks(nn.Module):
    """Pre-norm blocks with causal attention and an MLP of four times the width; no embeddings."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            shape.hidden,
            shape.heads,
            4 * shape.hidden,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.sequence)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.blocks(x, mask=self.mask, is_causal=True)
        return hidden


class Transformers:
    """Variants are ``layers,hidden,batch,sequence``; with ``,ideal`` behind it steps send nothing."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        pass

    def open(self, variant: str) -> list[Method]:
        numbers = variant.removesuffix(",ideal")
        shape = Transformer(*(int(number) for number in numbers.split(",")))
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        size = shape.batch, shape.sequence, shape.hidden
        data = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
        shared, one_bucket = (Trained(Blocks(shape), data, mb) for mb in (25, 1e6))
        methods = methods_of(shared, one_bucket, SETTINGS)
        if variant.endswith(",ideal"):
            return methods[:1]
        return [method for method in methods if method.name not in LEFT_OUT]

    def close(self) -> None:
        pass
