"""The contract and nothing else: abstract classes and TypedDicts, no logic, no heavy imports."""

# ruff: noqa: F403 - all that these modules name is public here
from rl_core.interfaces import generation, loss, policy, specs, weights, worker
from rl_core.interfaces.generation import *
from rl_core.interfaces.loss import *
from rl_core.interfaces.policy import *
from rl_core.interfaces.specs import *
from rl_core.interfaces.weights import *
from rl_core.interfaces.worker import *

__all__: list[str] = []
__all__ += generation.__all__
__all__ += loss.__all__
__all__ += policy.__all__
__all__ += specs.__all__
__all__ += weights.__all__
__all__ += worker.__all__
