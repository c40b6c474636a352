"""``dct patch-launch``: have a shell script start its training through ``python -m dct_plugin.megatron``.

``launchers`` knows the launchers and their options, ``shell`` reads commands, ``variables`` keeps what they
assign, ``finder`` finds the launches among them, ``edit`` changes the text, ``files`` reads and replaces
files, ``command`` is the command line.
"""

from .edit import patch, revert
from .finder import MODULE, Launch, LaunchError, Plan, plan
from .launchers import TRAINING

__all__ = ["MODULE", "TRAINING", "Launch", "LaunchError", "Plan", "patch", "plan", "revert"]
