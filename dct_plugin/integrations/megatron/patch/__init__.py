"""``dct patch-launch``: have a shell script start its training through ``python -m dct_plugin.megatron``.

``shell`` reads the commands of a script, ``launches`` finds the launches, ``command`` changes the text and is
the command line.
"""

from .command import BACKUP, LARGEST, patch, revert
from .launches import MODULE, find_launches
from .shell import LaunchError

__all__ = ["BACKUP", "LARGEST", "MODULE", "LaunchError", "find_launches", "patch", "revert"]
