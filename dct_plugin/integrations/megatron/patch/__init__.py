"""``dct patch-launch``: have a shell script start its training through ``python -m dct_plugin.megatron``.

``shell`` reads commands from the tree that tree-sitter-bash makes of a script, ``launches`` finds the
launches, ``command`` changes the text and is the command line.
"""

from .command import BACKUP, LARGEST, patch, revert
from .launches import MODULE, find_launches
from .shell import DEEPEST, LaunchError

__all__ = ["BACKUP", "DEEPEST", "LARGEST", "MODULE", "LaunchError", "find_launches", "patch", "revert"]
