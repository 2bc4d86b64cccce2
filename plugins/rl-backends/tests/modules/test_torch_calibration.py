"""Scales do not depend on who saw which magnitudes."""

from __future__ import annotations

import pytest
import torch

from rl_backends.torch.calibration import Calibration
from rl_core.errors import TrainingError


def states(seed: int) -> torch.Tensor:
    return torch.randn(1, 4, 50, 8, generator=torch.Generator().manual_seed(seed))


def test_what_ranks_counted_adds_up():
    whole = Calibration(include_q=True)
    q, k, v = (states(seed) for seed in range(3))
    for layer in range(2):
        whole.observe(layer, q, k, v * (layer + 1))
    # One rank has two heads of layer 0, another the other two, a third has layer 1.
    ranks = [Calibration(include_q=True) for _ in range(3)]
    ranks[0].observe(0, q[:, :2], k[:, :2], v[:, :2])
    ranks[1].observe(0, q[:, 2:], k[:, 2:], v[:, 2:])
    ranks[2].observe(1, q, k, v * 2)
    total = Calibration(include_q=True)
    for rank in ranks:
        total.add(rank.counts)
    assert total.scales(99.0, 1.05) == whole.scales(99.0, 1.05)
    assert set(total.scales(99.0, 1.05)["layers"]) == {"layer_0", "layer_1"}
    assert ranks[0].counts[0, "k"].sum() == 2 * 50 * 8  # nothing was added to a rank's own


def test_a_scale_covers_the_largest_magnitude():
    calibration = Calibration()
    key = states(0)
    calibration.observe(3, key, key, key)
    scale = calibration.scales(100, 1.0)["layers"]["layer_3"]["k_scale"]
    largest = float(key.abs().max())
    assert largest <= scale * 448 <= largest * 1.003


def test_values_that_are_not_finite_name_their_layer():
    calibration = Calibration()
    calibration.observe(1, states(0), torch.full((1, 1, 1, 1), torch.inf), states(1))
    with pytest.raises(TrainingError, match="layer 1: k has values"):
        calibration.scales(100, 1.0)
