"""A rank of torchtitan on the CPU: `torchtitan_job.py script --module fsdp.torchtitan_job --config small`.

torchtitan asks torch for a GPU when it is imported; it gets the CPU. FlexAttention has no backward pass
there, so the model has torch's attention.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

STEPS = 3


def use_the_cpu() -> None:
    """Have torchtitan take the CPU for its device, with answers to what it asks about a GPU."""
    torch._utils._get_available_device_type = lambda: "cpu"
    answers = {
        "get_device_name": "CPU",
        "get_device_properties": SimpleNamespace(total_memory=1 << 30),
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "current_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    if not hasattr(dist, "set_timeout"):  # in torch 2.13, whose time limits stay as they are
        dist.set_timeout = lambda *_: None


def small() -> Any:
    """Return the settings of a debug model of one layer, with words of its own."""
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    texts = [" ".join(str(i * k % 97) for k in range(60)) for i in range(50)]
    DATASETS["words"] = DatasetConfig(".", lambda _: Dataset.from_dict({"text": texts}), lambda s: s["text"])
    config = llama3_debugmodel()
    model = config.model_spec.model
    del model.layers[1:]
    model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader.dataset, config.hf_assets_path = "words", "."
    training, parallelism = config.training, config.parallelism
    training.steps, training.seq_len, training.local_batch_size = STEPS, 32, 2
    training.disable_cuda_graphs = True
    parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree = 2, 1
    parallelism.spmd_backend = "partial_dtensor"  # the default is for nightly builds newer than torch 2.13
    config.activation_checkpoint = None
    config.checkpoint.enable, config.checkpoint.interval = True, STEPS
    return config


if __name__ == "__main__":
    use_the_cpu()
    script = sys.argv.pop(1)
    runpy.run_path(script, run_name="__main__")
