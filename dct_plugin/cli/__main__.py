"""``python -m dct_plugin.cli``, for where the ``dct`` script is not on the path."""

from . import main

main()
