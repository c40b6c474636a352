"""Entry of ``python -m dct_plugin.megatron``."""

from __future__ import annotations

import sys

from dct_plugin.integrations.megatron.launch import main

if __name__ == "__main__":
    sys.exit(main())
