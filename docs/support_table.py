"""The tables of frameworks and of keys in ``docs/support.md``, written by this program:

python docs/support_table.py
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dct_plugin.config import DataParallelConfig
from dct_plugin.integrations.host.refusals import refused

_BEGIN, _END = (f"<!-- generated from the rows of frameworks: {place} -->" for place in ("begin", "end"))
_KEYS_BEGIN, _KEYS_END = (f"<!-- generated from the rows of keys: {place} -->" for place in ("begin", "end"))


class State(Enum):
    """The runs that a row of the table has behind it."""

    CPU = "CPU"
    GPU = "CPU, GPU"
    STUB = "CPU, stub"
    REFUSED = "refused"


class Row(NamedTuple):
    """One combination, and the tests that show it: ``folder/file::function`` below ``tests/``."""

    framework: str
    parallelism: str
    optimizer: str
    state: State
    tests: tuple[str, ...]


_COMPILED, _FROZEN = "host/test_compiled::test_the_table_of_orders", "host/test_frozen::"
_GPU, _HOOKS = "gpu/test_gpu_defaults::", "megatron/test_megatron_hooks::"
_SHARDS = "fsdp/test_shards::"
_ENGINE, _REFUSED = "megatron/test_megatron_engine::", "test_what_cannot_work_is_refused_by_name"
_LORA = (_FROZEN + "test_adapters_are_trained_and_unfrozen_layers_follow",)

ROWS = (
    Row("torch DDP", "replicas", "AdamW", State.GPU, (_GPU + "test_ddp_with_adamw",)),
    Row("torch DDP", "replicas, nodes", "AdamW", State.GPU, (_GPU + "test_two_nodes_of_two_ranks",)),
    Row(
        "torch DDP", "replicas", "SGD, momentum, Adagrad, Lion", State.CPU,
        ("ddp/test_attach::test_feedback_follows_the_optimizer",),
    ),
    Row("torch DDP", "replicas, LoRA by hand and `peft`", "AdamW", State.CPU, _LORA),
    Row("torch DDP", "replicas, `torch.compile`", "AdamW", State.CPU, (_COMPILED,)),
    Row(
        "torch DDP", "replicas, `optimize_ddp = 'python_reducer'`", "any", State.REFUSED,
        (_COMPILED, "ddp/test_ddp::test_the_reducer_in_python_is_refused"),
    ),
    Row("FSDP2", "replicas of shards (two mesh dimensions)", "AdamW", State.GPU,
        (_GPU + "test_fsdp2_with_adamw",)),
    Row("FSDP2", "replicas of shards, LoRA by hand and `peft`", "AdamW", State.CPU, _LORA),
    Row("FSDP2", "replicas of shards, `torch.compile`", "AdamW", State.CPU, (_COMPILED,)),
    Row("FSDP2", "replicas of shards, compiled autograd", "any", State.REFUSED, (_COMPILED,)),
    Row("FSDP2", "shards alone (one mesh dimension), exact and int8 copies", "AdamW", State.CPU,
        (_SHARDS + "test_two_nodes_of_two_ranks_compute_with_the_same_weights",)),
    Row("FSDP2", "shards alone, thresholds, local steps", "any", State.REFUSED,
        (_SHARDS + "test_what_cannot_work_is_refused_by_name",)),
    Row("FSDP1", "all", "any", State.REFUSED, ("fsdp/test_fsdp_refused::test_refused",)),
    Row("DeepSpeed", "ZeRO-0 to 3", "AdamW", State.GPU, (_GPU + "test_deepspeed_with_adamw",)),
    Row("DeepSpeed", "ZeRO-2, updated weights", "AdamW", State.GPU,
        (_GPU + "test_deepspeed_with_updates_of_weights",)),
    Row("DeepSpeed", "ZeRO-0 to 3, LoRA by hand and `peft`", "AdamW", State.CPU, _LORA),
    Row("DeepSpeed", "ZeRO-0 to 3, `torch.compile`", "AdamW", State.CPU, (_COMPILED,)),
    Row("DeepSpeed", "pipeline", "Adam", State.CPU,
        ("deepspeed/test_deepspeed_pipeline::test_the_loss_falls_and_evaluation_is_as_trained",)),
    Row("DeepSpeed", "experts", "Adam", State.CPU,
        ("deepspeed/test_deepspeed_experts::test_gradients_of_experts_by_option",)),
    Row("DeepSpeed", "ZeRO-1 to 3", "Muon", State.CPU,
        ("deepspeed/test_deepspeed_loops::test_muon_of_deepspeed",)),
    Row("DeepSpeed", "ZeRO-0", "Muon", State.REFUSED,
        ("cli/test_config_check::test_wrong_files",)),
    Row("Megatron", "data, with and without the distributed optimizer", "Adam", State.GPU,
        (_GPU + "test_megatron_with_adam",)),
    Row("Megatron", "data, several instances of the distributed optimizer", "Adam", State.CPU,
        ("megatron/test_megatron_instances::test_instances_are_summed_densely_and_thresholded_between",)),
    Row("Megatron", "data", "SGD", State.CPU,
        ("megatron/test_megatron_step_ahead::test_sgd_has_a_unit_of_its_own",)),
    Row("Megatron", "pipeline", "Adam", State.CPU, (_HOOKS + "test_pipeline_1f1b",)),
    Row("Megatron", "tensor, sequence", "Adam", State.CPU, (_HOOKS + "test_tensor_and_sequence_parallel",)),
    Row("Megatron", "tensor, data; LoRA by hand", "Adam", State.CPU,
        (_HOOKS + "test_adapters_of_frozen_layers",)),
    Row("Megatron", "tensor, Mamba layers left dense and counted", "Adam", State.STUB,
        (_HOOKS + "test_linears_that_are_frozen_called_by_position_or_outside_of_layers",)),
    Row("Megatron", "experts", "Adam", State.CPU,
        (_HOOKS + "test_experts_are_left_alone_unless_asked",)),
    Row("Megatron", "tensor, sequence; linears of Transformer Engine", "Adam", State.STUB,
        (_ENGINE + "test_with_sequence_parallelism", _ENGINE + "test_without_sequence_parallelism")),
    Row("Megatron", "tensor in fp8 or fp4, with `tp_comm_overlap`, or with fused operations", "any",
        State.REFUSED, (_HOOKS + _REFUSED, _ENGINE + _REFUSED)),
    Row("Megatron", "Megatron-FSDP, PyTorch FSDP2, generalised tensor parallelism", "any",
        State.REFUSED, (_HOOKS + _REFUSED,)),
    Row("torchft", "replicas of a quorum, HSDP", "AdamW", State.CPU,
        ("torchft/test_torchft::test_sparsity_zero_is_as_torchft", "torchft/test_torchft::test_hsdp")),
    Row("Accelerate, Trainer, Lightning", "DDP", "AdamW", State.CPU,
        ("huggingface/test_huggingface::test_one_call_for_torch_ddp",
         "huggingface/test_huggingface::test_lightning")),
)  # fmt: skip


class Effect(Enum):
    """The effect of a key in a training of four steps."""

    WEIGHTS = "weights"
    BYTES = "bytes"
    NONE = "nothing"
    REFUSED = "refused"


class Key(NamedTuple):
    """A key of ``dct.data_parallel``, and what a value of it changes.

    Attributes:
        key, value: As in the section.
        but: Frameworks in which it has another effect than ``effect``.
        beside: Keys that stand beside it.
        alone: True if the keys of the other rows' base do not stand beside it.
    """

    key: str
    value: Any
    effect: Effect = Effect.WEIGHTS
    but: Mapping[str, Effect] = MappingProxyType({})
    beside: Mapping[str, Any] = MappingProxyType({})
    alone: bool = False

    @property
    def effects(self) -> dict[str, Effect]:
        """The effect by framework; ``tests/frameworks/test_keys.py`` holds those of :data:`_RUN`."""
        settings = DataParallelConfig.of({self.key: self.value})
        return {
            name: Effect.REFUSED
            if any(key == self.key for key, _ in refused(name, settings))
            else self.but.get(name, self.effect)
            for name in FRAMEWORKS
        }


FRAMEWORKS = ("torch DDP", "FSDP2", "FSDP2 on one mesh", "torchft", "Megatron", "DeepSpeed")
#: Frameworks in which every key is run.
_RUN = ("torch DDP", "FSDP2", "DeepSpeed")
KEYS = (
    Key("enabled", False),
    Key("sparsity", 0.5),
    Key("quality", "dense"),
    Key("value_dtype", "int8"),
    Key("min_numel", 10**6),
    Key("feedback", "none", but={"torchft": Effect.WEIGHTS, "FSDP2 on one mesh": Effect.NONE}),
    Key("residual_dtype", "bf16", but={"FSDP2 on one mesh": Effect.REFUSED}),
    Key("exchange", "two_phase", but={"DeepSpeed": Effect.NONE}),
    Key("nodes", 2),
    Key("warmup_steps", 2),
    Key("sparsity_warmup_steps", 3),
    Key("total_steps", 10, beside={"feedback": "auto"}),
    Key("adaptive", {"kind": "accordion", "sparsity": 0.2, "interval": 1}),
    Key("parameters", {}),
    Key("local_steps", 2, alone=True),
    Key("exchange_of", "updates", alone=True),
    Key("verify", {"every": 1}, Effect.BYTES),
    Key("nonfinite_action", "skip", Effect.BYTES, but={"torch DDP": Effect.NONE}),
    Key("expert", {"threshold": "topk"}),
)


def key_table() -> str:
    """Return the table of keys and frameworks; keys of the same effects share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in KEYS:
        cells = []
        for name, effect in row.effects.items():
            run = name in _RUN or effect is Effect.REFUSED
            cells.append(effect.value if run else "accepted")
        rows.setdefault(tuple(cells), []).append(f"`{row.key}: {row.value}`")
    lines = [f"| key: value | {' | '.join(FRAMEWORKS)} |", "|---|" + "---|" * len(FRAMEWORKS)]
    lines += [f"| {', '.join(keys)} | {' | '.join(cells)} |" for cells, keys in rows.items()]
    return "\n".join(lines)


def framework_table() -> str:
    """Return the table of frameworks: the combinations that were run, and those that are refused."""
    frameworks = dict.fromkeys(row.framework for row in ROWS)
    columns = [State.GPU, State.CPU, State.STUB, State.REFUSED]
    lines = [f"| framework | {' | '.join(state.value for state in columns)} |", "|---" * 5 + "|"]
    for name in frameworks:
        cells = [
            "<br>".join(
                f"{row.parallelism} ({row.optimizer})"
                for row in ROWS
                if row.framework == name and row.state is state
            )
            for state in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _between(page: str, begin: str, end: str, table: str) -> str:
    before, found, rest = page.partition(begin)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}" if found else page


def updated(page: str) -> str:
    """Return the page with the tables of these rows."""
    page = _between(page, _BEGIN, _END, framework_table())
    return _between(page, _KEYS_BEGIN, _KEYS_END, key_table())


if __name__ == "__main__":
    path = Path(__file__).with_name("support.md")
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
