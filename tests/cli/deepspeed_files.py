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


#: By what is wrong: a JSON that DeepSpeed 0.19.8 refuses, and the words that name the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "compression": (job(compression_training={}), "The DeepSpeed compression library"),
    "sparse gradients": (job(sparse_gradients=False), "A leftover 'sparse_gradients' flag"),
    "curriculum": (job(curriculum_learning={"enabled": False}), "Legacy top-level 'curriculum_learning'"),
    "layer drop": (job(progressive_layer_drop={"enabled": False}), "Progressive Layer Dropping"),
    "elasticity": (job(elasticity={"enabled": False}), "Elastic training"),
    "sparse attention": (job(sparse_attention={"mode": "fixed"}), "Sparse Attention"),
    "apex": (job(amp={"enabled": False}), "Apex AMP"),
    "eigenvalue": (job(eigenvalue={"enabled": False}), "Eigenvalue"),
    "MiCS": (zero(3, mics_shard_size=2), "MiCS"),
    "stage is a list": (zero([1, 2]), "DeepSpeedZeroConfig.stage = [1, 2]: "),
    "no such stage": (zero(4), "DeepSpeedZeroConfig.stage = 4: "),
    "unknown key of ZeRO": (zero(1, bucket=3), "DeepSpeedZeroConfig.bucket = 3: Extra inputs"),
    "fp16 is a boolean": (job(fp16=True), "must be a mapping, not bool"),
    "bf16 is a text": (job(bf16="yes"), "must be a mapping, not str"),
    "loss scale of bf16": (
        job(bf16={"enabled": True, "loss_scale": 0}),
        "DeepSpeedBF16Config.loss_scale = 0: ",
    ),
    "half a loss scale": (
        job(fp16={"enabled": True, "min_loss_scale": 0.5}),
        "DeepSpeedFP16Config.min_loss_scale = 0.5",
    ),
    "no loss scale": (job(fp16={"enabled": True, "min_loss_scale": 0}), "fp16.min_loss_scale must be > 0"),
    "both precisions": (job(fp16={"enabled": True}, bf16={"enabled": True}), "simultaneously"),
    "no batch size": (job(train_micro_batch_size_per_gpu=None), "train_micro_batch_size_per_gpu needs to be"),
    "batch in words": (job(train_micro_batch_size_per_gpu="MBSIZE"), "'>' not supported"),
    "no accumulation": (job(gradient_accumulation_steps=0), "Train batch size: 0"),
    "accumulation in quotes": (job(gradient_accumulation_steps="4"), "'>' not supported"),
    "batches that do not fit": (
        job(train_batch_size=10, gradient_accumulation_steps=1),
        "Check batch related parameters",
    ),
    "a whole below a part": (job(train_batch_size=2), "Gradient accumulation steps: 0 has to be greater"),
    "optimizer is a list": (job(optimizer=["AdamW"]), "'list' object has no attribute"),
    "ZeRO is a number": (job(zero_optimization=7), "must be a mapping, not int"),
    "old compile": (job(compile={"disable": False}), "CompileConfig.disable = false: Extra inputs"),
    "unknown type of messages": (job(communication_data_type="fp8"), "Invalid communication_data_type"),
}

#: By what is wrong: a JSON that DeepSpeed 0.19.8 parses, and refuses when it makes the engine.
REFUSED_LATER: dict[str, dict[str, Any]] = {
    "tensor parallelism in quotes": job(tensor_parallel={"autotp_size": "2"}),
    "type of sums": job(data_types={"grad_accum_dtype": "fp8"}),
    "optimizer in lower case": job(optimizer=optimizer("sgd")),
    "misspelt optimizer": job(optimizer=optimizer("AdmaW")),
    "1-bit Adam": job(optimizer=optimizer("OneBitAdam", freeze_step=9)),
    "0/1 Adam": job(optimizer=optimizer("ZeroOneAdam")),
    "norm in the optimizer": job(optimizer=optimizer("AdamW", max_grad_norm=1.0)),
    "unknown parameter": job(optimizer=optimizer("RMSprop", beta=1)),
    "untested optimizer": job(zero_optimization={"stage": 1}, optimizer=optimizer("RMSprop")),
    "unknown schedule": job(scheduler={"type": "Warmup", "params": {}}),
    "schedule without its length": job(scheduler={"type": "WarmupDecayLR", "params": {}}),
    "type of weights": job(data_types={"param_dtype": "bf16"}),
}

#: By what is unusual: a JSON that DeepSpeed 0.19.8 takes, and whether the plugin takes it.
TAKEN: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": (job(), True),
    "ZeRO is true": (job(zero_optimization=True), True),
    "ZeRO is false": (job(zero_optimization=False), True),
    "stage in quotes": (zero("2"), True),
    "enabled in quotes": (job(bf16={"enabled": "true"}), True),
    "old name of bf16": (job(bfloat16={"enabled": True}), True),
    "old name of the gathering": (zero(3, stage3_gather_fp16_weights_on_model_save=True), True),
    "old name of offloading": (zero(2, cpu_offload=True), False),
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
