"""``dct patch-launch``: have a shell script start its training through ``python -m dct_plugin.megatron``.

``syntax`` reads commands from the tree that tree-sitter-bash makes of a script, ``variables`` keeps what
they assign, ``launchers`` knows the launchers and their options, ``finder`` finds the launches, ``edit``
changes the text, ``files`` reads and replaces files, ``command`` is the command line.
"""

from .edit import patch, revert
from .finder import MODULE, Launch, LaunchError, Launches, find_launches
from .launchers import TRAINING

__all__ = ["MODULE", "TRAINING", "Launch", "LaunchError", "Launches", "find_launches", "patch", "revert"]
