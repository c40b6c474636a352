"""Measure the loss of local steps by the rule of their exchange: replicas train alone and exchange progress.

Every replica has its own weights and its own states of AdamW. Every ``--every`` optimizer steps the replicas
exchange their progress, which is own weights minus common weights, in the library's payloads. The outer
optimizer moves the common weights by the mean of what was sent. All rules share the data, the initial weights
and the first ``--start`` steps, in which gradients are averaged in every step.

A rule is a list of settings, separated by blanks; those left out have their defaults:

- ``density=0.0156``: share of the entries that is sent; 1: all of them.
- ``value=int4``: value type of the payloads. ``value=bins`` has 2 bits per value, each decoded as the mean of
  its bin, and selects in blocks of 64 x 64 entries (SparseLoCo, Sarfi et al. 2025, as its authors run it).
- ``unsent=weights``: what is not sent stays in the replica's own weights; ``unsent=residual``: it is added to
  the next progress (SparseLoCo); ``unsent=dropped``.
- ``decay=0.9``: factor of what stays, at every exchange.
- ``mean=senders``: mean over those replicas that sent an entry; ``mean=all``.
- ``outer=0.7``, ``momentum=0.9``: learning rate and Nesterov momentum of the outer optimizer (DiLoCo,
  Douillard et al. 2023).
- ``answer=int8``: value type of the mean, which an owner sends back to all (the two-phase exchange).
- ``clip=median``: each tensor is clipped to the median norm over the replicas (SparseLoCo).
- ``factor=steps``: each step of a replica is as much longer, tensor by tensor, as the replicas' gradients are
  longer than their mean in the steps before an exchange; ``factor=progress``: the mean progress is as much
  longer as the replicas' progress is longer than its mean.
- ``seen=bf16``: an entry crosses when its common weight in bf16 would change by it (PULSELoCo,
  2602.03839v2); the rest is added to the next progress. The payload counts 3 bytes for each.
- ``fragments=3``: the tensors in so many parts, one of which crosses every ``--every`` / 3 steps;
  ``delay=5``: steps for which an exchange is on its way; ``mix=0.5``: share of a replica's own weights where
  the new common ones arrive (Streaming DiLoCo, Douillard et al. 2025); ``mix=-1``: the replica's progress
  during the delay is added to them.
- ``inner=muon``: Muon trains the matrices of the blocks (MuLoCo, 2505.23725), at ``rate=6`` times AdamW's.

    python benchmarks/studies/local_steps.py --text wikitext2_valid.txt.gz --width 128 --results FILE \\
        --rules "outer=0.7 momentum=0.9" "density=0.0156 value=int4 unsent=weights decay=0.9 mean=senders"

``--results`` keeps every run at once: the command can be stopped and given again, or with more rules. *Sent*
is the payload of a replica and exchange; bytes per token are that divided by the tokens that the replica
trained on meanwhile. The exchanges of the first steps, of gradients in fp32, are not counted.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from many_streams import rows_of
from muon import MOMENTUM, MUON_LR
from tasks import BATCH, CLIP, SEQUENCE, WEIGHT_DECAY, WIDTH, Gpt, Run
from torch import Tensor, nn

from dct_plugin import Compressor
from dct_plugin.recommender.intervals import paired

RESULTS = Path(__file__).resolve().parents[1] / "results" / "local_steps.jsonl"
#: Tensors with fewer entries are sent whole, in fp32.
MIN_NUMEL = 1024
#: Side of a block of ``value=bins``, entries that it sends, and bits of a position and a value.
SIDE, IN_BLOCK, POSITION_BITS, VALUE_BITS = 64, 64, 12, 2
#: Share of the norms of gradients that outlasts an exchange.
KEPT = 0.5


@dataclass(frozen=True)
class Rule:
    """How progress is exchanged; see the top of this file."""

    density: float = 1.0
    value: str = "fp32"
    unsent: str = "dropped"
    decay: float = 1.0
    mean: str = "all"
    outer: float = 1.0
    momentum: float = 0.0
    clip: str = "none"
    answer: str = "fp32"
    factor: str = "none"
    seen: str = "all"
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    inner: str = "adamw"
    rate: float = MUON_LR

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Return the rule that a text names."""
        types = {field.name: type(field.default) for field in fields(cls)}
        return cls(**{name: types[name](value) for name, value in (part.split("=") for part in text.split())})


@dataclass(frozen=True)
class Job:
    """The settings of a run beside its rule; a row of the results has them all."""

    width: int
    replicas: int
    every: int
    start: int
    steps: int
    seed: int


class Sender:
    """One replica's tensor at the exchange.

    Args:
        rule: How it is sent.
        shape: Of the tensor.
    """

    def __init__(self, rule: Rule, shape: torch.Size) -> None:
        self._rule, self._shape, self._whole = rule, shape, shape.numel() < MIN_NUMEL
        self.unsent = torch.zeros(shape)
        self.sent_bytes = 0
        if not self._whole and rule.value != "bins":
            self._compressor = Compressor(
                sparsity=1.0 - rule.density,
                value_dtype=rule.value,
                feedback="none",
                warmup_steps=0,
                sparsity_warmup_steps=0,
            )

    def send(self, progress: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the others decode of progress since the ``common`` weights, and what was sent."""
        if self._rule.unsent == "residual" or self._rule.seen == "bf16":
            progress = progress + self._rule.decay * self.unsent
        if self._rule.seen == "bf16" and not self._whole:
            sent = (common + progress).bfloat16() != common.bfloat16()
            decoded = torch.where(sent, progress.bfloat16().float(), torch.zeros(()))
            self.sent_bytes += 3 * int(sent.sum())
        else:
            decoded, sent = self._decoded(progress)
        self.unsent = progress - decoded
        return decoded, sent

    def _decoded(self, progress: Tensor) -> tuple[Tensor, Tensor]:
        if self._whole or (self._rule.density >= 1.0 and self._rule.value == "fp32"):
            self.sent_bytes += 4 * progress.numel()
            return progress.clone(), torch.ones_like(progress, dtype=torch.bool)
        if self._rule.value == "bins":
            return self._bins(progress)
        payload = self._compressor.compress(progress)
        self.sent_bytes += payload.data.numel()
        decoded = self._compressor.decompress(payload)
        everything = self._rule.density >= 1.0
        return decoded, torch.ones_like(decoded, dtype=torch.bool) if everything else decoded != 0

    def _bins(self, progress: Tensor) -> tuple[Tensor, Tensor]:
        """Select in blocks, and decode each value as the mean of its bin."""
        blocks = _blocks(torch.arange(progress.numel()).view(self._shape))
        flat = progress.flatten()
        values = torch.where(blocks >= 0, flat[blocks.clamp(min=0)], torch.zeros(()))
        top = values.abs().topk(min(IN_BLOCK, values.shape[1]), dim=1).indices
        where = blocks.gather(1, top).flatten()
        where = where[where >= 0]
        chosen = flat[where]
        step = 6 * chosen.std() / 4 + 1e-20
        bins = ((chosen - chosen.mean()) / step + 2).round().clamp(0, 3).long()
        counts = torch.bincount(bins, minlength=4).clamp(min=1)
        means = torch.zeros(4).index_add_(0, bins, chosen) / counts
        decoded, sent = torch.zeros_like(flat), torch.zeros_like(flat, dtype=torch.bool)
        decoded[where], sent[where] = means[bins], True
        self.sent_bytes += -(-where.numel() * (POSITION_BITS + VALUE_BITS) // 8) + 4 * 4
        return decoded.view(self._shape), sent.view(self._shape)


def _blocks(positions: Tensor) -> Tensor:
    """Return positions by block, a row each; -1 fills blocks at the edge. 1-D tensors have 64 to a block."""
    if positions.dim() == 1:
        length = -(-positions.numel() // SIDE) * SIDE
        return nn.functional.pad(positions, (0, length - positions.numel()), value=-1).view(-1, SIDE)
    rows, columns = positions.flatten(1).shape
    grown = nn.functional.pad(positions.flatten(1), (0, -columns % SIDE, 0, -rows % SIDE), value=-1)
    split = grown.view(grown.shape[0] // SIDE, SIDE, grown.shape[1] // SIDE, SIDE)
    return split.permute(0, 2, 1, 3).reshape(-1, SIDE * SIDE)


class Outer:
    """The common weights, and their optimizer: SGD with Nesterov momentum.

    Args:
        rule: Of the exchange.
        weights: Initial weights by name; changed in place.
    """

    def __init__(self, rule: Rule, weights: dict[str, Tensor], replicas: int) -> None:
        self._rule, self.weights = rule, weights
        self._momentum = {name: torch.zeros_like(each) for name, each in weights.items()}
        self.senders = [{n: Sender(rule, w.shape) for n, w in weights.items()} for _ in range(replicas)]

    def _exchange(self, replicas: Sequence[Mapping[str, Tensor]]) -> None:
        """Move common weights by the progress of all replicas."""
        rule = self._rule
        for name in replicas[0]:
            common, own = self.weights[name], [replica[name] for replica in replicas]
            senders = [each[name] for each in self.senders]
            both = [sender.send(x - common, common) for sender, x in zip(senders, own, strict=True)]
            decoded, sent = (torch.stack(each) for each in zip(*both, strict=True))
            if rule.clip == "median":
                norms = decoded.flatten(1).norm(dim=1)
                factors = (norms.median() / norms.clamp(min=1e-12)).clamp(max=1.0)
                decoded = decoded * factors.view(-1, *[1] * common.dim())
            count = sent.sum(0).clamp(min=1) if rule.mean == "senders" else len(own)
            mean = self._answer(decoded.sum(0) / count)
            if rule.factor == "progress":
                mean *= length_factor(squares_of(decoded), len(own))
            momentum = self._momentum[name].mul_(rule.momentum).add_(mean)
            common.add_(mean + rule.momentum * momentum if rule.momentum else mean, alpha=rule.outer)

    @torch.no_grad()
    def arrive(self, sent: Sequence[Mapping[str, Tensor]], replicas: Sequence[Mapping[str, Tensor]]) -> None:
        """End an exchange, and let the replicas go on from the new common weights.

        Args:
            sent: What their weights were when the exchange began, of the tensors that crossed.
            replicas: Their weights now; changed in place.
        """
        rule = self._rule
        self._exchange(sent)
        for number, (before, now) in enumerate(zip(sent, replicas, strict=True)):
            for name, then in before.items():
                common, own = self.weights[name], now[name]
                if rule.mix < 0:
                    own.add_(common - then)
                else:
                    own.mul_(rule.mix).add_(common, alpha=1 - rule.mix)
                if rule.unsent == "weights":
                    own.add_(self.senders[number][name].unsent, alpha=rule.decay)

    def _answer(self, mean: Tensor) -> Tensor:
        if self._rule.answer == "fp32" or mean.numel() < MIN_NUMEL:
            return mean
        sent = Compressor(sparsity=0.0, value_dtype=self._rule.answer, feedback="none", warmup_steps=0)
        return sent.decompress(sent.compress(mean))


def squares_of(parts: Tensor) -> Tensor:
    """Return the mean of the squared norms of tensors [replicas, ...], and that of their mean."""
    return torch.stack([parts.square().sum() / len(parts), parts.mean(0).square().sum()])


def length_factor(squares: Tensor, replicas: int) -> Tensor:
    """Return how much longer than their mean tensors of these squared norms are: 1 to the number of them."""
    own, mean = squares
    tiny = torch.finfo(torch.float32).tiny
    return (own / mean.clamp(min=tiny)).sqrt().clamp(1.0, float(replicas))


class Replica:
    """A replica's model, optimizers and data."""

    def __init__(self, task: Gpt, model: nn.Module, job: Job, rank: int, rule: Rule) -> None:
        self.model = copy.deepcopy(model)
        self.weights = dict(self.model.named_parameters())
        self.factors = dict.fromkeys(self.weights, torch.ones(()))
        """Factors of the steps, by the name of the tensor."""
        matrices = [
            w for n, w in self.weights.items() if rule.inner == "muon" and "block" in n and w.dim() == 2
        ]
        others = [w for w in self.weights.values() if not any(w is each for each in matrices)]
        self.optimizers = [task.optimizer(others)]
        if matrices:
            muon = {"weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
            self.optimizers.append(torch.optim.Muon(matrices, **muon))
        self._rates = [1.0, rule.rate]
        run = Run("gpt", "local", job.replicas, 1, job.seed, job.steps)
        self.losses = task.losses(run, rank, job.replicas)

    def backward(self) -> None:
        """Set the learning rate of the next step, and the gradients of this replica's batch."""
        loss, rate = next(self.losses)
        for optimizer, factor in zip(self.optimizers, self._rates, strict=False):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.zero_grad()
        loss(self.model).backward()

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients by their own norm, and take an optimizer step."""
        nn.utils.clip_grad_norm_(self.weights.values(), CLIP)
        longer = any(factor > 1 for factor in self.factors.values())
        before = {name: weight.clone() for name, weight in self.weights.items()} if longer else {}
        for optimizer in self.optimizers:
            optimizer.step()
        for name, start in before.items():
            self.weights[name].copy_(torch.lerp(start, self.weights[name], self.factors[name]))

    def snapshot(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of weights."""
        return {name: self.weights[name].detach().clone() for name in names}


def train(task: Gpt, job: Job, rule: Rule) -> dict[str, Any]:
    """Train all replicas, and return the figures of the run."""
    model = task.model(job.seed)
    replicas = [Replica(task, model, job, rank, rule) for rank in range(job.replicas)]
    for _ in range(job.start):
        for each in replicas:
            each.backward()
        for parts in zip(*(each.weights.values() for each in replicas), strict=True):
            mean = torch.stack([part.grad for part in parts]).mean(0)
            for part in parts:
                part.grad.copy_(mean)
        for each in replicas:
            each.step()
    common = {name: weight.detach().clone() for name, weight in replicas[0].weights.items()}
    outer, weights = Outer(rule, common, job.replicas), [each.weights for each in replicas]
    squares = {name: torch.zeros(2) for name in common}
    """Squared norms of the replicas' own gradients, and of their mean; of the last exchanges."""
    under_way: list[tuple[int, list[dict[str, Tensor]]]] = []
    """When exchanges arrive, and what crosses."""
    for step in range(job.start, job.steps):
        for each in replicas:
            each.backward()
        parts = crossing(list(common), rule, job, step + 1 - job.start)
        if rule.factor == "steps" and parts:
            note_lengths(replicas, squares)
        for each in replicas:
            each.step()
        if step + 1 < job.steps and parts:
            under_way.append((step + rule.delay, [each.snapshot(parts) for each in replicas]))
        while under_way and (under_way[0][0] <= step or step + 1 == job.steps):
            outer.arrive(under_way.pop(0)[1], weights)
    outer.arrive([each.snapshot(common) for each in replicas], weights)
    tensors = [sender for senders in outer.senders for sender in senders.values()]
    exchanges = max(1.0, (job.steps - job.start) / job.every)
    sent_once = sum(each.sent_bytes for each in tensors) / job.replicas / exchanges
    numel = sum(weight.numel() for weight in common.values())
    tokens = job.every * BATCH * SEQUENCE / job.replicas
    mean = {name: torch.stack([each[name].detach() for each in weights]).mean(0) for name in common}
    scores = {}
    for name, final in (("loss", common), ("loss_of_mean", mean)):
        model.load_state_dict({**model.state_dict(), **final})
        scores[name] = task.score(model)
    return {**scores, "sent": sent_once, "fewer": 4 * numel / sent_once, "per_token": sent_once / tokens}


def crossing(names: Sequence[str], rule: Rule, job: Job, steps: int) -> Sequence[str]:
    """Return the tensors that cross after so many local steps."""
    turn, rest = divmod(steps, job.every // rule.fragments)
    return [] if rest else names[(turn - 1) % rule.fragments :: rule.fragments]


def note_lengths(replicas: Sequence[Replica], squares: Mapping[str, Tensor]) -> None:
    """Let the replicas' steps have the factors that their gradients of this step give."""
    for name, lengths in squares.items():
        gradients = torch.stack([each.weights[name].grad for each in replicas])
        factor = length_factor(lengths.mul_(KEPT).add_(squares_of(gradients)), len(replicas))
        for each in replicas:
            each.factors[name] = factor


def runs_of(args: argparse.Namespace) -> Iterator[tuple[Job, str]]:
    """Yield what the command asks for."""
    for seed, rule, replicas, every in itertools.product(args.seeds, args.rules, args.replicas, args.every):
        yield Job(args.width, replicas, every, args.start, args.steps, seed), rule


def job_of(row: Mapping[str, Any]) -> Job:
    """Return the job that a result is of."""
    return Job(**{field.name: row[field.name] for field in fields(Job)})


def table(rows: Sequence[Mapping[str, Any]], against: str) -> str:
    """Return a Markdown table by job and rule: the loss, and its difference to the rule ``against``."""
    base = {job_of(row): row["loss"] for row in rows if row["rule"] == against}
    lines = [
        "| width, replicas, every, steps | rule | loss | of the mean | difference | fewer bytes | a token |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        job = job_of(row)
        key = job.width, job.replicas, job.every, job.start, job.steps, row["rule"]
        groups.setdefault(key, []).append(row)
    for key, those in sorted(groups.items(), key=lambda item: (item[0][:5], item[1][0]["loss"])):
        differences = [row["loss"] - base[job_of(row)] for row in those if job_of(row) in base]
        mean, of_mean = (sum(row[what] for row in those) / len(those) for what in ("loss", "loss_of_mean"))
        width, replicas, every, _, steps, rule = key
        shown = paired(differences) if differences else ""
        lines.append(
            f"| {width}, {replicas}, {every}, {steps} | {rule} | {mean:.4f} | {of_mean:.4f} | {shown} | "
            f"{those[0]['fewer']:.0f}x | {those[0]['per_token']:.1f} B |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train what has no result yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain or gzip")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the GPT")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4])
    parser.add_argument("--every", type=int, nargs="+", default=[30], help="steps between two exchanges")
    parser.add_argument("--start", type=int, default=60, help="first steps, with a dense exchange in each")
    parser.add_argument("--steps", type=int, default=Gpt.steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rules", nargs="+", default=["outer=0.7 momentum=0.9"])
    parser.add_argument("--against", default="outer=0.7 momentum=0.9", help="rule of the differences")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines of every run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = Gpt(args.text, args.width)
    for job, rule in runs_of(args):
        if any((job_of(row), row["rule"]) == (job, rule) for row in rows_of(args.results)):
            continue
        began = time.process_time()
        figures = train(task, job, Rule.parse(rule))
        result = {**vars(job), "rule": rule, **figures, "seconds": time.process_time() - began}
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
    print(table(rows_of(args.results), args.against))


if __name__ == "__main__":
    main()
