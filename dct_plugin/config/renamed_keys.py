"""Keys and values of version 0.1 and what to write in their place. This file is removed after one release."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: What to write in place of a key; ``{value}`` is the key's value. Keys of the three places of
#: ``dct.model_parallel`` are in ``_ACTIVATIONS``.
_KEYS: Mapping[str, str] = {
    "data_parallel.error_feedback": '"feedback": {value}',
    "data_parallel.step_ahead_coefficient": '"expert": {{"step_ahead_coefficient": {value}}}',
    "data_parallel.server_density": '"expert": {{"server_density": {value}}}',
    "data_parallel.threshold": '"expert": {{"threshold": {value}}}',
    "data_parallel.threshold_lifespan": '"expert": {{"threshold_lifespan": {value}}}',
    "data_parallel.threshold_tracking": '"expert": {{"threshold": "fixed"}} for false; nothing for true',
    "data_parallel.adaptive_sparsity": '"adaptive": {{"kind": "accordion", "sparsity": {value}}}',
    "data_parallel.adaptive_interval": '"adaptive": {{"kind": "accordion", "interval": {value}}}',
    "data_parallel.verify_every": '"verify": {{"every": {value}}}',
    "data_parallel.verify_action": '"verify": {{"action": {value}}}',
}
#: The same for each of ``dct.model_parallel.pipeline``, ``tensor`` and ``experts``.
_ACTIVATIONS: Mapping[str, str] = {
    "method": '"forward": {{"method": {value}}}',
    "gradient_method": '"backward": {{"method": {value}}}, or nothing for "same"',
    "sparsity": '"forward": {{"method": "threshold", "sparsity": {value}}}',
    "gradient_sparsity": '"backward": {{"method": "threshold", "sparsity": {value}}}',
    "value_dtype": '"forward": {{"method": ..., "value_dtype": {value}}}',
    "gradient_value_dtype": '"backward": {{"method": "answer", "value_dtype": {value}}}',
    "enabled": '"forward": "none" for false; nothing for true',
    **{
        key: f'"forward": {{{{"method": ..., "{key}": {{value}}}}}}'
        for key in ("bits", "error_bound", "rate")
    },
    **{
        f"gradient_{key}": f'"backward": {{{{"method": ..., "{key}": {{value}}}}}}'
        for key in ("bits", "error_bound", "rate")
    },
}
#: Keys that have no successor, and why.
_GONE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "data_parallel.density_band", "data_parallel.capacity",
            "embedding.threshold_lifespan", "embedding.threshold_smoothing", "embedding.entropy",
            *(
                f"{place}.{key}"
                for place in ("pipeline", "tensor", "experts")
                for key in (
                    "threshold", "threshold_lifespan", "threshold_tracking", "density_band", "capacity",
                    "group_size", "basis_interval", "rank", "gradient_rank",
                )
            ),
        ),
        "the program chooses it",
    ),
    **dict.fromkeys(
        (
            "data_parallel.error_averaging_interval", "data_parallel.error_averaging_dtype",
            "data_parallel.expert.error_averaging",
        ),
        'averaging residuals gained nothing over "feedback": "step_ahead"',
    ),
    **dict.fromkeys(
        ("data_parallel.momentum_correction", "data_parallel.feedback.momentum"),
        'it lost to "feedback": "step_ahead", which works with the optimizer\'s own momentum',
    ),
    **dict.fromkeys(
        (
            *("pipeline.stochastic", "tensor.stochastic", "experts.stochastic", "forward.stochastic"),
            *("pipeline.gradient_stochastic", "tensor.gradient_stochastic", "experts.gradient_stochastic"),
            "backward.stochastic",
        ),
        "values are rounded to nearest, whose error is half as large",
    ),
    **dict.fromkeys(
        ("pipeline.rotate", "tensor.rotate", "experts.rotate", "forward.rotate", "backward.rotate"),
        'rotated values of 1 and 2 bits lost to "transform" at equal bytes',
    ),
    **dict.fromkeys(
        ("data_parallel.update", "data_parallel.exchange_every", "data_parallel.feedback.every"),
        'local updates lost to "feedback": "step_ahead"',
    ),
    "data_parallel.index_encoding": "the encoder takes the smallest encoding",
    "data_parallel.momentum_masking": "it cost quality",
    "data_parallel.server_error_feedback": "owners always keep what they did not send back",
    **dict.fromkeys(
        ("embedding.bound_classes", "embedding.bound_start", "embedding.bound_decay_steps"),
        'one "error_bound" serves all tables and steps',
    ),
    "embedding.granularity": "the entries of a table are ranked together",
    "embedding.warmup_steps": "dense steps did not change results",
    "embedding.gradient_value_dtype": "value_dtype is used for gradients, too",
    "data_parallel.parameters.enabled": "the section is used if it is there",
    "kernels.threads": "torch.set_num_threads sets it",
}  # fmt: skip
_STEP_AHEAD = '"step_ahead", which lost less at equal bytes, or "local"'
#: Values that a key had, and what to write in their place.
_VALUES: Mapping[tuple[str, str], str] = {
    ("data_parallel.adaptive", "off"): "null",
    ("data_parallel.feedback", "local_updates"): _STEP_AHEAD,
    ("data_parallel.feedback.kind", "local_updates"): _STEP_AHEAD,
}


#: Methods of activations that are gone, and why.
_METHODS: Mapping[str, str] = {
    "topk": 'it gained nothing over "threshold"; write {"method": "threshold", "sparsity": ...}',
    "randomk": 'it lost to "threshold" at equal bytes; write {"method": "threshold", "sparsity": ...}',
    "lowrank": 'it lost to "transform" at equal bytes; write {"method": "transform", "rate": ...}',
    "learned": 'it lost to "transform" at equal bytes; write {"method": "transform", "rate": ...}',
}


def replacement(path: str, value: Any) -> str | None:
    """Return what to write in place of an old key or value at ``path``; None for one that never was valid."""
    shown = json.dumps(value, default=str)
    for name, new in _KEYS.items():
        if path.endswith(f".{name}"):
            return f"no such key any more; write {new.format(value=shown)}"
    place, _, key = path.rpartition(".")
    if place.rpartition(".")[2] in ("pipeline", "tensor", "experts") and key in _ACTIVATIONS:
        return f"no such key any more; write {_ACTIVATIONS[key].format(value=shown)}"
    for name, reason in _GONE.items():
        if path.endswith(f".{name}"):
            return f"no such key any more: {reason}; leave it out"
    for (name, old), new in _VALUES.items():
        if path.endswith(f".{name}") and value == old:
            return f"no such value any more; write {new}"
    method = value.get("method") if isinstance(value, Mapping) else value
    if key in ("forward", "backward") and isinstance(method, str) and method in _METHODS:
        return f"no such method any more: {_METHODS[method]}"
    return None
