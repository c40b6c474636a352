"""Means, gathers and messages between the ranks of a node, by every way: three processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.processes import run
from torch import Tensor

from dct_plugin.errors import DesyncError
from dct_plugin.transport import Exchange
from dct_plugin.transport.collective import CollectiveTransport
from dct_plugin.transport.node_transport import NodeCollectives, NodeTransport
from dct_plugin.transport.shared_memory import open_shared_memory
from dct_plugin.transport.tcp_connect import VARIABLE

#: The parts of three ranks in each of four tensors, the largest types first: unequal, and of one rank only.
SIZES = {"a": (33_333, 33_334, 33_334), "small": (0, 10, 0), "one": (0, 0, 1), "b": (7, 7, 6)}
TYPES = {"b": torch.bfloat16}


def parts(rank: int) -> list[list[Tensor]]:
    """Return what a rank has for every rank."""
    made = torch.Generator().manual_seed(rank)
    return [
        [torch.randn(sizes[to], generator=made).to(TYPES.get(n, torch.float32)) for n, sizes in SIZES.items()]
        for to in range(3)
    ]


class DeviceCalls(CollectiveTransport):
    """Calls the collectives that nccl gets, which gloo has as well."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.rank, range(3), None, torch.device("cpu"))

    def reduce_scatter(self, mean: Tensor, parts: Tensor) -> None:
        self._device = torch.device("cuda")
        super().reduce_scatter(mean, parts)
        self._device = torch.device("cpu")


@contextmanager
def ways() -> Iterator[dict[str, NodeTransport]]:
    exchanges = [Exchange(None, torch.device("cpu")) for _ in range(3)]
    memory = open_shared_memory(exchanges[0])
    assert memory is not None
    with mock.patch.dict(os.environ, {VARIABLE: "gloo"}):
        assert open_shared_memory(exchanges[1]) is None  # opens the transport as well
    exchanges[2]._transport = DeviceCalls(exchanges[2])
    found = {"memory": memory, "gloo": NodeCollectives(exchanges[1]), "device": NodeCollectives(exchanges[2])}
    yield {**found, "tcp": NodeCollectives(exchanges[0])}


def _all(rank: int, world_size: int) -> None:
    everything = [parts(r) for r in range(3)]
    with ways() as found:
        for name, way in found.items():
            for in_place in (False, True):
                mine = parts(rank)
                out = mine[rank] if in_place else [torch.empty_like(each) for each in mine[rank]]
                way.reduce_scatter(mine, out, 1)
                for index, mean in enumerate(out):
                    terms = [everything[r][rank][index].float() for r in range(3)]
                    expected = ((terms[0] + terms[1]) + terms[2]) * (1 / 3)
                    if name == "device":  # gloo has an order of its own, and sums in the type
                        close = 0.02 if mean.dtype == torch.bfloat16 else 1e-6
                        torch.testing.assert_close(mean.float(), expected, rtol=close, atol=close)
                    else:
                        assert torch.equal(mean, expected.to(mean.dtype)), name
            gathered = [
                parts(0)[r] if r == rank else [torch.empty_like(t) for t in parts(0)[r]] for r in range(3)
            ]
            way.all_gather(gathered, 2)
            arrived = way.all_to_all(parts(rank), [parts(0)[rank]] * 3, 3)
            for r in range(3):
                assert all(map(torch.equal, gathered[r], parts(0)[r])), name
                assert all(map(torch.equal, arrived[r], parts(r)[rank])), name
            assert arrived[rank] == []


@pytest.mark.slow
def test_every_way_gives_the_same_means_in_the_order_of_the_ranks() -> None:
    run(3, _all)


def _differs(rank: int, world_size: int) -> str:
    said = ""
    with ways() as found:
        for name, way in found.items():
            try:
                way.all_gather([[torch.zeros(4)]] * 3, (7 if rank == 1 else 8) << 40)
            except DesyncError as error:
                said += f"{name}: {error}\n"
    dist.barrier()
    return said


@pytest.mark.slow
def test_ranks_that_do_something_else_are_named_by_every_way() -> None:
    for rank, said in enumerate(run(3, _differs)):
        assert said.count("[1] are exchanging other tensors" if rank != 1 else "[0, 2] are exchanging") == 4


class _Counted(Exchange):
    """An exchange of eight ranks that sends nothing."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.device = 0, 8, torch.device("meta")
        self.collectives = 0

    def _count(self, *_: object) -> None:
        self.collectives += 1

    gather_into = reduce_scatter_into = _count  # type: ignore[assignment]


def test_a_bucket_takes_one_collective_and_few_launches_whatever_its_tensors() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    launches: list[str] = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = func.overloadpacket.__name__
            if name in ("cat", "new_zeros", "zero_", "mul_", "_foreach_copy_", "copy_", "clone"):
                launches.append(name)
            return func(*args, **(kwargs or {}))

    for tensors in (8, 200):
        exchange = _Counted()
        way = NodeCollectives(exchange)
        of_ranks = [[torch.empty(64, device="meta") for _ in range(tensors)] for _ in range(8)]
        launches.clear()
        with Launches():
            way.reduce_scatter(of_ranks, of_ranks[0], 0)
            assert launches == ["new_zeros", "cat", "_foreach_copy_"]
            way.all_gather(of_ranks, 0)
        assert launches[3:] == ["cat", "copy_", "_foreach_copy_"]
        assert exchange.collectives == 2
