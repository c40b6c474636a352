"""Run on several ranks of one GPU what one process never shows: exchanges over nccl, and ranks that fail.

    python benchmarks/gpu_ranks.py --out rows.jsonl   # nccl >= 2.30, which takes several ranks on a GPU
    DCT_DRY_RUN=1 TRITON_INTERPRET=1 python benchmarks/gpu_ranks.py --out rows.jsonl   # anywhere: gloo

Every case of four ranks is computed twice, on the device over nccl and on the CPU over gloo with plain torch,
and the bits are compared. Then one of two ranks fails: in its forward pass, while it prepares an exchange, by
a signal that stops it, and by one that ends it. A row says how many seconds both took, and what they said.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from no_gpu import DEVICE, DRY, stand_in
from torch import Tensor

from dct_plugin.config import DataParallelConfig, EmbeddingChannelConfig, KernelConfig
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.embedding import ShardedTables
from dct_plugin.integrations.host import lost_peers
from dct_plugin.kernels import register_backend
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import TritonBackend
from dct_plugin.transport import lost_ranks, slots

#: Seconds that a case may take, and the time limit of the groups in which a rank fails.
PATIENCE, LIMIT = (600, 20) if DRY else (50, 60)
STEPS, ENTRIES = (2, 1_200) if DRY else (24, 2_000_000)
_SIZES = {"first": ENTRIES, "second": ENTRIES // 3 + 1, "bias": 64}


class _Plain(ReferenceBackend):
    """Plain torch, with as much room in payloads as on a device."""

    most_kept = staticmethod(TritonBackend.most_kept)


def _gradients(rank: int, step: int, device: str) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [(n, torch.randn(size, generator=generator).to(device)) for n, size in _SIZES.items()]


def _reduced(device: str, kernels: KernelConfig, group: Any, exchange: str) -> list[Tensor]:
    scattered = exchange == "scatter"
    options = {"sparsity": 0.95, "min_numel": 1000, "exchange": "auto" if scattered else exchange}
    reducer = GradientReducer(DataParallelConfig(**options), group, device=device, kernels=kernels)
    rank, found = dist.get_rank(), []
    for step in range(STEPS):
        entries = _gradients(rank, step, device)
        if scattered:
            quarters = [(n, t, _quarters(t.numel())) for n, t in entries]
            reducer.begin_scatter(quarters, scale=0.25).finish()
        else:
            reducer.begin(entries, scale=0.25).finish()
        reducer.finish()
        reducer.end_step()
        found += [t[slice(*_quarters(t.numel())[rank][1:])] if scattered else t for _, t in entries]
    return found + [stream.residual.current for stream in reducer.group.streams.values() if stream.residual]


def _quarters(numel: int) -> list[Shard]:
    cuts = [numel * at // 4 for at in range(5)]
    return [Shard(rank, cuts[rank], cuts[rank + 1]) for rank in range(4)]


def _updated(device: str, kernels: KernelConfig, group: Any) -> list[Tensor]:
    config = DataParallelConfig(parameters="exact")
    updates = ParameterUpdates(config, group, device=device, kernels=kernels)
    generator, part = torch.Generator().manual_seed(5), ENTRIES // 4
    working = torch.randn(4 * part, generator=generator).bfloat16().to(device)
    own = working[dist.get_rank() * part :][:part]
    for step in range(STEPS):
        before = own.clone()
        change = torch.randn(4 * part, generator=generator).to(device)[dist.get_rank() * part :][:part]
        own += (3e-2 if step == STEPS - 1 else 1e-3) * change.bfloat16()
        updates.update([("weights", working, shards_in(0, 4 * part, part))], {"weights": before}.__getitem__)
        updates.end_step()
    return [working]


def _looked_up(device: str, kernels: KernelConfig, group: Any) -> list[Tensor]:
    torch.manual_seed(0)
    tables = ShardedTables(
        [30, 7, 50, 9], 32, config=EmbeddingChannelConfig(), kernels=kernels, group=group, name=device
    ).to(device)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.stack([torch.randint(n, (20,), generator=generator) for n in (30, 7, 50, 9)], dim=1)
        vectors = tables(ids.to(device))
        vectors.square().sum().backward()
        found.append(vectors.detach())
    return found


CASES: dict[str, Callable[[str, KernelConfig, Any], list[Tensor]]] = {
    "two-phase": lambda *where: _reduced(*where, "two_phase"),
    "direct": lambda *where: _reduced(*where, "direct"),
    "scatter": lambda *where: _reduced(*where, "scatter"),
    "exact updates": _updated,
    "exact updates in slots too small": _updated,
    "embeddings": _looked_up,
}


def _case(rank: int, folder: str, name: str) -> None:
    """Compute a case on the device and on the CPU, and write whether the bits are the same."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    backend = _joined(rank, 4, folder, timedelta(seconds=PATIENCE))
    on_cpu = dist.new_group(backend="gloo")
    if "too small" in name:
        whole = slots.slot_bytes
        slots.slot_bytes = lambda most: whole(most * 7 // 8)
    began = time.perf_counter()
    found = CASES[name](DEVICE, KernelConfig(backend=backend), None)
    seconds = time.perf_counter() - began
    expected = CASES[name]("cpu", KernelConfig(backend="plain"), on_cpu)
    pairs = list(zip(found, expected, strict=True))
    same = [torch.equal(one.cpu(), other) for one, other in pairs]
    row = {"rank": rank, "seconds": round(seconds, 2), "tensors": len(same), "same": sum(same)}
    Path(folder, str(rank)).write_text(json.dumps(row))


def _joined(rank: int, ranks: int, folder: str, limit: timedelta) -> str:
    """Join the default process group; return the name of the kernels."""
    stand_in()
    register_backend("plain", _Plain)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not DRY:
        torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "gloo" if DRY else "nccl", store=store, rank=rank, world_size=ranks, timeout=limit
    )
    return "interpreted" if DRY else "triton"


def _failing(rank: int, folder: str, how: str) -> None:
    """Train until rank 1 fails in step 3; write what this rank was told, and when."""
    faulthandler.dump_traceback_later(LIMIT + PATIENCE, exit=True)
    kernels = KernelConfig(backend=_joined(rank, 2, folder, timedelta(seconds=LIMIT)))
    config = DataParallelConfig(sparsity=0.95, feedback="local", exchange="two_phase")
    reducer = GradientReducer(config, device=DEVICE, kernels=kernels)
    lost_peers.watch(reducer, lambda job: job.group.step)
    began = time.perf_counter()
    try:
        for step in range(6):
            began = time.perf_counter()
            if step == 3 and rank == 1:
                _fail(how, reducer)
            for _ in range(2):
                reducer.begin(_gradients(rank, step, DEVICE)).finish()
            reducer.finish()
            reducer.end_step()
        said = "nothing"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        lost_ranks.state_failure(error)  # as sys.excepthook does
    row = {"rank": rank, "seconds": round(time.perf_counter() - began, 1), "said": said[:500]}
    Path(folder, str(rank)).write_text(json.dumps(row))
    os._exit(0)  # the end of the group would wait for what is queued


def _fail(how: str, reducer: GradientReducer) -> None:
    if how == "forward":
        raise ValueError("in the forward pass")
    if how == "before_compression":
        reducer.add_ons.before_compression = None  # type: ignore[method-assign,assignment]
    else:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def _rows(ranks: int, worker: Callable[..., None], name: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Run a case in processes of its own; yield a row for each rank, also of one that wrote none."""
    folder = mkdtemp()
    context = mp.get_context("spawn")
    processes = [context.Process(target=worker, args=(rank, folder, name)) for rank in range(ranks)]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(_ended(rank, p, folder) for rank, p in enumerate(processes)):
        time.sleep(0.2)
    for rank, process in enumerate(processes):
        process.kill()
        process.join()
        path = Path(folder, str(rank))
        nothing = {"rank": rank, "said": f"no result, exit {process.exitcode}"}
        yield {"case": name, **(json.loads(path.read_text()) if path.exists() else nothing)}


def _ended(rank: int, process: Any, folder: str) -> bool:
    """Return whether a rank has written its row, or will not: one that is stopped ends with the others."""
    return Path(folder, str(rank)).exists() or not process.is_alive() or (rank == 1 and _stopped(process.pid))


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def main(
    out: Annotated[Path, typer.Option(help="JSON lines, written row by row.")],
    only: Annotated[str, typer.Option(help="Run cases whose name contains it.")] = "",
) -> None:
    """Run all cases; exit with 1 if bits differ, or a rank gave no result."""
    failed = 0
    cases: list[tuple[str, int, Callable[..., None], float]] = [
        *((name, 4, _case, PATIENCE + 10.0) for name in CASES),
        *((how, 2, _failing, LIMIT + PATIENCE) for how in ("forward", "before_compression", "stop", "kill")),
    ]
    for name, ranks, worker, seconds in cases:
        if only not in name:
            continue
        for row in _rows(ranks, worker, name, seconds):
            with out.open("a") as file:
                print(json.dumps(row), file=file)
            print(row, flush=True)
            expected = row["rank"] == 1 and name in ("stop", "kill")
            failed += not expected and ("no result" in row.get("said", "") or row.get("said") == "nothing")
            failed += row.get("same", 0) != row.get("tensors", 0)
    sys.exit(failed > 0)


if __name__ == "__main__":
    typer.run(main)
