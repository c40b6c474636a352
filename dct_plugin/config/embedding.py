"""``dct.embedding``: vectors of sharded embedding tables, and the gradients that come back."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import Section


class EmbeddingChannelConfig(Section):
    """Vectors of [sharded embedding tables](embeddings.md) and their gradients."""

    section_path = "dct.embedding"

    enabled: bool = True
    """Compress vectors and gradients. false is a plain all-to-all.

    `false` for a run to compare with.
    """
    deduplicate: bool = True
    """Send each distinct row once per message, and sum the gradients of equal rows first. Lossless; on
    one-hot fields 3 to 20 times fewer bytes.

    `false` only to compare.
    """
    error_bound: float | None = Field(default=None, gt=0)
    """Largest absolute error of an entry; null does not quantise.

    0.01 lost nothing measurable on Criteo and Diabetes; 0.03 at most 0.0006 AUC, for a fifth fewer bytes
    ([measured](quality.md#recommenders-what-the-embedding-exchange-may-lose)).
    """
    gradient_bound: float | None = Field(default=None, gt=0)
    """Largest error of a gradient entry, as a multiple of the root mean square of its table's gradient in
    the message; null does not quantise.

    0.1 lost nothing measurable; 0.3 at most 0.0007 AUC, for a third fewer bytes
    ([measured](quality.md#recommenders-what-the-embedding-exchange-may-lose)).
    """
    sparsity: float = Field(default=0.0, ge=0, lt=1)
    """Share of the entries that are not sent (DCT-MP); 0 sends all.

    Try the bounds first: at equal bytes they cost less quality.
    """
    dense_gradient: bool = False
    """Send back the gradients of all entries, not only of the sent ones.

    `true` about halves the loss in quality of a threshold; the message back is dense.
    """
    value_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Type of entries and gradients that are not quantised; auto is bf16 with a threshold (fp16 for fp16
    tables), else the table's own type.

    `fp32` for exact values with a threshold.
    """
    evaluation: bool = True
    """Evaluate with threshold and bounds, as in training. false evaluates the uncompressed tables.

    `false` to compare.
    """
