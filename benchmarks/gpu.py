"""Figures on a GPU: selection, decoding and whole steps, as shares of the device's copy bandwidth and in ms.

    python benchmarks/gpu.py --json out/gpu.json          # all of it: a minute and a half on an H100
    python benchmarks/gpu.py --numel 67108864 --no-steps  # kernels alone

Kernel times are those of many calls in a row, by CUDA events: what the device takes, unless the host cannot
keep up. Steps are those of a GPT with 124 million parameters: in one process with messages that go back to
where they came from (what DCT costs the device), and in two processes that share this device, with torch DDP
and AdamW. These exchange over nccl where it is 2.30 or newer (it takes several ranks on one GPU then, with
``NCCL_MULTI_RANK_GPU_ENABLE=1``), else over gloo, whose transfers go through the host. No slow link is in
between: the figures say what DCT costs, not what it saves.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import sys
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
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))

from no_gpu import DEVICE, DRY, device_ids, stand_in

import dct_plugin
from dct_plugin import Compressor
from dct_plugin.codecs.message import MessageWriter
from dct_plugin.codecs.payload import Payload, payload_bound
from dct_plugin.codecs.slots import slot_bytes
from dct_plugin.codecs.stats import Figures, Stats, read_figures
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.kernels import Job, get_backend
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.recommender.links.interleave import orders

stand_in()
#: Words and tokens of a sequence; width and layers of the model.
VOCABULARY, LENGTH, WIDTH, LAYERS = (100, 16, 64, 1) if DRY else (50_304, 512, 768, 12)
#: Runs of a kernel before the measured ones, and of those.
RUNS = 1 if DRY else 3
AIM = 0.7  # of the copy bandwidth, on the bytes that selection has to move
Row = dict[str, Any]


# ---- kernels ------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Of one call, from the fastest of three runs of ``repeats`` calls."""
    for _ in range(RUNS):
        call()
    found = []
    for _ in range(RUNS):
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
    if DRY:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event for event in profile.key_averages() if event.device_time_total]


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of one call."""
    return {event.key: event.device_time_total for event in kernels_of(call)}


def selection(numel: int, density: float, repeats: int) -> tuple[float, list[Row]]:
    """Copy bandwidth (bytes per second, read and written), and one row per way of selecting and reading."""
    kernels, reference = get_backend(DEVICE), ReferenceBackend()
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    grad = torch.randn(numel, device=DEVICE, generator=generator)
    start = 0.3 * torch.randn(numel, device=DEVICE, generator=generator)
    residual, apart, target = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    copy_ms = milliseconds(lambda: target.copy_(grad), repeats)
    bandwidth = 8 * numel / copy_ms * 1e3
    kept = int(density * numel)
    tau = (grad + start).abs().kthvalue(numel - kept + 1).values
    capacity = min(numel, 2 * kept)
    out = torch.empty(payload_bound(numel, capacity, ValueDtype.BF16), dtype=torch.uint8, device=DEVICE)
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
    if not kernels.lengths_on_host:
        writer = MessageWriter(torch.device(DEVICE))
        writer.reserve(payload_nbytes).copy_(payload)
        counts = torch.tensor([payload_nbytes, 0, 0, 0], device=DEVICE)
        writer.advance(Stats.on_device(Figures(counts)))
        room = slot_bytes(payload_nbytes)
        slots = torch.empty(2 * room, dtype=torch.uint8, device=DEVICE)
        bounds = [(0, room), (room, 2 * room)]
        add("write a slot", lambda: kernels.write_slots(writer, slots, bounds[:1], 0), 2 * payload_nbytes)
        kernels.write_slots(writer, slots, bounds[1:], 0)
        add("sum of 2 slots", lambda: kernels.prepare_sum(slots, bounds, [target], 0.5)(), 2 * once)
    return bandwidth, rows


# ---- steps --------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """124 million parameters (GPT-2's smallest), tied embeddings."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean loss of predicting ``wanted`` from ``x``, both int64 [sequences, length]."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        hidden = self.layers(hidden, mask=mask, is_causal=True)
        return functional.cross_entropy((hidden @ self.tokens.weight.T).flatten(0, 1), wanted.flatten())


class Training:
    """A model, its optimizer and a batch; ``step(reduce)`` is one training step."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        self.model = GPT().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-4, fused=True)
        self.batch = torch.randint(VOCABULARY, (batch, LENGTH), device=DEVICE)

    def step(self, forward: nn.Module, reduce: Callable[[], None] | None = None) -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = forward(self.batch, self.batch)
        loss.backward()
        if reduce is not None:
            reduce()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class BackToSender:
    """Compresses every gradient into one message, and puts what it holds in their place, in a slot as a
    reduction does.
    """

    def __init__(self, model: nn.Module, sparsity: float) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.numel() >= 4096]
        self.streams = [Compressor(sparsity=sparsity, name=str(i)) for i in range(len(self.parameters))]
        self.kernels, self.writer = get_backend(DEVICE), MessageWriter(torch.device(DEVICE))

    def __call__(self) -> None:
        self.writer.clear()
        grads = [parameter.grad.view(-1) for parameter in self.parameters if parameter.grad is not None]
        pairs = list(zip(self.streams, grads, strict=True))
        with self.kernels.batched():
            encoded = [s.encode(g, self.writer, clear=True) for s, g in pairs]
        stats = [part for each in encoded for part in each.stats]
        if self.kernels.lengths_on_host:
            self.kernels.sum_messages([self.writer.message], grads, 1.0)
        else:
            bounds = [(0, slot_bytes(sum(sum(each.sizes) for each in self.writer.placed)))]
            slot = torch.empty(bounds[0][1], dtype=torch.uint8, device=DEVICE)
            self.kernels.write_slots(self.writer, slot, bounds, 0)
            read_figures(stats, [self.kernels.prepare_sum(slot, bounds, grads, 1.0)()])
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
    row: Row = {"ms": statistics.median(times), "min_ms": min(times), "peak_mib": memory}
    return {**row, "host_waits": waits, "times": times}


def one_process(batch: int, sparsity: float) -> list[Row]:
    rows = []
    for what in ("dense", "dct"):
        job = Training(batch)
        reduce = BackToSender(job.model, sparsity) if what == "dct" else None
        # Thresholds are measured in steps 0, 1, 2, 4, 8 and 16: step 17 on is what most steps are.
        row = timed_steps(
            lambda j=job, r=reduce: j.step(j.model, r), warm=max(WARM - 3, 1), steps=ROUNDS if DRY else 12
        )
        del row["times"]
        row["reduction_launches"] = 0
        if reduce is not None:
            row["reduction_launches"] = sum(event.count for event in kernels_of(reduce))
        rows.append({"what": f"{what}, one process", **row})
        del job, reduce
        torch.cuda.empty_cache()
    return rows


#: Methods of two processes; a section for DCT. Without a start, which is dense.
SECTION = {"warmup_steps": 2, "sparsity_warmup_steps": 0}
METHODS: dict[str, dict[str, Any] | None] = {
    "dense fp32": None,
    "dense bf16": None,
    "PowerSGD, rank 4": None,
    "dct": SECTION,
    "dct, local feedback": {**SECTION, "feedback": "local"},
}
if DRY:  # torch's hook for bf16 needs nccl
    METHODS = {what: METHODS[what] for what in ("dense fp32", "dct")}
#: Thresholds are measured in steps 0, 1, 2, 4, 8 and 16 after the start: later ones are what most steps are.
WARM, TURN, ROUNDS = (2, 1, 1) if DRY else (20, 4, 6)


def nccl_version() -> int:
    """Return the version of the nccl that is loaded, as 23004 for 2.30.4."""
    if DRY:
        return 0
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def _job(what: str, batch: int) -> tuple[Callable[[], None], Any]:
    """Return a function that makes one training step, and what DCT has attached."""
    training = Training(batch)
    wrapped = DistributedDataParallel(training.model, device_ids=device_ids(), gradient_as_bucket_view=True)
    state = None
    if what == "dense bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    elif what.startswith("PowerSGD"):
        powersgd = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(powersgd, powerSGD_hook.powerSGD_hook)
    elif (section := METHODS[what]) is not None:
        state = dct_plugin.attach(wrapped, training.optimizer, {"data_parallel": section})
    return lambda: training.step(wrapped), state


def _rank(rank: int, folder: str, backend: str, batch: int, rows: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", NCCL_MULTI_RANK_GPU_ENABLE="1")
    torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    jobs, memory, times = {}, {}, {}

    def note(row: Row) -> None:
        if rank == 0:
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")

    for what in METHODS:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        jobs[what] = _job(what, batch)
        for _ in range(WARM):
            jobs[what][0]()
        memory[what], times[what] = (torch.cuda.max_memory_allocated() - before) / 2**20, []
    for _, order in zip(range(ROUNDS), orders(list(METHODS)), strict=False):
        for what in order:
            dist.barrier()
            times[what] += (turn := timed_steps(jobs[what][0], warm=1, steps=TURN)["times"])
            note({"what": what, "turn": turn})
    for what, (step, state) in jobs.items():
        row: Row = {"what": f"{what}, two processes over {backend}", "ms": statistics.median(times[what])}
        row |= {"min_ms": min(times[what]), "max_ms": max(times[what]), "peak_mib": memory[what]}
        row["sent_mb"] = None
        if state is not None:
            before = sent_bytes(state)
            step()
            torch.cuda.synchronize()
            row["sent_mb"] = (sent_bytes(state) - before) / 1e6
        row["host_waits"] = timed_steps(step, warm=1, steps=1)["host_waits"]
        note(row)
    if rank == 0:
        with torch.profiler.profile() as profile:
            jobs["dct"][0]()
            torch.cuda.synchronize()
        profile.export_chrome_trace(f"{folder}/trace.json.gz")
    else:
        jobs["dct"][0]()
    dist.barrier()
    dist.destroy_process_group()


def sent_bytes(state: Any) -> float:
    """Return the bytes of all messages of a rank so far."""
    return float(sum(part.sent_bytes for part in state.metrics.summary().classes.values()))


def two_processes(batch: int, trace: Path | None, rows: Path | None) -> list[Row]:
    """Compare methods in two processes that share this device. A process that is ended leaves in ``rows``
    what it has measured so far.
    """
    backend = "nccl" if nccl_version() >= 23000 else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        rows = rows or Path(folder, "rows.jsonl")
        rows.unlink(missing_ok=True)
        mp.spawn(_rank, (folder, backend, batch, rows), nprocs=2)
        if trace is not None:
            shutil.copyfile(f"{folder}/trace.json.gz", trace)
        lines: list[Row] = [json.loads(line) for line in rows.read_text().splitlines()]
        return [line for line in lines if "ms" in line]


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
        "kernels": get_backend(DEVICE).name,
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
    trace: Annotated[Path | None, typer.Option(help="Write a trace of a DCT step here (.json.gz).")] = None,
) -> None:
    """Measure the Triton kernels and whole steps on a GPU."""
    console = Console(width=140)
    if not torch.cuda.is_available() and not DRY:
        console.print("There is no CUDA device here: nothing was measured.")
        raise typer.Exit(1)
    if DRY:
        numel, repeats, batch = 1 << 12, 1, 2
        console.print("A dry run: the figures mean nothing.")
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
    if steps:
        result["one_process"] = one_process(batch, 1 - density)
        show(result["one_process"], "steps: one process", console)
        write()
        result["two_processes"] = two_processes(batch, trace, json_file and json_file.with_suffix(".jsonl"))
        show(result["two_processes"], "steps: two processes on this device", console)
        write()


if __name__ == "__main__":
    typer.run(main)
