"""A bucket of DDP's, and the gradients in it that DDP leaves alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from .complex_parameters import entries_of


class Bucket:
    """The layout of a bucket that DDP has filled.

    Args:
        full: The bucket.

    Attributes:
        parameters: The parameters, in the order of their gradients.
        views: The gradients in the bucket's buffer, 1-D.
    """

    def __init__(self, full: dist.GradBucket) -> None:
        self.parameters = list(full.parameters())
        self.views = full.buffer().split([entries_of(parameter) for parameter in self.parameters])

    def note_gradients(self) -> None:
        """Note the parameters' own gradients, before DDP copies those of the buffer there."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._before = [(each, 0 if each is None else each._version) for each in gradients]

    def unused(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameter and view of the gradients that DDP, which has finished, did not copy.

        Under ``find_unused_parameters`` it leaves the gradient of a parameter that no rank used in the step.
        """
        for parameter, view, (before, version) in zip(self.parameters, self.views, self._before, strict=True):
            untouched = parameter.grad is before and (before is None or before._version == version)
            # With gradient_as_bucket_view the gradient is the view.
            if untouched and (before is None or before.data_ptr() != view.data_ptr()):
                yield parameter, view
