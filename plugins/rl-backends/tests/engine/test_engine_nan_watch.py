"""The memory of a cache is cleared once after a refit that follows NaN, and at no other time."""

from __future__ import annotations

import pytest
import torch

from rl_backends.engine.nan_watch import NanWatch


@pytest.mark.parametrize("seen", [1.0, torch.inf, torch.nan])
def test_a_cache_is_cleared_before_the_first_rows_after_the_next_refit(seen):
    watch, held = NanWatch(), [torch.ones(3, dtype=getattr(torch, t)) for t in ("half", "uint8")]
    places = torch.ones(3, dtype=torch.int64)

    def is_kept() -> bool:
        watch.clear([(held[0], held[1:]), places, None])
        return all(bool(one.all()) for one in held)

    with torch.inference_mode():  # as engines compute
        for numbers in ([], [0.5, seen], [0.5, 1.0]):
            watch.look(torch.tensor([numbers]))
    assert is_kept()  # these rows go on with what they have
    watch.committed(1)
    assert is_kept() == (seen == seen)  # which a NaN is not
    held = [torch.ones(3)]
    watch.committed(2)
    assert is_kept()
    assert places.all()
