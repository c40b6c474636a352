"""DCT for DeepSpeed: a ``dct`` section in the JSON, nothing else.

``import dct_plugin.integrations.deepspeed``, before or after ``import deepspeed``, activates the plugin where
torch's entry points are switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``); everywhere else it is not needed
and does no harm. It imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

from ..autoload import autoload

autoload()
