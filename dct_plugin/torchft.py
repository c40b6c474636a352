"""torchft: ``from dct_plugin.torchft import ProcessGroupGloo``.

Only the short name; the work is done by :mod:`dct_plugin.integrations.torchft`.
"""

from .integrations.torchft import ProcessGroupGloo, ProcessGroupNCCL

__all__ = ["ProcessGroupGloo", "ProcessGroupNCCL"]
