"""Entry of ``python -m dct_plugin.megatron``."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    # By name: the library knows no integration, this is only where its command line begins.
    sys.exit(importlib.import_module("dct_plugin.integrations.megatron.launch").main())
