"""Measure the loss of compressed gradients under Muon: thresholds, few bits, rows, differences of momentum.

``many_streams.py``'s GPT (106,432 parameters) and text. Muon trains the matrices of the blocks, AdamW the
embeddings, in one process: every compressor has its part of the batch and its own residuals, decoded payloads
are averaged as the direct exchange does. AdamW's tensors are thresholded at 0.99 with step-ahead in all rows,
so that rows differ by what is done with Muon's matrices alone. Held-out loss in nats per character, paired
with the dense run of the seed; bytes are those of the matrices' payloads after the start, against fp32.

- ``0.99``, ``0.9 int4``: thresholds with local error feedback; sparsity and type of values.
- ``all int8``: all entries in few bits, with error feedback.
- ``momentum 0.99``: EF21-Muon (arXiv:2510.00643): a rank sends the part of its momentum that its receivers
  lack. That is error feedback over the differences of the momentum between steps.
- ``rows 1/4 int4``: Dion2 (microsoft/dion): the rows with the largest sums of absolute values, over all
  ranks, are sent, orthogonalised and decayed; the others gather momentum.
- ``ahead 0.99``: step-ahead, with the residual in units of a Muon step by the momentum's Frobenius norm.

    python benchmarks/studies/muon.py --text wikitext2_valid.txt.gz --results FILE
    python benchmarks/studies/muon.py --text wikitext2_valid.txt.gz --results FILE --settings "rows 1/4 int4"
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from adam import SYMBOLS, held_out_loss, model_of, text_of
from many_streams import rows_of
from optimizers import compare_residuals, look_ahead
from tasks import BATCH, LAYERS, LR, LR_WARMUP, SEQUENCE, WEIGHT_DECAY, WIDTH
from torch import Tensor, nn
from torch.nn import functional

from dct_plugin import Compressor
from dct_plugin.recommender.intervals import paired

#: Dense steps, and those in which sparsity rises.
WARMUP, RAMP = 60, 120
#: Momentum of Muon, and its learning rate as a multiple of AdamW's.
MOMENTUM, MUON_LR = 0.95, 6.0
START = {"warmup_steps": WARMUP, "sparsity_warmup_steps": RAMP}
SETTINGS = [
    "0.99", "0.9", "0.9 int4", "0.8 int2", "all int8", "all int4", "all int2",
    "momentum 0.99", "momentum 0.9 int4", "momentum 0.8 int2", "momentum all int2",
    "rows 1/4 int4", "rows 1/8 int8", "rows 1/16 bf16",
    "ahead 0.99", "ahead 0.9 int4", "ahead 0.8 int2",
]  # fmt: skip


class Setting(NamedTuple):
    """Treatment of Muon's matrices, read from a name of :data:`SETTINGS`."""

    kind: str
    """threshold, momentum, rows, or ahead."""
    sparsity: float
    value_dtype: str
    rows: float = 1.0
    """Share of the rows that is sent."""

    @classmethod
    def of(cls, name: str) -> Setting:
        kind, *words = name.split() if name.split()[0].isalpha() else ("threshold", *name.split())
        if kind == "all":
            kind, words = "threshold", ["all", *words]
        share, *dtype = words
        value_dtype = dtype[0] if dtype else "bf16"
        if kind == "rows":
            return cls(kind, 0.0, value_dtype, 1 / int(share.split("/")[1]))
        return cls(kind, 0.0 if share == "all" else float(share), value_dtype)

    @property
    def section(self) -> dict[str, Any]:
        """The settings of a compressor of matrices."""
        feedback = "none" if self.kind == "rows" else "local"
        start = {} if self.kind == "rows" or self.sparsity == 0 else START
        return {"sparsity": self.sparsity, "value_dtype": self.value_dtype, "feedback": feedback, **start}


class Matrices:
    """The matrices that Muon trains: what each compressor sends of them, and the optimizer.

    Args:
        named: The matrices by name.
        setting: What is done with them; None trains dense.
        ranks: Compressors.
    """

    def __init__(self, named: dict[str, nn.Parameter], setting: Setting | None, ranks: int) -> None:
        self.named, self.setting, self.ranks = named, setting, ranks
        keeps_momentum = setting is not None and setting.kind in ("momentum", "rows")
        self.optimizer = torch.optim.Muon(
            named.values(), lr=LR * MUON_LR, weight_decay=WEIGHT_DECAY,
            momentum=0.0 if keeps_momentum else MOMENTUM, nesterov=not keeps_momentum,
            adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        self.streams: list[dict[str, Compressor]] = []
        if setting is not None:
            self.streams = [
                {name: Compressor(name=name, rank=rank, **setting.section) for name in named}
                for rank in range(ranks)
            ]
        zeros = {name: torch.zeros_like(p) for name, p in named.items()}
        self.momentum = [{name: zero.clone() for name, zero in zeros.items()} for _ in range(ranks)]
        self.sent_before = [{name: zero.clone() for name, zero in zeros.items()} for _ in range(ranks)]
        self.received = {name: zero.clone() for name, zero in zeros.items()}
        self.nbytes = self.step_count = 0

    def through(self, rank: int, name: str, tensor: Tensor) -> Tensor:
        """Return what the receivers of a tensor have."""
        stream = self.streams[rank][name]
        payload = stream.compress(tensor)
        if self.step_count >= WARMUP + RAMP:
            self.nbytes += payload.nbytes
        return stream.decompress(payload)

    def exchange(self, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the mean that the optimizer gets, of each rank's gradients."""
        dense = self.setting is None or (self.setting.kind == "rows" and self.step_count < WARMUP)
        means = {}
        for name in self.named:
            each = [own[name] for own in gradients]
            if self.setting is not None and self.setting.kind in ("momentum", "rows"):
                for own, gradient in zip(self.momentum, each, strict=True):
                    own[name].mul_(1.0 if self.setting.kind == "rows" and not dense else MOMENTUM).add_(
                        gradient
                    )
            if dense:
                means[name] = sum(each) / self.ranks
                if self.setting is not None:
                    means[name] = sum(own[name] for own in self.momentum) / self.ranks
            elif self.setting is not None and self.setting.kind == "momentum":
                for rank, gradient in enumerate(each):
                    now = gradient + MOMENTUM * self.momentum[rank][name]
                    difference = now - self.sent_before[rank][name]
                    self.sent_before[rank][name] = now
                    self.received[name] += self.through(rank, name, difference) / self.ranks
                means[name] = self.received[name].clone()
            elif self.setting is not None and self.setting.kind == "rows":
                means[name] = self._rows(name)
            else:
                means[name] = (
                    sum(self.through(rank, name, each[rank]) for rank in range(self.ranks)) / self.ranks
                )
        return means

    def _rows(self, name: str) -> Tensor:
        """Return the mean of the rows that are sent, and zeros for the others."""
        assert self.setting is not None
        norms = sum(own[name].abs().sum(1) for own in self.momentum)
        rows = norms.topk(max(1, round(self.setting.rows * len(norms)))).indices
        mean = torch.zeros_like(self.momentum[0][name])
        for rank, own in enumerate(self.momentum):
            decoded = self.through(rank, name, own[name][rows].contiguous())
            mean[rows] += decoded / self.ranks
            own[name][rows] -= (1 - MOMENTUM) * decoded
        if self.step_count >= WARMUP + RAMP:
            self.nbytes += self.ranks * 4 * len(norms)
        return mean

    def displacement(self, rank: int, name: str, lr: float) -> Tensor:
        """Return what a rank's unsent residual would move a matrix by, in units of a Muon step.

        A Muon step has the Frobenius norm of sqrt(smaller side), times learning rate and scale.
        """
        residual = self.streams[rank][name].residual
        buffer = self.optimizer.state[self.named[name]].get("momentum_buffer")
        if residual is None or buffer is None:
            return torch.zeros_like(self.named[name])
        rows, columns = buffer.shape
        scale = lr * 0.2 * math.sqrt(max(rows, columns)) * math.sqrt(min(rows, columns))
        step = residual.current.view_as(buffer) * (scale / (float(buffer.norm()) + 1e-12))
        # The buffer is a mean (torch's Muon), so that an entry's sum over its life is itself.
        return step * min(1.0, scale * 3 / (float(step.norm()) + 1e-12))


def train(text: tuple[Tensor, Tensor], setting: str, ranks: int, seed: int, steps: int) -> dict[str, Any]:
    """Train one run, and return its figures."""
    training, held_out = text
    model = model_of(seed, WIDTH, LAYERS, SEQUENCE, vectors=False)
    named = dict(model.named_parameters())
    what = None if setting == "dense" else Setting.of(setting)
    matrices = Matrices({name: p for name, p in named.items() if "blocks" in name}, what, ranks)
    others = {name: p for name, p in named.items() if "blocks" not in name}
    adamw = torch.optim.AdamW(others.values(), lr=LR, weight_decay=WEIGHT_DECAY)
    streams: list[dict[str, Compressor]] = [{} for _ in range(ranks)]
    if what is not None:
        streams = [
            {n: Compressor(name=n, rank=r, sparsity=0.99, feedback="step_ahead", **START) for n in others}
            for r in range(ranks)
        ]
    aheads = [look_ahead(model, adamw, own, ranks) for own in streams] if what is not None else []
    generator, offsets = torch.Generator().manual_seed(seed), torch.arange(SEQUENCE)
    for step in range(steps):
        rate = LR * min(1.0, (step + 1) / LR_WARMUP) * max(0.05, 0.5 * (1 + math.cos(math.pi * step / steps)))
        matrices.optimizer.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = rate * MUON_LR, rate
        starts = torch.randint(len(training) - SEQUENCE - 1, (BATCH,), generator=generator)
        gradients: list[dict[str, Tensor]] = []
        for rank, part in enumerate(starts.chunk(ranks)):
            where = part[:, None] + offsets
            if aheads:
                aheads[rank].displace()
            displaced = {}
            if what is not None and what.kind == "ahead":
                displaced = {name: p.data for name, p in matrices.named.items()}
                for name, p in matrices.named.items():
                    p.data = p.data - matrices.displacement(rank, name, rate * MUON_LR)
            logits = model(training[where]).view(-1, SYMBOLS)
            functional.cross_entropy(logits, training[where + 1].view(-1)).backward()
            for name, weights in displaced.items():
                matrices.named[name].data = weights
            if aheads:
                aheads[rank].restore()
            gradients.append({name: p.grad for name, p in named.items() if p.grad is not None})
            if aheads:
                aheads[rank].observe([(name, gradients[rank][name].view(-1)) for name in others])
            model.zero_grad()
        means = matrices.exchange(gradients)
        for name in others:
            each = [own[name] for own in gradients]
            if what is not None:
                each = [
                    own[name].decompress(own[name].compress(g)) for own, g in zip(streams, each, strict=True)
                ]
            means[name] = sum(each) / ranks
        for name, parameter in named.items():
            parameter.grad = means[name]
        if what is not None and what.kind == "rows" and step >= WARMUP:
            step_rows(matrices, rate * MUON_LR)
        else:
            matrices.optimizer.step()
        adamw.step()
        model.zero_grad()
        if aheads:
            compare_residuals(aheads, list(others), step)
        matrices.step_count += 1
    for ahead in aheads:
        ahead.detach()
    dense = 4 * sum(p.numel() for p in matrices.named.values()) * ranks * max(0, steps - WARMUP - RAMP)
    return {
        "loss": held_out_loss(model, held_out, SEQUENCE),
        "fewer": dense / matrices.nbytes if matrices.nbytes else 1.0,
    }


@torch.no_grad()
def step_rows(matrices: Matrices, lr: float) -> None:
    """A step of Muon on the rows that arrived: these alone are orthogonalised and decayed."""
    for parameter in matrices.named.values():
        assert parameter.grad is not None
        rows = parameter.grad.abs().sum(1).nonzero().view(-1)
        part = nn.Parameter(parameter[rows].clone())
        part.grad = parameter.grad[rows].contiguous()
        torch.optim.Muon(
            [part],
            lr=lr,
            weight_decay=WEIGHT_DECAY,
            momentum=0.0,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
        ).step()
        parameter[rows] = part


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: loss minus that of the dense run of the seed."""
    dense = {(row["ranks"], row["seed"]): row["loss"] for row in rows if row["setting"] == "dense"}
    yield "| compressors: matrices | - dense (95 %) | fewer bytes |"
    yield "|---|--:|--:|"
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["setting"] != "dense" and (row["ranks"], row["seed"]) in dense:
            groups.setdefault((row["ranks"], row["setting"]), []).append(row)
    for (ranks, setting), those in sorted(groups.items()):
        differences = [row["loss"] - dense[ranks, row["seed"]] for row in those]
        fewer = sum(row["fewer"] for row in those) / len(those)
        yield f"| {ranks}: {setting} | {paired(differences)} | {fewer:.0f}x |"


def main() -> None:
    """Train what has no result yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="plain or gzip")
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--compressors", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines of every run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = text_of(args.text)
    rows = rows_of(args.results)
    for seed, ranks, setting in itertools.product(args.seeds, args.compressors, ["dense", *args.settings]):
        run = {"setting": setting, "ranks": ranks, "seed": seed, "steps": args.steps}
        if any(run.items() <= row.items() for row in rows):
            continue
        began = time.process_time()
        row = {**run, **train(text, setting, ranks, seed, args.steps), "seconds": time.process_time() - began}
        rows.append(row)
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    print("\n".join(table([row for row in rows if row["steps"] == args.steps])))


if __name__ == "__main__":
    main()
