"""Several ranks of one trainer in one refit: rank 0 sends, the others follow its messages.

Rank 0 tells the others over ZeroMQ which tensors are gathered next, that all was read, or that it
stops. Nothing of this goes through the trainer's own collectives, so that a rank that hangs in one,
is stopped, or is gone, is named while the refit still has time to say so.
"""

from rl_backends.gathering.processes import RankProcess, gather, join_ranks, other_weights
from rl_backends.gathering.source import GatheredSource, RefitRanks

__all__ = ["GatheredSource", "RankProcess", "RefitRanks", "gather", "join_ranks", "other_weights"]
