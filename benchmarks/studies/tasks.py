"""The study of many compressors trains these: a GPT, a recommender and a classifier of pictures.

A task draws the batch of all ranks together, so that runs of a seed with any number of ranks see the same
data. Where data differ between ranks, each *source* (a text, a range of rows) has an equal part of every
batch, and a rank sees one source: with two sources and eight ranks the first four ranks see the first one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from adam import SYMBOLS, held_out_loss, model_of, parts_of, read_text
from torch import Tensor, nn
from torch.nn import functional

from dct_plugin.recommender.commands.demo import LEARNING_RATES, MODEL, OPTIMIZER, PRESETS
from dct_plugin.recommender.data import epoch_batches, load
from dct_plugin.recommender.models import DLRM

#: The GPT, and the sequences of a step of all compressors together.
WIDTH, LAYERS, SEQUENCE, BATCH = 64, 2, 32, 64
LR, LR_WARMUP, WEIGHT_DECAY, CLIP = 2e-3, 60, 0.01, 1.0


class Run(NamedTuple):
    """The name of a run."""

    model: str
    setting: str
    ranks: int
    per_node: int
    """Ranks that are one compressor together."""
    seed: int
    steps: int


#: The loss of a rank's part of a batch.
Loss = Callable[[nn.Module], Tensor]


class Task(Protocol):
    """A task has a model, its data and its optimizer."""

    steps: int
    """Steps of a run if the command names no number."""
    clip: float
    """Norm to which gradients are clipped."""

    def model(self, seed: int) -> nn.Module:
        """Make the model."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer."""

    def losses(self, run: Run, rank: int, count: int) -> Iterator[tuple[Loss, float]]:
        """Yield the loss and the learning rate of each step."""

    def score(self, model: nn.Module) -> float:
        """Return the figure of quality."""


class Gpt:
    """A GPT on the characters of texts, with AdamW. Its score is the held-out loss, the mean of the texts'.

    Args:
        texts: Files or folders; several texts are the sources of different ranks. At most 1.2 million
            characters of each are used.
        width: Of the model.
        lr: Highest learning rate.
        pretrained: Returns the weights to start from by seed; None: new ones.
        symbols: The text whose most common characters are the model's symbols; None: all of ``texts``.
    """

    steps, clip = 1200, CLIP

    def __init__(
        self,
        texts: Sequence[Path],
        width: int = WIDTH,
        lr: float = LR,
        pretrained: Callable[[int], dict[str, Tensor]] | None = None,
        symbols: Path | None = None,
    ) -> None:
        read = [read_text(path)[:1_200_000] for path in texts]
        known = "".join(read) if symbols is None else read_text(symbols)
        self._parts = [parts_of(text, known) for text in read]
        self._width, self._lr, self._pretrained = width, lr, pretrained

    def model(self, seed: int) -> nn.Module:
        model: nn.Module = model_of(seed, self._width, LAYERS, SEQUENCE, vectors=False)
        if self._pretrained is not None:
            model.load_state_dict(self._pretrained(seed))
        return model

    @staticmethod
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def losses(self, run: Run, rank: int, count: int) -> Iterator[tuple[Loss, float]]:
        generator, offsets = torch.Generator().manual_seed(run.seed), torch.arange(SEQUENCE)
        each = BATCH // len(self._parts)
        for step in range(run.steps):
            rate = min(1.0, (step + 1) / LR_WARMUP)
            rate *= max(0.05, 0.5 * (1 + math.cos(math.pi * step / run.steps)))
            xs, ys = [], []
            for training, _ in self._parts:
                starts = torch.randint(len(training) - SEQUENCE - 1, (each,), generator=generator)
                where = starts[:, None] + offsets
                xs.append(training[where])
                ys.append(training[where + 1])
            x, y = (torch.cat(each).chunk(count)[rank] for each in (xs, ys))
            yield (
                lambda model, x=x, y=y: functional.cross_entropy(model(x).view(-1, SYMBOLS), y.reshape(-1)),
                self._lr * rate,
            )

    def score(self, model: nn.Module) -> float:
        losses = [held_out_loss(model, held_out, SEQUENCE) for _, held_out in self._parts]
        return sum(losses) / len(losses)


class Recommender:
    """The DLRM of ``dct demo`` on its data, with Adagrad; its score is the AUC on the test part.

    Args:
        sources: Number of ranges of rows that are the sources of different ranks.
        by: "row" for ranges of the file; "age" for ranges of the rows sorted by the patient's age.
    """

    preset: ClassVar = PRESETS["diabetes"]
    lr: ClassVar = LEARNING_RATES[OPTIMIZER.lower()]
    clip = math.inf

    def __init__(self, sources: int = 1, by: str = "row") -> None:
        self._clicks, self._sources, self._by = load(), sources, by
        self.steps = self.preset.epochs * (self._clicks.num_train // self.preset.batch_size)

    def model(self, seed: int) -> nn.Module:
        widths = {name: MODEL[name] for name in ("embedding_dim", "bottom", "top")}
        return DLRM(self._clicks.dense.shape[1], self._clicks.cardinalities, **widths, seed=seed)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(torch.optim, OPTIMIZER)(parameters, lr=self.lr)

    def _ranges(self) -> list[Tensor]:
        """Return the rows of each source."""
        rows = torch.arange(self._clicks.num_train)
        if self._by == "age":
            age = torch.from_numpy(self._clicks.train[1])[:, self._clicks.categorical_names.index("age")]
            rows = age.argsort(stable=True)
        return list(rows.chunk(self._sources))

    def _batches(self, seed: int) -> Iterator[Any]:
        size = self.preset.batch_size // self._sources
        ranges = self._ranges()
        for epoch in itertools.count():
            each = [epoch_batches(len(rows), size, seed=seed, epoch=epoch) for rows in ranges]
            for batches in zip(*each, strict=False):
                chosen = [rows[torch.from_numpy(b)] for rows, b in zip(ranges, batches, strict=True)]
                yield torch.cat(chosen).numpy()

    def losses(self, run: Run, rank: int, count: int) -> Iterator[tuple[Loss, float]]:
        for batch in itertools.islice(self._batches(run.seed), run.steps):
            mine = batch.reshape(count, -1)[rank]
            x, ids, y = (torch.from_numpy(part[mine]) for part in self._clicks.train)
            yield (
                lambda model, x=x, ids=ids, y=y: functional.binary_cross_entropy_with_logits(
                    model(x, ids), y
                ),
                self.lr,
            )

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        from sklearn.metrics import roc_auc_score

        dense, ids, label = map(torch.from_numpy, self._clicks.test)
        return float(roc_auc_score(label, model(dense, ids)))


class _Residual(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al. 2016, section 3.3)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, outputs) for _ in range(2))
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(hidden)) + self.shortcut(x))


class Digits:
    """A ResNet-18 of a quarter of the width on scikit-learn's digits (1,797 pictures of 8 x 8 pixels), SGD
    with momentum 0.9; its score is the loss on the held-out half.

    Groups are normalised in place of batches: the statistics of a batch depend on the number of ranks.

    Args:
        clip: Norm to which gradients are clipped.
    """

    steps, lr = 1320, 0.01

    def __init__(self, clip: float = math.inf) -> None:
        from sklearn.datasets import load_digits

        self.clip = clip
        pictures, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x = torch.from_numpy(pictures).float().view(-1, 1, 8, 8)[order] / 16
        y, cut = torch.from_numpy(labels)[order], len(labels) // 2  # a few pictures decide the loss of fewer
        self._train, self._test = (x[:cut], y[:cut]), (x[cut:], y[cut:])

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        widths = [16, 16, 32, 64, 128]
        stages = [
            nn.Sequential(_Residual(inputs, outputs, 1 + (inputs != outputs)), _Residual(outputs, outputs, 1))
            for inputs, outputs in itertools.pairwise(widths)
        ]
        stem = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9, weight_decay=5e-4)

    def losses(self, run: Run, rank: int, count: int) -> Iterator[tuple[Loss, float]]:
        generator = torch.Generator().manual_seed(run.seed)
        x, y = self._train
        for step in range(run.steps):
            mine = torch.randint(len(y), (64,), generator=generator).chunk(count)[rank]
            # Data are augmented: by a shift of a pixel.
            moved = torch.randint(-1, 2, (2,), generator=generator).tolist()
            shown = x[mine].roll(moved, (2, 3))
            rate = (
                self.lr * min(1.0, (step + 1) / LR_WARMUP) * 0.5 * (1 + math.cos(math.pi * step / run.steps))
            )
            yield lambda model, x=shown, y=y[mine]: functional.cross_entropy(model(x), y), rate

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        x, y = self._test
        return float(functional.cross_entropy(model(x), y))


@functools.cache
def trained(text: Path, width: int, seed: int) -> dict[str, Tensor]:
    """Return the weights of a GPT after 1,200 dense steps on a text."""
    task = Gpt([text], width)
    model = task.model(seed)
    optimizer = task.optimizer(model.parameters())
    for loss, rate in task.losses(Run("gpt", "dense", 1, 1, seed, task.steps), 0, 1):
        optimizer.param_groups[0]["lr"] = rate
        loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
