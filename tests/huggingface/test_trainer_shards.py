"""Hugging Face's Trainer with FSDP2 on two ranks: sharded by transformers, by Accelerate, and not sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import logged, run
from torch.distributed.fsdp import FSDPModule

from dct_plugin.fsdp import ReplicaCompression, ShardCompression

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_custom_all_gather"), reason="this torch has no seam for the collectives"
    ),
]

SYMBOLS, LENGTH, STEPS = 32, 16, 4
#: Dense gradients and copies of the weights' bits: plain FSDP2.
EXACT = {"data_parallel": {"value_dtype": "fp32", "parameters": "exact", "min_numel": 16}}
#: The same between replicas.
DENSE = {"data_parallel": {"value_dtype": "fp32", "sparsity": 0, "min_numel": 16}}


def _configuration() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=SYMBOLS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, bos_token_id=0,
        num_attention_heads=2, max_position_embeddings=LENGTH, eos_token_id=0,
    )  # fmt: skip


def _loaded(folder: str, **sizes: int) -> Any:
    """Return a model that transformers shards while it loads the weights."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    sharded = DistributedConfig(**sizes, fsdp_mixed_precision=True)
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=sharded)


def _made() -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(_configuration())


def _shard_on_cpus(arguments: Any) -> None:
    """Choose FSDP on CPUs, as Accelerate's state does on accelerators alone."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    precision = "bf16" if arguments.bf16 else "no"
    state = Accelerator(cpu=True, mixed_precision=precision).state  # the Trainer's has the same
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    if arguments.bf16:
        plugin.set_mixed_precision(precision)
    state.fsdp_plugin, state.distributed_type = plugin, DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


class Trained:
    """A training of four steps of two micro-batches.

    Attributes:
        weights: All weights after it.
        state: What the callback attached.
        lines: What the plugin logged.
    """

    def __init__(
        self,
        model: Any,
        folder: str,
        section: dict[str, Any] | None,
        *,
        on_cpus: bool = True,
        resumed: bool = False,
        **options: Any,
    ) -> None:
        from transformers import Trainer, TrainingArguments

        from dct_plugin.transformers import DCTCallback

        rows = torch.randint(SYMBOLS, (64, LENGTH), generator=torch.Generator().manual_seed(1))
        arguments = TrainingArguments(
            folder, max_steps=STEPS, save_steps=STEPS // 2, use_cpu=True, ddp_backend="gloo", report_to=[],
            per_device_train_batch_size=2, gradient_accumulation_steps=2, disable_tqdm=True,
            learning_rate=0.01, **options,
        )  # fmt: skip
        if arguments.fsdp and on_cpus:
            _shard_on_cpus(arguments)
        trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        self.state: Any = None
        with logged() as self.lines:
            if section is not None:
                callback = DCTCallback(section, trainer=trainer)
                trainer.add_callback(callback)
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resumed else None)
            if section is not None:
                self.state = callback.state
        self.weights = [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for p in trainer.model_wrapped.parameters()
        ]
        self.wrapped = type(trainer.model_wrapped)

    def ends_as(self, other: Trained) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.weights, other.weights, strict=True))


def _sharded_while_loaded(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    if rank == 0:
        _made().save_pretrained(f"{folder}/model")
    dist.barrier()
    found = {}
    for name, kind, section, sizes in (
        ("shards", ShardCompression, EXACT, {"fsdp_size": 2}),
        ("replicas", ReplicaCompression, DENSE, {"dp_replicate_size": 2, "fsdp_size": 1}),
    ):
        plain, ours = (
            Trained(_loaded(f"{folder}/model", **sizes), f"{folder}/{name}", each, save_strategy="no")
            for each in (None, section)
        )
        found[name] = isinstance(ours.state, kind), ours.ends_as(plain), ours.state.steps.step
    return found


def test_a_model_that_transformers_shards_while_it_loads(tmp_path: Path) -> None:
    """It puts new parameters in the place of FSDP's. Bitwise plain FSDP2 with exact copies."""
    expected = (True, True, STEPS)
    assert run(2, _sharded_while_loaded, str(tmp_path)) == [{"shards": expected, "replicas": expected}] * 2


def _with_the_option(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    fsdp = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    plain = Trained(_made(), f"{folder}/plain", None, bf16=True, **fsdp)
    exact = Trained(_made(), f"{folder}/exact", EXACT, bf16=True, **fsdp)
    first = Trained(_made(), f"{folder}/saved", {}, bf16=True, **fsdp)
    again = Trained(_made(), f"{folder}/saved", {}, bf16=True, resumed=True, **fsdp)
    whole = Trained(_made(), f"{folder}/fp32", {}, save_strategy="no", **fsdp)
    unsharded = Trained(_made(), f"{folder}/cpu", {}, save_strategy="no", on_cpus=False, **fsdp)
    return {
        "plain FSDP2": exact.ends_as(plain),
        "resumed": again.ends_as(first),
        "steps": [each.state.steps.step for each in (exact, first, again, whole)],
        "fp32": "\n".join(whole.lines),
        "bf16": "\n".join(first.lines),
        "on CPUs": (unsharded.wrapped.__name__, "\n".join(unsharded.lines)),
    }


def test_the_option_fsdp(tmp_path: Path) -> None:
    """It does what docs/huggingface-reference.md says; the test makes Accelerate choose FSDP on CPUs."""
    pages = run(2, _with_the_option, str(tmp_path))
    for found in pages:
        assert found["plain FSDP2"]
        assert found["resumed"]
        assert found["steps"] == [STEPS] * 4
        assert found["on CPUs"][0] == "DistributedDataParallel"
    found = pages[0]
    assert "active on FSDP2, 2 ranks share one copy of the states" in found["bf16"]
    assert "gathered whole: nearly all fp32 weights change in a step" in found["fp32"]
    assert "active on torch DDP" in found["on CPUs"][1]
