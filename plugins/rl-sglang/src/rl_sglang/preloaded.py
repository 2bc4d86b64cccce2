"""What a CPU engine needs imported, as the fork server imports it: once for all engines."""

from __future__ import annotations

from rl_sglang.cpu import stand_in

stand_in()

from sglang.srt.models import registry  # noqa: E402

import rl_sglang.engine  # noqa: E402
import rl_sglang.scheduler  # noqa: E402, F401

_ = registry.ModelRegistry
