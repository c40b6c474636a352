"""Entry of ``python -m dct_plugin.megatron``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from dct_plugin.integrations.megatron.launch import main

    sys.exit(main())
