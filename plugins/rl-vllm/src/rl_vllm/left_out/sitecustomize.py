"""Run at the start of every Python process of an engine whose environment has this folder first."""

import os
import sys
from typing import Any

modules: dict[str, Any] = sys.modules
for name in os.environ.get("RL_VLLM_LEFT_OUT", "").split():
    modules[name] = None  # as one that is not installed
