"""Figures on a GPU: selection, decoding and whole steps, as shares of the device's copy bandwidth and in ms.

    python benchmarks/gpu.py --json out/gpu.json          # all of it, under eight minutes
    python benchmarks/gpu.py --numel 67108864 --no-steps  # kernels alone

Kernel times are those of many calls in a row, by CUDA events: what the device takes, unless the host cannot
keep up. Steps are those of a GPT with 124 million parameters: in one process with messages that go back to
where they came from (what DCT costs the device), and in two processes on this device over gloo, whose
transfers go through the host: not what nccl would give.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dct_plugin import Compressor
from dct_plugin.codecs import MessageWriter, Payload, Stats, ValueDtype, payload_bound, read_messages
from dct_plugin.codecs.slots import slot_bytes
from dct_plugin.codecs.stats import read_figures
from dct_plugin.kernels import Job, get_backend
from dct_plugin.kernels.reference import ReferenceBackend

AIM = 0.7  # of the copy bandwidth, on the bytes that selection has to move
Row = dict[str, Any]


# ---- kernels ------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Of one call, from the fastest of three runs of ``repeats`` calls."""
    for _ in range(3):
        call()
    found = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / repeats)
    return min(found)


def kernels_of(call: Callable[[], Any]) -> list[Any]:
    """The profiler's averages of what one call queues on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event for event in profile.key_averages() if event.device_time_total]


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of one call."""
    return {event.key: event.device_time_total for event in kernels_of(call)}


def selection(numel: int, density: float, repeats: int) -> tuple[float, list[Row]]:
    """Copy bandwidth (bytes per second, read and written), and one row per way of selecting and reading."""
    kernels, reference = get_backend("cuda"), ReferenceBackend()
    generator = torch.Generator(device="cuda").manual_seed(0)
    grad = torch.randn(numel, device="cuda", generator=generator)
    start = 0.3 * torch.randn(numel, device="cuda", generator=generator)
    residual, apart, target = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    copy_ms = milliseconds(lambda: target.copy_(grad), repeats)
    bandwidth = 8 * numel / copy_ms * 1e3
    kept = int(density * numel)
    tau = (grad + start).abs().kthvalue(numel - kept + 1).values
    capacity = min(numel, 2 * kept)
    out = torch.empty(payload_bound(numel, capacity, ValueDtype.BF16), dtype=torch.uint8, device="cuda")
    rows: list[Row] = [{"what": "copy_", "ms": copy_ms, "moved_bytes": 8 * numel, "share_of_copy": 1.0}]

    def add(what: str, call: Callable[[], Any], moved: int, times: int = repeats, less: float = 0.0) -> None:
        row: Row = {"what": what, "ms": milliseconds(call, times) - less, "moved_bytes": moved}
        row["share_of_copy"] = moved / row["ms"] * 1e3 / bandwidth
        row["kernels_us"] = kernel_times(call)
        rows.append(row)

    options: dict[str, Any] = {"capacity": capacity, "value_dtype": ValueDtype.BF16}
    payload_nbytes = kernels.compress(Job(grad, start, tau, out, residual_out=apart, **options)).nbytes
    payload = out[:payload_nbytes].clone()
    for source in (grad, grad.bfloat16(), grad.half()):
        label = str(source.dtype).removeprefix("torch.")
        moved = numel * (source.element_size() + 8) + payload_nbytes

        def beside(source: Tensor = source) -> None:
            kernels.compress(Job(source, start, tau, out, residual_out=apart, **options))

        def in_place(source: Tensor = source) -> None:
            residual.copy_(start)  # or it would grow from call to call; its time is taken off
            kernels.compress(Job(source, residual, tau, out, **options))

        add(f"select {label}, residual apart", beside, moved)
        add(f"select {label}, residual in place", in_place, moved, less=copy_ms)
    moved = numel * 4 + payload_nbytes
    add("select float32, no residual", lambda: kernels.compress(Job(grad, None, tau, out, **options)), moved)
    plain = {**options, "residual_out": apart}
    moved = 12 * numel + payload_nbytes
    add("plain torch", lambda: reference.compress(Job(grad, start, tau, out, **plain)), moved, times=3)
    add("torch.topk of |x|", lambda: torch.topk(grad.abs(), kept, sorted=False), 4 * numel, times=3)
    for samples in (8192, 65_536):

        def threshold(samples: int = samples) -> None:
            kernels.sample_threshold(grad, start, density, samples, 1)

        add(f"threshold from {samples} samples", threshold, 8 * samples)
    opened = Payload.from_tensor(payload, verify=False)
    once = payload_nbytes + 8 * opened.nnz
    add("decode and add", lambda: kernels.decode_add(opened, target), once)
    add("sum of 2 messages", lambda: kernels.sum_messages([payload, payload], [target], 0.5), 2 * once)
    if kernels.writes_slots:
        writer = MessageWriter(torch.device("cuda"))
        writer.reserve(payload_nbytes).copy_(payload)
        counts = torch.tensor([payload_nbytes, 0, 0, 0], device="cuda")
        writer.advance(Stats.on_device(counts))
        room = slot_bytes([payload_nbytes])
        frames = torch.empty(2 * room, dtype=torch.uint8, device="cuda")
        halves, bounds = frames.split(room), [(0, room), (room, 2 * room)]
        add("write a frame", lambda: kernels.write_slot(writer, halves[0], 0), 2 * payload_nbytes)
        kernels.write_slot(writer, halves[1], 0)
        add("sum of 2 frames", lambda: kernels.sum_slots(frames, bounds, [target], 0.5), 2 * once)
    return bandwidth, rows


# ---- steps --------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """124 million parameters (GPT-2's smallest), tied embeddings."""

    def __init__(self, vocabulary: int = 50_304, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        hidden = self.layers(hidden, mask=mask, is_causal=True)
        return functional.cross_entropy((hidden @ self.tokens.weight.T).flatten(0, 1), x.flatten())


class Training:
    """A model, its optimizer and a batch; ``step(reduce)`` is one training step."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        self.model = GPT().cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, fused=True)
        self.batch = torch.randint(50_304, (batch, 512), device="cuda")

    def step(self, forward: nn.Module, reduce: Callable[[], None] | None = None) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward(self.batch)
        loss.backward()
        if reduce is not None:
            reduce()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class BackToSender:
    """Compresses every gradient into one message, and puts what it holds in their place, in a frame as a
    reduction does.
    """

    def __init__(self, model: nn.Module, sparsity: float) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.numel() >= 4096]
        self.streams = [Compressor(sparsity=sparsity, name=str(i)) for i in range(len(self.parameters))]
        self.kernels, self.writer = get_backend("cuda"), MessageWriter(torch.device("cuda"))
        self.size = 0  # of the last message

    def __call__(self) -> None:
        self.writer.clear()
        grads = [parameter.grad.view(-1) for parameter in self.parameters if parameter.grad is not None]
        pairs = list(zip(self.streams, grads, strict=True))
        with self.kernels.batched():
            encoded = [s.encode(g, [(0, g.numel(), self.writer)], clear=True) for s, g in pairs]
        stats = [part for each in encoded for part in each.stats]
        late = 1
        if self.size and self.kernels.writes_slots:
            frame = torch.empty(slot_bytes([self.size]), dtype=torch.uint8, device="cuda")
            self.kernels.write_slot(self.writer, frame, 0)
            wrong, missing = self.kernels.sum_slots(frame, [(0, frame.numel())], grads, 1.0)
            _, (late,) = read_figures(stats, [wrong.to(torch.int64), missing])
            if late:
                for grad in grads:
                    grad.zero_()
        if late:
            (message,) = read_messages([self.writer])
            self.kernels.sum_messages([message], grads, 1.0)
        self.size = sum(part.nbytes for part in stats)
        for stream, each in zip(self.streams, encoded, strict=True):
            stream.observe(each)
            stream.end_step()


def timed_steps(step: Callable[[], None], warm: int, steps: int) -> Row:
    """Median ms, peak memory, and how often the host waited for the device in a step."""
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(warning.message) for warning in caught)
    memory = torch.cuda.max_memory_allocated() / 2**20
    return {"ms": statistics.median(times), "min_ms": min(times), "peak_mib": memory, "host_waits": waits}


def one_process(batch: int, sparsity: float) -> list[Row]:
    rows = []
    for what in ("dense", "dct"):
        job = Training(batch)
        reduce = BackToSender(job.model, sparsity) if what == "dct" else None
        # Thresholds are measured in steps 0, 1, 2, 4, 8 and 16: step 17 on is what most steps are.
        row = timed_steps(lambda j=job, r=reduce: j.step(j.model, r), warm=17, steps=12)
        row["reduction_launches"] = 0
        if reduce is not None:
            row["reduction_launches"] = sum(event.count for event in kernels_of(reduce))
        rows.append({"what": f"{what}, one process", **row})
        del job, reduce
        torch.cuda.empty_cache()
    return rows


def _rank(rank: int, folder: str, batch: int, sparsity: float) -> None:
    from dct_plugin import DCTState, dct_hook

    store = dist.FileStore(f"{folder}/store", 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rows = []
    for what in ("dense fp32", "dense bf16", "dct"):
        job = Training(batch)
        wrapped = DistributedDataParallel(job.model, device_ids=[0])
        if what == "dct":
            section = {"data_parallel": {"sparsity": sparsity}}
            wrapped.register_comm_hook(DCTState(section), dct_hook)
        elif what == "dense bf16":
            wrapped.register_comm_hook(None, bf16_compress_hook)
        row = timed_steps(lambda j=job, w=wrapped: j.step(w), warm=5, steps=5)
        rows.append({"what": f"{what}, two processes over gloo", **row})
        del job, wrapped
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps(rows))


def two_processes(batch: int, sparsity: float) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, batch, sparsity), nprocs=2)
        rows: list[Row] = json.loads(Path(f"{folder}/rank0.json").read_text())
        return rows


# ---- the command --------------------------------------------------------------------------------------


def environment() -> Row:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_mib": properties.total_memory // 2**20,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "kernels": get_backend("cuda").name,
    }


def show(rows: list[Row], title: str, console: Console) -> None:
    columns = [key for key in rows[0] if key != "kernels_us"]
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in columns))
    console.print(table)


def main(
    numel: Annotated[int, typer.Option(help="Entries of the tensor.")] = 1 << 26,
    density: Annotated[float, typer.Option(help="Share of entries kept.")] = 0.01,
    repeats: Annotated[int, typer.Option(help="Calls in a row.")] = 20,
    batch: Annotated[int, typer.Option(help="Sequences of 512 tokens in a step.")] = 8,
    steps: Annotated[bool, typer.Option(help="Measure whole steps, too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here, too.")] = None,
) -> None:
    """Measure the Triton kernels and whole steps on a GPU."""
    console = Console(width=140)
    if not torch.cuda.is_available():
        console.print("There is no CUDA device here: nothing was measured.")
        raise typer.Exit(1)
    result: Row = {"environment": environment(), "numel": numel, "density": density}
    bandwidth, rows = selection(numel, density, repeats)
    result |= {"copy_bytes_per_second": bandwidth, "kernels": rows}
    show(rows, f"{numel:,} entries, {density:.2%} kept, copy_ at {bandwidth / 1e9:.0f} GB/s", console)
    best = max(row["share_of_copy"] for row in rows if row["what"].startswith("select"))
    console.print(f"best selection: {best:.0%} of the copy bandwidth (aim: {AIM:.0%})")

    def write() -> None:
        if json_file:
            json_file.write_text(json.dumps(result, indent=1) + "\n")

    write()
    for name, measure in (("one_process", one_process), ("two_processes", two_processes)):
        if steps:
            result[name] = measure(batch, 1 - density)
            show(result[name], f"steps: {name}", console)
            write()


if __name__ == "__main__":
    typer.run(main)
