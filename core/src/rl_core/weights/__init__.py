"""Moving weights from a trainer into engines: exact, verified, never torn.

``refit(policy, generation)`` is the whole of it for users. Backends hold a :class:`RefitSender` or
a :class:`RefitReceiver`. ``docs/refit.md`` states the protocol.

The package can be called, because Python puts it in the place of ``rl_core.refit``, the function,
as soon as anything imports it.
"""

import sys
from types import ModuleType
from typing import Any

from rl_backends.gathering import GatheredSource, RefitRanks
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.driver import refit
from rl_core.weights.modules import ModuleReceiver, ModuleSender
from rl_core.weights.options import DEFAULT_BUCKET_BYTES, DEFAULT_DEADLINE_S, SendOptions
from rl_core.weights.receiving.receiver import RefitReceiver
from rl_core.weights.report import RefitReport
from rl_core.weights.sending.sender import RefitSender
from rl_core.weights.sending.sources import WeightChanges

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DEFAULT_DEADLINE_S",
    "GatheredSource",
    "ModuleReceiver",
    "ModuleSender",
    "RefitRanks",
    "RefitReceiver",
    "RefitReport",
    "RefitSender",
    "SendOptions",
    "WeightChanges",
    "WeightManifest",
    "refit",
]


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> RefitReport:
        """As :func:`rl_core.weights.driver.refit`."""
        return refit(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
