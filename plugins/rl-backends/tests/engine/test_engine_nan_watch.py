"""The memory of a cache is cleared once after a refit that follows NaN, and at no other time."""

from __future__ import annotations

import math

import pytest
import torch

from rl_backends.engine.nan_watch import NanWatch


@pytest.mark.parametrize(
    ("seen", "cleared"),
    [([], False), ([-math.inf, math.inf, 1.0], False), ([1.0, math.nan, 2.0], True)],
)
def test_a_cache_is_cleared_before_the_first_rows_after_the_next_refit(seen, cleared):
    watch, keys = NanWatch(), torch.ones(3)
    eight_bits, places = torch.ones(3, dtype=torch.uint8), torch.ones(3, dtype=torch.int64)
    held = [(keys, [eight_bits]), places, None]
    with torch.inference_mode():  # as engines compute
        watch.look(torch.empty(0, 4))
        for number in seen:
            watch.look(torch.tensor([[0.5, number], [0.5, 0.5]]))
    watch.clear(held)  # these rows go on with what they have
    assert keys.all()
    watch.committed(1)
    watch.clear(held)
    assert [bool(one.all()) for one in (keys, eight_bits, places)] == [not cleared] * 2 + [True]
    keys.fill_(1)
    watch.committed(2)
    watch.clear(held)
    assert keys.all()
