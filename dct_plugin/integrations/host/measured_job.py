"""Facts about a job that ``dct advise`` measures. Imports the standard library only."""

from __future__ import annotations

import math
from typing import Any

#: In the environment of such a job: the file for its figures.
VARIABLE = "DCT_ADVISE"

#: The section of such a job: the settings that jobs get are timed, all steps are dense.
SECTION: dict[str, Any] = {"data_parallel": {"quality": "bytes", "sparsity": 0.99, "feedback": "local"}}

#: What is known about the training besides its figures.
FACTS: dict[str, Any] = {"optimizer": [], "momentum": 0.0, "lr": math.inf, "stage": 0}
