"""Held-out loss and bytes of a character-level GPT in megatron-core, by compressor class of its activations.

Two ranks on the CPU (gloo): two pipeline stages, or two tensor-parallel ranks with sequence parallelism. Run
as root, the ranks live in two network namespaces joined by one link, and the bytes are what that link's
interface counters saw, in each direction; else bytes are not reported. Results are kept by run: a study that
was stopped goes on where it was.

    python benchmarks/studies/activations.py --text input.txt --output table.md
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from megatron_quality import measure, serve

from dct_plugin.recommender.intervals import paired

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.megatron_gpt import Job, Training

OFF = {"enabled": False}
PP, TP = "PP 2", "TP 2"


def classes() -> dict[str, dict[str, Any]]:
    """Options of ``dct.model_parallel.pipeline`` by the name of their row."""

    def threshold(sparsity: float, kind: str = "auto") -> dict[str, Any]:
        forward = {"method": "threshold", "sparsity": sparsity, "value_dtype": kind}
        return {"forward": forward, "backward": {"method": "answer", "value_dtype": kind}}

    def both_ways(method: str, **settings: Any) -> dict[str, Any]:
        return {"forward": {"method": method, **settings}}

    def apart(name: str, section: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """A method both ways, forward alone and backward alone."""
        forward = {"forward": section["forward"], "backward": "none"}
        backward = {"forward": "none", "backward": section["forward"]}
        return {name: section, f"{name}, forward": forward, f"{name}, backward": backward}

    return {
        "threshold 0.9": threshold(0.9),
        **apart("threshold 0.9, int4", threshold(0.9, "int4")),
        "threshold 0.65, int8": threshold(0.65, "int8"),
        "quantise 4 bits": both_ways("quantise", bits=4),
        **apart("quantise 2 bits", both_ways("quantise", bits=2)),
        "quantise 1 bit": both_ways("quantise", bits=1),
        **apart("transform 1.42 bits", both_ways("transform", rate=1.42)),
        "transform 4 bits": both_ways("transform", rate=4.0),
    }


def job_of(arguments: argparse.Namespace, name: str, seed: int) -> Job:
    """``name`` is the layout, a colon, and "dense" or a row of :func:`classes`."""
    layout, _, row = name.partition(": ")
    topology = {"pp": 2} if layout == PP else {"tp": 2, "sequence_parallel": True}
    dct = None
    if row != "dense":
        section = {**classes()[row], "warmup_steps": arguments.warmup}
        if layout == PP:
            parts = {"pipeline": section}
        else:
            parts = {"tensor": {**section, "gather": True}}
        dct = {"data_parallel": OFF, "model_parallel": parts}
    return Job(
        layers=arguments.layers, hidden=arguments.hidden, seq=arguments.seq, lr=arguments.lr,
        micro_batch=arguments.micro_batch, micro_batches=arguments.micro_batches, steps=arguments.steps,
        tied_embeddings=False, evaluation_rounds=arguments.evaluations, seed=seed, dct=dct,
        before_step=set_rate, **topology,
    )  # fmt: skip


def set_rate(training: Training, step: int) -> None:
    """Set the learning rate: it rises for 20 steps and falls with a cosine to a twentieth."""
    job = training.job
    fall = 0.05 + 0.475 * (1 + math.cos(math.pi * step / job.steps))
    for group in training.optimizer.param_groups:
        group["lr"] = job.lr * min(1.0, (step + 1) / 20) * fall


def table(rows: list[dict[str, Any]], margin: float) -> str:
    """Markdown: one line per row name, means over the seeds, differences paired by seed."""
    lines = [
        "| setting | seeds | held-out loss | - dense (95 %) | inside "
        "| kB forward | fewer | kB backward | fewer back |",
        "|---|--:|--:|--:|:-:|--:|--:|--:|--:|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = {row["seed"]: row for row in rows if row["name"] == name}
        plain = {row["seed"]: row for row in rows if row["name"] == f"{name.split(': ')[0]}: dense"}
        both = [(mine[seed], plain[seed]) for seed in mine.keys() & plain.keys()]
        if not both:
            continue
        cells = [name, str(len(both)), f"{statistics.fmean(row['held_out'] for row, _ in both):.4f}", "", ""]
        if not name.endswith(": dense"):
            interval = paired([own["held_out"] - dense["held_out"] for own, dense in both])
            cells[3] = str(interval)
            if interval.half_width is not None:
                cells[4] = "yes" if interval.inside(margin) else "no"
        for way in ("sent", "received"):
            own, dense = (statistics.fmean(pair[which][way] for pair in both) for which in (0, 1))
            cells += [f"{own / 1e3:.2f}", f"{dense / own:.1f}x"] if own else ["-", "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="text file, plain or .gz; generated text without it")
    parser.add_argument("--results", default="activations.jsonl", help="file that keeps the runs")
    parser.add_argument("--output", help="markdown file; standard output without it")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--layouts", nargs="+", default=[PP, TP], choices=[PP, TP])
    parser.add_argument("--classes", nargs="*", default=list(classes()), metavar="ROW")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=20, help="dense steps at the start")
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--evaluations", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after that many")
    parser.add_argument("--margin", type=float, default=0.02)
    parser.add_argument("--port", type=int, default=29741)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--link", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments, lambda name, seed: job_of(arguments, name, seed))
        return
    wanted = [
        (f"{layout}: {row}", seed)
        for seed in arguments.seeds
        for layout in arguments.layouts
        for row in ("dense", *arguments.classes)
    ]
    rows = measure(wanted, Path(arguments.results), arguments.seconds)
    text = table(rows, arguments.margin)
    if arguments.output:
        Path(arguments.output).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
