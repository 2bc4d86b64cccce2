"""The benchmark of refits: what it says of its tensors, and what it refuses."""

from __future__ import annotations

import json

import pytest
import refit_copies
import torch
from refit_bench.bench import Bench, Tensors

from rl_core.errors import ConfigError


def test_the_tensors_say_where_they_are():
    tensors = Tensors({"w": torch.empty(3, device="meta")})
    assert tensors.device == "meta"


@pytest.mark.parametrize("device", ["cuda:99", "cude", "meta"])
def test_a_device_that_cannot_be_used_is_refused(device):
    with pytest.raises(ConfigError, match=device) as caught:
        Bench(nbytes=1000, tensors=2, device=device)
    assert caught.value.details["key"] == "device"
    assert "cuda:N" in str(caught.value.fix)


@pytest.mark.full
def test_a_small_run_measures_every_way_next_to_its_bound(capsys):
    refit_copies.main(["--gb", "0.001", "--tensors", "3", "--repeats", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    bounds = [row["what"] for row in found["rows"] if row["of_bound"] is None]
    assert bounds == ["one copy", "two copies"]
    assert {row["bound"] for row in found["rows"]} == {"", *bounds}
    assert len(found["reports"]) == len(found["rows"]) - len(bounds) == 8
