"""Keys and values of version 0.1 and what to write in their place. This file is removed after one release."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

#: The three places of ``dct.model_parallel``, which had the same keys.
_PLACE = "(?:pipeline|tensor|experts)"

#: What to write in place of a key, by the pattern of its path; ``{value}`` is its value, ``{key}`` the part
#: of its name that stayed.
_RENAMED: Mapping[str, str] = {
    "data_parallel.error_feedback": '"feedback": {value}',
    "data_parallel.(?P<key>step_ahead_coefficient|server_density|threshold|threshold_lifespan)":
        '"expert": {{"{key}": {value}}}',
    "data_parallel.threshold_tracking": '"expert": {{"threshold": "fixed"}} for false; nothing for true',
    "data_parallel.adaptive_(?P<key>sparsity|interval)":
        '"adaptive": {{"kind": "accordion", "{key}": {value}}}',
    "data_parallel.verify_(?P<key>every|action)": '"verify": {{"{key}": {value}}}',
    f"{_PLACE}.method": '"forward": {{"method": {value}}}',
    f"{_PLACE}.gradient_method": '"backward": {{"method": {value}}}, or nothing for "same"',
    f"{_PLACE}.sparsity": '"forward": {{"method": "threshold", "sparsity": {value}}}',
    f"{_PLACE}.gradient_sparsity": '"backward": {{"method": "threshold", "sparsity": {value}}}',
    f"{_PLACE}.(?P<key>value_dtype|bits|error_bound|rate)": '"forward": {{"method": ..., "{key}": {value}}}',
    f"{_PLACE}.gradient_value_dtype": '"backward": {{"method": "answer", "value_dtype": {value}}}',
    f"{_PLACE}.gradient_(?P<key>bits|error_bound|rate)": '"backward": {{"method": ..., "{key}": {value}}}',
    f"{_PLACE}.enabled": '"forward": "none" for false; nothing for true',
}  # fmt: skip
_CHOSEN = "the program chooses it"
#: Why a key has no successor, by the pattern of its path.
_GONE: Mapping[str, str] = {
    "data_parallel.(density_band|capacity)": _CHOSEN,
    "embedding.(threshold_lifespan|threshold_smoothing|entropy)": _CHOSEN,
    f"{_PLACE}.(threshold(_lifespan|_tracking)?|density_band|capacity)": _CHOSEN,
    f"{_PLACE}.(group_size|basis_interval|(gradient_)?rank)": _CHOSEN,
    "data_parallel.(error_averaging_(interval|dtype)|expert.error_averaging)":
        'averaging residuals gained nothing over "feedback": "step_ahead"',
    "data_parallel.(momentum_correction|feedback.momentum)":
        'it lost to "feedback": "step_ahead", which works with the optimizer\'s own momentum',
    f"({_PLACE}.(gradient_)?|(forward|backward).)stochastic":
        "values are rounded to nearest, whose error is half as large",
    f"({_PLACE}|forward|backward).rotate":
        'rotated values of 1 and 2 bits lost to "transform" at equal bytes',
    "data_parallel.(update|exchange_every|feedback.every)":
        'local updates lost to "feedback": "step_ahead"',
    "data_parallel.index_encoding": "the encoder takes the smallest encoding",
    "data_parallel.momentum_masking": "it cost quality",
    "data_parallel.server_error_feedback": "owners always keep what they did not send back",
    "embedding.(bound_classes|bound_start|bound_decay_steps)":
        'one "error_bound" serves all tables and steps',
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
    for pattern, new in _RENAMED.items():
        if match := _match(pattern, path):
            shown = json.dumps(value, default=str)
            return f"no such key any more; write {new.format(value=shown, **match.groupdict())}"
    for pattern, reason in _GONE.items():
        if _match(pattern, path):
            return f"no such key any more: {reason}; leave it out"
    for (name, old), new in _VALUES.items():
        if path.endswith(f".{name}") and value == old:
            return f"no such value any more; write {new}"
    method = value.get("method") if isinstance(value, Mapping) else value
    if path.endswith((".forward", ".backward")) and isinstance(method, str) and method in _METHODS:
        return f"no such method any more: {_METHODS[method]}"
    return None


def _match(pattern: str, path: str) -> re.Match[str] | None:
    """Match the end of a path with a pattern, in which points stand for themselves."""
    escaped = pattern.replace(".", r"\.")
    return re.search(rf"\.(?:{escaped})\Z", path)
