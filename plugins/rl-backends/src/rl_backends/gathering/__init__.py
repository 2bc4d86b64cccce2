"""Several ranks of one trainer in one refit: rank 0 sends, the others follow its messages.

Rank 0 sends the others over ZeroMQ which tensors are gathered next, that all was read, or that it
stops. None of these messages goes through the trainer's own collectives. So rank 0 can name a rank
that hangs in one, was stopped, or died, before the refit's deadline.
"""

from rl_backends.gathering.changes import WeightChanges
from rl_backends.gathering.processes import RankProcess, gather, join_ranks, other_weights
from rl_backends.gathering.source import GatheredSource, RefitRanks

__all__ = [
    "GatheredSource",
    "RankProcess",
    "RefitRanks",
    "WeightChanges",
    "gather",
    "join_ranks",
    "other_weights",
]
