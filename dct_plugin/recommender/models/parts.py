"""Operators over embeddings, each as a partial result of some fields and a completion of the sum.

    embeddings e --partial(e)--> [B, K] --aggregate--> [b, K] --complete(sum, dense)--> result

With all fields on this rank the partial result is the result and ``aggregate`` does nothing; with shards it
is the equivalent substitution of DES. K is :attr:`Operator.width`. ``dense`` [b, D] are the numeric features,
which the rank of the samples always has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dct_plugin.embedding import Embeddings


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws what ``seed`` says; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def mlp(widths: Sequence[int], *, last_relu: bool = False) -> nn.Sequential:
    """Linear layers from each width to the next with ReLUs between them, and ``last_relu`` one at the end."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Operator(nn.Module):
    """Base class."""

    width: int
    """Floats of a sample's partial result."""

    def partial(self, embeddings: Tensor) -> Tensor:
        """[B, fields, columns] -> [B, width]."""
        raise NotImplementedError

    def complete(self, total: Tensor, dense: Tensor) -> Tensor:
        """[b, width], [b, D] -> the result."""
        raise NotImplementedError


def evaluate(
    source: Embeddings, embeddings: Tensor, operators: Sequence[Operator], dense: Tensor
) -> list[Tensor]:
    """Results of operators that read the same embeddings, with one aggregation for all of them."""
    partial = torch.cat([operator.partial(embeddings) for operator in operators], dim=1)
    totals = source.aggregate(partial).split([operator.width for operator in operators], dim=1)
    return [operator.complete(total, dense) for operator, total in zip(operators, totals, strict=True)]


class Wide(Operator):
    """Logistic regression, result [b]: the sum of one weight per value (tables of width 1) and a linear form
    of ``dense``.
    """

    width = 1

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.dense = nn.Linear(num_dense, 1)

    def partial(self, embeddings: Tensor) -> Tensor:
        return embeddings.sum(1)

    def complete(self, total: Tensor, dense: Tensor) -> Tensor:
        return (total + self.dense(dense)).squeeze(1)


class FM(Operator):
    """Second-order factorization machine (Rendle 2010): the sum of all pairs' dot products, result [b].

    Partial are the sum of the vectors and half the sum of their squares: K = m + 1.
    """

    def __init__(self, source: Embeddings) -> None:
        super().__init__()
        self.width = source.dim + 1

    def partial(self, embeddings: Tensor) -> Tensor:
        squares = embeddings.square().sum((1, 2)) / 2
        return torch.cat([embeddings.sum(1), squares.unsqueeze(1)], dim=1)

    def complete(self, total: Tensor, dense: Tensor) -> Tensor:
        return total[:, :-1].square().sum(1) / 2 - total[:, -1]


class FirstLayer(Operator):
    """Linear layer on [dense, all embeddings side by side], result [b, hidden].

    The weight's rows live with the fields they belong to: K = hidden.
    """

    def __init__(self, source: Embeddings, num_dense: int, hidden: int) -> None:
        super().__init__()
        self.width = hidden
        self._source = (source,)  # in a tuple: not a sub-module of this one
        bound = 1 / math.sqrt(num_dense + source.num_fields * source.dim)
        self.bias = nn.Parameter(torch.empty(hidden).uniform_(-bound, bound))
        self.dense_weight = nn.Parameter(torch.empty(num_dense, hidden).uniform_(-bound, bound))
        self.weight = _shard(
            source, torch.empty(source.num_fields, source.dim, hidden).uniform_(-bound, bound)
        )

    def partial(self, embeddings: Tensor) -> Tensor:
        return embeddings.flatten(1) @ self._source[0].own(self.weight).flatten(0, 1)

    def complete(self, total: Tensor, dense: Tensor) -> Tensor:
        return total + torch.addmm(self.bias, dense, self.dense_weight)


class CrossNetwork(Operator):
    """Cross network of DCN v1 and the linear form on its output, result [b] (Wang et al. 2017,
    arXiv:1708.05123).

    x_{l+1} = x_0 <x_l, w_l> + b_l + x_l, with x_0 = [dense, embeddings]. Every x_l is c_l x_0 + B_l with
    B_l = b_0 + ... + b_{l-1}, and c_{l+1} = c_l + c_l <x_0, w_l> + <B_l, w_l>. So a sample needs the products
    of x_0 with the L weights and the output's, in one aggregation instead of L: K = L + 1.
    """

    def __init__(self, source: Embeddings, num_dense: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth = depth + 1, depth
        self._source = (source,)
        # One row per layer; the last row of the weights is the output's.
        size = num_dense + source.num_fields * source.dim
        weights = torch.randn(depth + 1, size) / math.sqrt(size)
        dense, fields = weights.split([num_dense, size - num_dense], dim=1)
        self.dense_weight = nn.Parameter(dense.clone())
        self.weight = _shard(source, _by_field(fields, source))
        self.dense_bias = nn.Parameter(torch.zeros(depth, num_dense))
        self.bias = _shard(source, _by_field(torch.zeros(depth, size - num_dense), source))

    def partial(self, embeddings: Tensor) -> Tensor:
        weight = self._source[0].own(self.weight)
        return embeddings.flatten(1) @ weight.flatten(0, 1)

    def complete(self, total: Tensor, dense: Tensor) -> Tensor:
        source = self._source[0]
        weight, bias = source.own(self.weight).flatten(0, 1), source.own(self.bias).flatten(0, 1)
        # offset[l] = <B_l, w_l>: the shards' share, then the numeric features'.
        offset = source.total((_sums_before(bias.T) * weight.T).sum(1))
        offset = offset + (_sums_before(self.dense_bias) * self.dense_weight).sum(1)
        products = total + dense @ self.dense_weight.T
        factor = torch.ones_like(products[:, 0])
        for layer in range(self.depth):
            factor = factor + factor * products[:, layer] + offset[layer]
        return factor * products[:, -1] + offset[-1]


def _sums_before(bias: Tensor) -> Tensor:
    """[L, D] -> [L + 1, D]: row l is the sum of the rows before l."""
    return torch.cat([torch.zeros_like(bias[:1]), bias]).cumsum(0)


class DotLayer(Operator):
    """Dot products of all pairs of vectors, and the top MLP's first layer on [dense, products]: [b, hidden].

    Here ``dense`` is the bottom MLP's output, which is one of the vectors. From columns of all vectors the
    products are partial sums; what is aggregated are they or, if fewer and ``contract``, their images under
    the layer: K = min(pairs, hidden).

    Args:
        num_vectors: Vectors of a sample, ``dense`` included.
        layer: The first layer; a module of the caller's, not of this one.
        contract: Whether partial results may be images; not worth a second product where none is sent.
    """

    def __init__(self, num_vectors: int, layer: nn.Linear, *, contract: bool = True) -> None:
        super().__init__()
        pairs = num_vectors * (num_vectors - 1) // 2
        self._layer = (layer,)
        self.num_dense = layer.in_features - pairs
        self.contracted = contract and layer.out_features < pairs
        self.width = layer.out_features if self.contracted else pairs
        self.pairs: Tensor
        row, column = torch.tril_indices(num_vectors, num_vectors, -1).unbind()
        self.register_buffer("pairs", row * num_vectors + column, persistent=False)

    def partial(self, embeddings: Tensor) -> Tensor:
        products = torch.bmm(embeddings, embeddings.transpose(1, 2))
        products = products.flatten(1).index_select(1, self.pairs)
        return products @ self._layer[0].weight[:, self.num_dense :].T if self.contracted else products

    def complete(self, total: Tensor, dense: Tensor) -> Tensor:
        (layer,) = self._layer
        if self.contracted:
            return total + nn.functional.linear(dense, layer.weight[:, : self.num_dense], layer.bias)
        return layer(torch.cat([dense, total], dim=1))


def _by_field(rows: Tensor, source: Embeddings) -> Tensor:
    """[L, F*m] -> [F, m, L]."""
    return rows.reshape(len(rows), source.num_fields, source.dim).permute(1, 2, 0)


def _shard(source: Embeddings, full: Tensor) -> nn.Parameter:
    """The part of [F, m, ...] that belongs to the fields and columns of ``source``."""
    start, stop = source.columns
    return source.adopt(
        nn.Parameter(full[list(source.fields), start:stop].clone(memory_format=torch.contiguous_format))
    )
