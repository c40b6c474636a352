"""torchft: ``from dct_plugin.torchft import ProcessGroupGloo``.

Short name of :mod:`dct_plugin.integrations.torchft`.
"""

from .integrations.torchft import ProcessGroupGloo, ProcessGroupNCCL

__all__ = ["ProcessGroupGloo", "ProcessGroupNCCL"]
