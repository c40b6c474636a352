"""DeepSpeed JSONs of the kinds that are found in public repositories, with what DeepSpeed does."""

from __future__ import annotations

from typing import Any

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3}}
JOB: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW}


def job(**keys: Any) -> dict[str, Any]:
    return {key: value for key, value in {**JOB, **keys}.items() if value is not None}


def zero(stage: Any, **keys: Any) -> dict[str, Any]:
    return job(zero_optimization={"stage": stage, **keys})


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"type": name, "params": {"lr": 1e-3, **params}}


#: By what is unusual: a JSON that DeepSpeed 0.19.8 takes, and whether the plugin takes it.
TAKEN: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": (job(), True),
    "ZeRO is true": (job(zero_optimization=True), True),
    "ZeRO is false": (job(zero_optimization=False), True),
    "stage in quotes": (zero("2"), True),
    "enabled in quotes": (job(bf16={"enabled": "true"}), True),
    "old name of bf16": (job(bfloat16={"enabled": True}), True),
    "old name of the gathering": (zero(3, stage3_gather_fp16_weights_on_model_save=True), True),
    "parameters offloaded at stage 2": (zero(2, offload_param={"device": "cpu"}), False),
    "offload to none": (zero(3, offload_param={"device": "none"}), True),
    "numbers as floats": (zero(1, reduce_bucket_size=5e8, allgather_bucket_size=2e8), True),
    "Adam without its weight decay": (job(optimizer=optimizer("Adam", adam_w_mode=False)), True),
    "untested and allowed": (
        job(zero_optimization=True, zero_allow_untested_optimizer=True, optimizer=optimizer("RMSprop")),
        True,
    ),
    "batches of eight ranks": (job(train_batch_size=64, gradient_accumulation_steps=2), True),
    "schedule": (job(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}}), True),
    "static loss scale": (job(fp16={"enabled": True, "loss_scale": 128, "min_loss_scale": 0}), True),
    "torch's own compile": (job(compile={"deepcompile": False}), True),
    "keys of other tools": (job(hidden_size=128, comment="ours"), True),
    "gradients of ZeRO-1 prescaled": (job(zero_optimization={"stage": 1}, prescale_gradients=True), True),
}

#: JSONs that Hugging Face completes before DeepSpeed reads them.
COMPLETED: dict[str, dict[str, Any]] = {
    "everything": {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"},
        },
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    },
    "tensor parallelism": job(tensor_parallel={"autotp_size": "auto"}),
    "a part of the batch": job(train_batch_size=32, gradient_accumulation_steps="auto"),
}

#: Files that are no strict JSON, as DeepSpeed reads them.
LENIENT = {
    "comments": '{\n  // two nodes\n  "train_batch_size": 4, # in all\n  /* one */ "dct": {}\n}',
    "trailing comma": '{"train_batch_size": 4, "dct": {"data_parallel": {"sparsity": 0.9,},},}',
    "byte order mark": '\ufeff{"train_batch_size": 4, "dct": {}}',
    "keys without quotes": "{\n  train_batch_size: 4\n  dct: {}\n}",
}
