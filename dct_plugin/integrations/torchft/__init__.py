"""torchft: process groups whose all-reduce of floating-point tensors exchanges compressed messages.

:mod:`.process_groups` has the classes for ``torchft.Manager(pg=...)``. The other modules are parts of them:
the replicas of one quorum, the residuals, which outlive it, and the averages of weights of LocalSGD.
"""

from .process_groups import ProcessGroupGloo, ProcessGroupNCCL

__all__ = ["ProcessGroupGloo", "ProcessGroupNCCL"]
