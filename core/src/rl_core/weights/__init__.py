"""Moving weights from a trainer into engines: exact, verified, never torn.

``refit(policy, generation)`` is the whole of it for users. Backends hold a :class:`RefitSender` or
a :class:`RefitReceiver`. ``docs/protocol.md`` states the protocol.
"""

from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.driver import refit
from rl_core.weights.options import DEFAULT_BUCKET_BYTES, DEFAULT_DEADLINE_S, SendOptions
from rl_core.weights.receiving.receiver import RefitReceiver
from rl_core.weights.report import RefitReport
from rl_core.weights.sending.sender import RefitSender

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DEFAULT_DEADLINE_S",
    "RefitReceiver",
    "RefitReport",
    "RefitSender",
    "SendOptions",
    "WeightManifest",
    "refit",
]
