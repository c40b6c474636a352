"""A DLRM under DeepSpeed: its shards are experts, and its tables have an optimizer of their own."""

from __future__ import annotations

from typing import Literal, get_args

Method = Literal["sgd", "adam", "adagrad", "rowwise_adagrad"]
#: What :class:`~dct_plugin.integrations.dlrm.optimizers.HybridOptimizer` does with a parameter group.
METHODS: tuple[str, ...] = get_args(Method)
