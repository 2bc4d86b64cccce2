"""Moving weights from a trainer into engines: exact, verified, never torn.

``refit(policy, generation)`` is the whole of it for users. Backends hold a :class:`RefitSender` or
a :class:`RefitReceiver`. ``docs/refit.md`` states the protocol.
"""

from rl_core.refit.driver import RefitReport, refit
from rl_core.refit.manifest import WeightManifest
from rl_core.refit.receiver import RefitReceiver
from rl_core.refit.sender import DEFAULT_BUCKET_BYTES, DEFAULT_DEADLINE_S, RefitSender

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DEFAULT_DEADLINE_S",
    "RefitReceiver",
    "RefitReport",
    "RefitSender",
    "WeightManifest",
    "refit",
]
