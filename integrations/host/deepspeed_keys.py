"""Keys of a DeepSpeed JSON that nobody reads. DeepSpeed itself passes over them in silence.

A mistyped ``dct`` would train dense without a word, a mistyped ``optimizer`` without DeepSpeed's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

_READ = """
activation_checkpointing aio allgather_size amp autotuning bf16 bfloat16 checkpoint comet comms_logger
communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency
data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue
elasticity
expert_parallel flops_profiler fp16 gradient_accumulation_dtype gradient_accumulation_steps
gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine
load_universal_checkpoint memory_breakdown nebula optimizer pipeline prescale_gradients
progressive_layer_drop quantize_training scheduler seed seq_parallel_communication_data_type
sequence_parallel_size sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard timers
torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism
use_node_local_storage wall_clock_breakdown wandb weight_quantization zenflow zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer zero_optimization
"""
#: What DeepSpeed up to 0.19 reads at the top level of its JSON.
KNOWN = frozenset(_READ.split())


def near_misses(keys: Iterable[object], section: str) -> list[str]:
    """Return the keys that were probably meant to be ``section``, which is not among them.

    Such a key is the plugin's whole name, or the section's name in another case, with letters in another
    order, or one edit away from it (one letter more, fewer or different, with the same first letter).
    """
    found = []
    for key in map(str, keys):
        plain = re.sub(r"[^a-z]", "", key.lower())
        ours = plain == section or plain in (f"{section}plugin", f"{section}section")
        if key != section and key[:1] not in "_#/" and (ours or _one_edit_away(plain, section)):
            found.append(key)
    return found


def _one_edit_away(word: str, target: str) -> bool:
    if sorted(word) == sorted(target) or target in _without_one_letter(word):
        return True
    if word[:1] != target[:1]:
        return False
    differing = sum(a != b for a, b in zip(word, target, strict=False))
    return word in _without_one_letter(target) or (len(word) == len(target) and differing == 1)


def _without_one_letter(word: str) -> list[str]:
    return [word[:i] + word[i + 1 :] for i in range(len(word))]


def unread(keys: Iterable[object], ours: Collection[str], *, near: bool = False) -> list[str]:
    """Return keys that neither DeepSpeed nor the plugin reads: ``'optimzer' (did you mean 'optimizer'?)``.

    Args:
        keys: Keys of the top level.
        ours: Keys that the plugin reads.
        near: Only those that are close to one that is read.
    """
    known = KNOWN | set(ours)
    found = []
    for key in map(str, keys):
        if key not in known and key[:1] not in "_#/":
            closest = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.75)
            if closest or not near:
                found.append(repr(key) + (f" (did you mean {closest[0]!r}?)" if closest else ""))
    return found
