"""Training script of the hybrid job's tests: small runs under DeepSpeed against the same training on one
rank.

torchrun --nproc-per-node 2 tests/support/dlrm_worker.py results.json
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from sklearn.metrics import roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits

from dct_plugin.recommender.data import ClickDataset, DataFormatError, epoch_batches
from dct_plugin.recommender.models import build
from dct_plugin.recommender.trainer import Training

CARDINALITIES = (40, 3, 9, 90, 2)
# Long steps: weights and products of a DLRM start so small that it does nothing for a while.
BATCH, LR, EPOCHS, SEED = 32, 1.0, 4, 5
SMALL: dict[str, dict[str, Any]] = {
    "dlrm": {"embedding_dim": 6, "bottom": [8], "top": [16]},
    "deepfm": {"embedding_dim": 6, "hidden": [8]},
    "widedeep": {"embedding_dim": 6, "hidden": [8, 8]},
    "dcn": {"embedding_dim": 6, "hidden": [8], "depth": 3},
}
CASES = [
    ("dlrm", "all_to_all", 0),
    ("dlrm", "des", 1),
    ("deepfm", "auto", 0),
    ("widedeep", "all_to_all", 1),
    ("dcn", "des", 0),
]


def clicks() -> ClickDataset:
    generator = np.random.default_rng(1)
    rows, train = 200, 160
    categorical = np.stack([generator.integers(0, n, rows) for n in CARDINALITIES], axis=1).astype(np.int32)
    dense = generator.standard_normal((rows, 4)).astype(np.float32)
    # From a wide table, a narrow one and a number: every part of a model has something to learn.
    score = 2.0 * (categorical[:, 0] % 3 == 0) + 2.0 * (categorical[:, 1] == 1) + 1.5 * dense[:, 0]
    label = (score > 1.5).astype(np.float32)
    return ClickDataset(
        name="made up",
        dense=dense,
        categorical=categorical,
        label=label,
        cardinalities=CARDINALITIES,
        dense_names=tuple("abcd"),
        categorical_names=tuple("vwxyz"),
        num_train=train,
    )


def on_one_rank(model: str, data: ClickDataset) -> np.ndarray:
    """Probabilities of the test part after plain training on the whole batch."""
    net, _ = build(model, 4, CARDINALITIES, seed=SEED, **SMALL[model])
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for epoch in range(EPOCHS):
        for batch in epoch_batches(data.num_train, BATCH, seed=SEED, epoch=epoch):
            dense, categorical, label = (torch.from_numpy(column[batch]) for column in data.train)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(net(dense, categorical), label).backward()
            optimizer.step()
    with torch.no_grad():
        test = data.test
        return net(torch.from_numpy(test.dense), torch.from_numpy(test.categorical)).sigmoid().numpy()


def resumed(config: dict[str, Any], data: ClickDataset, path: str) -> tuple[np.ndarray, str]:
    """Probabilities of the test part after as many epochs, with a break in between; what other data meets."""

    def half() -> Training:
        return Training("half", config, data, seed=SEED, epochs=EPOCHS // 2, report=lambda *_, **__: None)

    folder = Path(path).with_suffix("")
    run = half()
    run.train(None)
    run.save(folder)
    run.close()
    run = half()
    dist.barrier()
    run.clicks, error = replace(data, label=1 - data.label), ""
    try:
        run.resume(folder)
    except DataFormatError as found:
        error = str(found)
    run.clicks = data
    run.resume(folder)
    run.train(None)
    probability = run.predict(data.test)
    run.close()
    return probability, error


def main(path: str) -> None:
    deepspeed.init_distributed()
    data = clicks()
    results = []
    for model, exchange, stage in CASES:
        events: list[dict[str, Any]] = []
        config = {
            "train_batch_size": BATCH,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # DeepSpeed's own is 1, by the mean of the ranks' norms
            "dlrm": {"model": model, "exchange": exchange, **SMALL[model]},
        }
        run = Training(
            "plain",
            config,
            data,
            seed=SEED,
            epochs=EPOCHS,
            report=lambda event, events=events, **fields: events.append({"event": event, **fields}),
        )
        run.train(None)
        probability = run.predict(data.test)
        expected = on_one_rank(model, data)
        results.append(
            {
                "case": [model, exchange, stage],
                "difference": float(np.abs(probability - expected).max()),
                "spread": float(expected.std()),
                "auc": float(roc_auc_score(data.test.label, probability)),
                "exchange": [choice.strategy for choice in run.choices],
                "bytes": events[-1]["bytes"],
                "events": [event["event"] for event in events],
            }
        )
        run.close()
        if (model, exchange) == ("dlrm", "all_to_all"):
            again, results[-1]["refused"] = resumed(config, data, path)
            results[-1]["resumed"] = float(np.abs(probability - again).max())
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(results))
    dist.barrier()
