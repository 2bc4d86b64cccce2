"""Which trainer rank sends what to which engine rank, and how long that takes at least.

:mod:`~rl_cli.planning.moves` is the plan, a function of boxes and devices alone.
:mod:`~rl_cli.planning.models` and :mod:`~rl_cli.planning.shapes` give the boxes of a model without
its weights, :mod:`~rl_cli.planning.prediction` counts the bytes of a plan.
"""

from rl_cli.planning.models import config_of, model_of
from rl_cli.planning.moves import Devices, Move, Shard, Stack, moves_of
from rl_cli.planning.prediction import Links, Prediction, predict
from rl_cli.planning.shapes import Shape

__all__ = [
    "Devices",
    "Links",
    "Move",
    "Prediction",
    "Shape",
    "Shard",
    "Stack",
    "config_of",
    "model_of",
    "moves_of",
    "predict",
]
