"""Comparison of replicas: a checksum of every tensor, compared over the ranks every few steps.

Ranks add up the same payloads in the same order, so their parameters are bitwise equal. Memory errors,
kernels that are not deterministic and scripts that change tensors on one rank would go unnoticed, and the
saved model would not be the trained one.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.config import DataParallelConfig
from dct_plugin.console import logger
from dct_plugin.data_parallel.checksums import checksum
from dct_plugin.errors import DesyncError
from dct_plugin.host_traffic import own_traffic
from dct_plugin.transport import lost_ranks

_Named = Sequence[tuple[str, Tensor]]
#: What may be wrong, and what to do about it.
_REMEDY = (
    "A script that updates them in a training pass (averaged weights, momentum encoders) reads weights that "
    "differ from rank to rank: read within `with dct_plugin.data_parallel.weights(model):`, or update after "
    "optimizer.step(). A script that changes them on one rank is to do so on all"
)


class ReplicaChecksums:
    """Comparison of the ranks' tensors as ``dct.data_parallel.verify`` says.

    Args:
        config: The ``data_parallel`` settings.
        weights: Returns the trainable parameters by name, the same on all ranks of the group.
        group: The ranks that hold replicas; None for all.
        others: Returns frozen parameters and buffers by name. Those that differ at the end of the dense start
            are a rank's own, and are not compared.
        agree: Makes sure that all ranks compare now; a collective.

    Attributes:
        seconds: Time that comparisons took so far.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        group: dist.ProcessGroup | None = None,
        others: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
        agree: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._verify, self._dense_steps = config.verify, config.dense_steps
        self._weights, self._others, self._group, self._agree = weights, others, group, agree
        self._compares_others = not config.trains_alone  # else they are a rank's own
        self._left_out: set[str] = set()
        """Names of tensors that are a rank's own, or have been logged."""
        self._is_first = True
        self.seconds = 0.0

    def check(self, step: int, *, saves: bool = False) -> None:
        """Compare the tensors after optimizer step ``step`` where that is due, and before they are saved;
        then it is a collective.

        Raises:
            DesyncError: On every rank, with the action ``"stop"``: trainable parameters differ. It names the
                step, the parameters and the ranks.
        """
        verify = self._verify
        is_due = verify is not None and (saves or verify.is_due(step, self._dense_steps))
        if not is_due or dist.get_world_size(self._group) == 1:
            return
        with own_traffic(recorded=False):
            self._check(step)

    def _check(self, step: int) -> None:
        began = time.perf_counter()
        weights = [pair for pair in self._weights() if pair[0] not in self._left_out]
        others = [pair for pair in self._comparable() if pair[0] not in self._left_out]
        if weights or others:
            self._agree("comparison of parameters")
            self._compare(weights, others, step)
        self.seconds += time.perf_counter() - began

    def _comparable(self) -> list[tuple[str, Tensor]]:
        named = self._others() if self._compares_others else ()
        return [(name, each) for name, each in named if each.layout is torch.strided and not each.is_meta]

    def _compare(self, weights: _Named, others: _Named, step: int) -> None:
        assert self._verify is not None
        named, ranks = [*weights, *others], dist.get_process_group_ranks(self._group or dist.group.WORLD)
        device = named[0][1].device
        names = zlib.crc32("\n".join(name for name, _ in others).encode())
        sums = (checksum(each).to(device) for _, each in weights)
        found = self._gathered(torch.stack([torch.tensor(names, device=device), *sums]), step)
        if (found[0] != found[0][0]).any():  # ranks have registered others
            self._compares_others, others = False, ()
        if others:
            own = torch.stack([checksum(each).to(device) for _, each in others])
            found = torch.cat([found, self._gathered(own, step)])
        named, found = [*weights, *others], found[1:]
        differing = (found != found[:, :1]).any(dim=1).nonzero().view(-1).tolist()
        is_start, self._is_first = self._is_first or step <= self._dense_steps, False
        own_ones = {named[i][0] for i in differing if i >= len(weights)} if is_start else set()
        self._left_out |= own_ones
        differing = [i for i in differing if named[i][0] not in own_ones]
        if not differing:
            return
        texts = [f"{named[i][0]} on {_minority(ranks, found[i].tolist())}" for i in differing[:5]]
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        what = f"differ between the ranks after step {step}: {'; '.join(texts)}{more}"
        if self._verify.action == "stop" and differing[0] < len(weights):
            raise DesyncError(f"rank {dist.get_rank()}: parameters {what}")
        self._put_right([named[i] for i in differing], ranks, what)

    def _put_right(self, differing: _Named, ranks: Sequence[int], what: str) -> None:
        """Log tensors that differ, once; or let all ranks take over those of the first."""
        end = f". {_REMEDY}; logged once"
        if self._verify is not None and self._verify.action == "resync":
            end = f"; all took over those of rank {ranks[0]}"
            for each in (tensor.detach() for _, tensor in differing):
                values = each.contiguous()  # a view with gaps would be read and written beside its entries
                dist.broadcast(values, ranks[0], group=self._group)
                each.copy_(values)
        else:
            self._left_out |= {name for name, _ in differing}
        if dist.get_rank() == ranks[0]:
            logger.warning(f"dct: tensors {what}{end}")

    def _gathered(self, own: Tensor, step: int) -> Tensor:
        """Return the numbers of all ranks: int64 [numbers, ranks]."""
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        with lost_ranks.reported("comparison of parameters", self._group, step):
            dist.all_gather(everyones, own, group=self._group)
            return lost_ranks.received(torch.stack(everyones, dim=1), self._group)


def not_trained(module: torch.nn.Module, trained: Iterable[str]) -> list[tuple[str, Tensor]]:
    """Return the frozen parameters and the buffers of a module by name; all that are not ``trained``."""
    named, left_out = [*module.named_parameters(), *module.named_buffers()], set(trained)
    local = ((name, getattr(each, "to_local", lambda each=each: each)()) for name, each in named)
    return [(name, each.detach()) for name, each in local if name not in left_out]


def _minority(ranks: list[int], sums: list[int]) -> str:
    usual, count = Counter(sums).most_common(1)[0]
    if 2 * count <= len(sums):
        return f"ranks {', '.join(map(str, ranks))} (no majority)"
    others = [str(rank) for rank, found in zip(ranks, sums, strict=True) if found != usual]
    return f"rank(s) {', '.join(others)}"
