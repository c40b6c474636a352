"""``dct.embedding``: vectors of sharded embedding tables, and the gradients that come back."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import Section


class EmbeddingChannelConfig(Section):
    """Vectors of [sharded embedding tables](embeddings.md) and their gradients."""

    section_path = "dct.embedding"

    enabled: bool = True
    """Compress vectors and gradients; false is a plain all-to-all of every vector.

    `false` for the host model's own all-to-all, the baseline of every comparison.
    """
    deduplicate: bool = True
    """Each distinct row of a table crosses once per message; gradients of equal rows are summed before they
    cross. Lossless.

    `false` only to measure what it brings; on one-hot fields it is 3 to 20 times fewer bytes.
    """
    error_bound: float | None = Field(default=None, gt=0)
    """Largest absolute error of an embedding entry; null does not quantise.

    0.01 cost nothing measurable on Criteo and Diabetes, 0.03 at most 0.0006 AUC for a fifth fewer bytes;
    see [quality](quality.md).
    """
    gradient_bound: float | None = Field(default=None, gt=0)
    """Largest error of a gradient entry, as a multiple of the root mean square of its table's gradient in
    the message; null does not quantise.

    0.1 cost nothing measurable, 0.3 at most 0.0007 AUC for a third fewer bytes; see [quality](quality.md).
    """
    sparsity: float = Field(default=0.0, ge=0, lt=1)
    """Share of the embedding entries that do not cross (DCT-MP); 0 sends all.

    After the bounds: at equal bytes quantising costs less quality.
    """
    dense_gradient: bool = False
    """Gradients of all entries come back, not only of those that crossed.

    `true` about halves the loss of quality of a threshold, for a dense message back.
    """
    value_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Type of entries and gradients that are not quantised; auto is bf16 under a threshold (fp16 for fp16
    tables), and the table's own type otherwise.

    `fp32` for exact values under a threshold.
    """
    evaluation: bool = True
    """Evaluate with threshold and bound, as trained; false evaluates the dense model.

    `false` only to see how far the dense weights are from the model that was trained.
    """
