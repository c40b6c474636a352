"""Hybrid DLRM, the trainer's own step: dense, lossless, and as in the ready hybrid file."""

from __future__ import annotations

import copy
from typing import Any

from dct_plugin.recommender.commands.dlrm import configuration

#: Method -> ``dct`` section; of the last two, those of configs/hybrid_lossless.json and hybrid_dct.json.
SECTIONS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "lossless": {"embedding": {"deduplicate": True}, "data_parallel": {"enabled": False}},
    "hybrid": {
        "embedding": {"deduplicate": True, "error_bound": 0.01, "gradient_bound": 0.1},
        "data_parallel": {
            "sparsity": 0.99,
            "feedback": "step_ahead",
            "warmup_steps": 10,
            "sparsity_warmup_steps": 20,
        },
    },
}


def configurations(ranks: int, batch_sizes: list[int]) -> dict[str, dict[str, Any]]:
    """``batch N`` -> method -> DeepSpeed JSON, for :class:`~dct_plugin.recommender.on_links.Trainings`."""
    made: dict[str, dict[str, Any]] = {}
    for size in batch_sizes:
        for name, section in SECTIONS.items():
            content: dict[str, Any] = {"train_batch_size": size, "gradient_clipping": 1.0}
            if section is not None:
                content["dct"] = copy.deepcopy(section)
            made.setdefault(f"batch {size}", {})[name] = configuration(content, ranks=ranks)
    return made
