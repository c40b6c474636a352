"""``python -m dct_plugin.integrations.deepspeed train.py ...``: run a script with the plugin active.

For environments in which torch's entry points are switched off; ``-m module`` in place of the script works,
too.
"""

from __future__ import annotations

import os
import runpy
import sys

from . import activate

USAGE = "usage: python -m dct_plugin.integrations.deepspeed (script.py | -m module) [arguments ...]"


def main(arguments: list[str]) -> None:
    """Run what ``arguments`` name as ``__main__``, as the interpreter would have without this module."""
    as_module = arguments[:1] == ["-m"]
    program = arguments[1:] if as_module else arguments
    if not program or program[0] in ("-h", "--help"):
        sys.exit(USAGE if not program else print(USAGE))
    activate()
    sys.argv = list(program)
    if as_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        # "python -m" put the working directory first; a script expects its own folder there.
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
