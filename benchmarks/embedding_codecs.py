"""Entropy stages for quantised embeddings and their gradients, on messages of a really trained model.

    python benchmarks/embedding_codecs.py [--format criteo --data train.txt.gz] [--markdown table.md]

Trains a DLRM (width 16, Adam) on one process for a number of steps, then takes the message that one of two
ranks would send: the distinct rows of every table in half a batch, and the sums of their gradients. Every
stage codes the same integers, ``round(x / (2 * bound))``; "ours" is the complete payload with header, step
widths and checksum, and its time has the quantising in it. zstandard and lz4 are measured if installed.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from dct_plugin.kernels import embedding as kernels
from dct_plugin.kernels import packed
from dct_plugin.kernels.embedding import FloatArray, Outgoing
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.recommender.data import ClickDataset, epoch_batches, load
from dct_plugin.recommender.models import DLRM

try:
    import zstandard
except ImportError:
    zstandard = None
try:
    import lz4.block as lz4
except ImportError:
    lz4 = None

DIM = 16


def message(
    clicks: ClickDataset, steps: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], int]:
    """Distinct rows, their gradients, entries of each table, and the bytes of all vectors undiminished."""
    model = DLRM(clicks.dense.shape[1], clicks.cardinalities, embedding_dim=DIM)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step, rows in enumerate(epoch_batches(clicks.num_train, batch, seed=0, epoch=0)):
        if step == steps:
            break
        dense, ids, label = (torch.from_numpy(column[rows]) for column in clicks.train)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(dense, ids), label).backward()
        optimizer.step()
    # One more step, of which only half the batch contributes to the gradient.
    half = batch // 2
    optimizer.zero_grad()
    binary_cross_entropy_with_logits(model(dense[:half], ids[:half]), label[:half]).backward()
    lookups = ids[:half].long() + model.tables.first_rows
    distinct = [torch.unique(lookups[:, table]) for table in range(lookups.shape[1])]
    at = torch.cat(distinct)
    gradient = model.tables.weight.grad
    assert gradient is not None
    lengths = [len(rows) * DIM for rows in distinct]
    return (
        model.tables.weight.detach()[at].reshape(-1),
        gradient[at].reshape(-1),
        lengths,
        lookups.numel() * DIM * 4,
    )


def entropy_bytes(q: np.ndarray, lengths: list[int]) -> float:
    """Order-0 entropy of every table, what an ideal static coder needs without its tables of frequencies."""
    total = 0.0
    for part in np.split(q, np.cumsum(lengths)[:-1]):
        _, counts = np.unique(part, return_counts=True)
        share = counts / counts.sum()
        total -= float((share * np.log2(share)).sum()) * len(part) / 8
    return total


def timed(function: Callable[[], Any], repeats: int = 15) -> tuple[Any, float]:
    """Result and median milliseconds of CPU time, in which other processes do not count."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        result = function()
        times.append(1e3 * (time.process_time() - started))
    return result, float(np.median(times))


def stages(part: Outgoing) -> list[tuple[str, float, float, float]]:
    """(name, bytes, ms to encode, ms to decode) of each stage; ours quantises in that time, too."""
    steps = np.repeat(2 * part.bounds, part.lengths)
    q = np.rint(part.x.numpy() / steps).astype(np.int16)
    plain = q.astype(np.int8 if np.abs(q).max(initial=0) < 128 else "<i2").tobytes()
    found = [("order-0 entropy", entropy_bytes(q, part.lengths.tolist()), 0.0, 0.0)]
    decoded = torch.empty(len(q))
    for name, bit_cost in (("rice", 1 << 20), ("packed", 0)):
        (encoded,), out = timed(lambda bit_cost=bit_cost: kernels.encode([part], bit_cost))
        payload = encoded.message[:-1]
        _, back = timed(lambda payload=payload: kernels.decode([payload], [part.lengths], [decoded]))
        found.append((f"ours, {name}", payload.numel(), out, back))
    backend = ReferenceBackend()  # the bytes of a device's kernels, in plain torch's time
    (encoded,), out = timed(lambda: packed.encode(backend, [part]))
    payload = encoded.message[:-1]
    _, back = timed(lambda: packed.decode(backend, [payload], [part.lengths], [decoded]))
    found.append(("ours, on a device", payload.numel(), out, back))
    others: list[tuple[str, Callable[[], bytes], Callable[[bytes], bytes]]] = [
        (f"zlib {level}", partial(zlib.compress, plain, level), zlib.decompress) for level in (1, 6, 9)
    ]
    if zstandard is not None:
        unpack = zstandard.ZstdDecompressor().decompress
        for level in (1, 3, 19):
            pack = zstandard.ZstdCompressor(level=level).compress
            others.append((f"zstandard {level}", partial(pack, plain), unpack))
    if lz4 is not None:
        others.append(("lz4", partial(lz4.compress, plain), lz4.decompress))
        best = partial(lz4.compress, plain, mode="high_compression", compression=12)
        others.append(("lz4 hc 12", best, lz4.decompress))
    for name, pack, unpack in others:
        smaller, out = timed(pack)
        same, back = timed(partial(unpack, smaller))
        if same != plain:
            raise RuntimeError(f"{name} does not give back what it was given")
        found.append((name, len(smaller), out, back))
    return found


def markdown(title: str, measured: dict[str, list[tuple[str, float, float, float]]], distinct: int) -> str:
    """A row per stage, per case its bytes and milliseconds (encode + decode)."""
    head = ["", *measured]
    rows = [head, ["---", *["--:"] * len(measured)], ["distinct rows", *[f"{distinct:,}"] * len(measured)]]
    for number, (name, *_) in enumerate(next(iter(measured.values()))):
        cells = [found[number][1:] for found in measured.values()]
        rows.append([name, *(f"{b:,.0f}" + (f" ({o:.2f} + {i:.2f})" if o + i else "") for b, o, i in cells)])
    return "\n".join([title, "", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", default="diabetes")
    parser.add_argument("--data")
    parser.add_argument("--batch", type=int, default=256, help="global batch of two ranks")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clicks = load(arguments.format, arguments.data)
    rows, gradient, lengths, dense = message(clicks, arguments.steps, arguments.batch)
    title = f"{clicks.name}: {dense:,} bytes undiminished, {4 * len(rows):,} distinct"
    print(f"{title} ({dense / len(rows) / 4:.1f}x)")
    square = torch.segment_reduce(gradient.square(), "mean", lengths=torch.tensor(lengths))
    rms = square.to(torch.float64).sqrt().numpy()
    cases: list[tuple[str, torch.Tensor, FloatArray]] = [
        *((f"embeddings, bound {b}", rows, np.full(len(lengths), b)) for b in (0.01, 0.03)),
        *((f"gradients, bound {b} rms", gradient, b * rms) for b in (0.1, 0.3)),
    ]
    measured = {}
    for case, values, bounds in cases:
        measured[case] = stages(Outgoing(values, np.array(lengths), bounds))
        print(f"\n{case:28} {'bytes':>8} {'fewer':>7} {'encode ms':>10} {'decode ms':>10}")
        for name, size, out, back in measured[case]:
            print(f"{name:28} {size:8.0f} {dense / size:6.1f}x {out:10.2f} {back:10.2f}")
    if arguments.markdown:
        text = markdown(f"{title}.", measured, 4 * len(rows))
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
