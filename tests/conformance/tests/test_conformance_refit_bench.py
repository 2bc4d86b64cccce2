"""The benchmark of refits: what it says of its tensors, and what it refuses."""

from __future__ import annotations

import json
from importlib.metadata import distribution

import pytest
import torch

from rl_conformance.refit_bench.bench import Bench, Tensors
from rl_core.cli import main
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


def test_core_names_the_commands_of_this_distribution(capsys):
    points = distribution("rl-conformance").entry_points.select(group="rl_core.commands")
    # A command of two words is listed below the first, which core has.
    *others, last = sorted(point.name for point in points if "." not in point.name)
    with pytest.raises(SystemExit):
        main(["frob"])
    assert f"{', '.join(others)} and {last} come with: pip install" in capsys.readouterr().err


def test_a_small_run_measures_every_way_next_to_its_bound(capsys):
    assert (
        main(["refit", "bench", "--gb", "0.001", "--tensors", "3", "--repeats", "1", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    bounds = [row["what"] for row in found["rows"] if row["of_bound"] is None]
    assert bounds == ["one copy", "two copies"]
    assert {row["bound"] for row in found["rows"]} == {"", *bounds}
    assert len(found["reports"]) == len(found["rows"]) - len(bounds) == 8


def test_the_command_says_so_without_a_traceback(capsys):
    assert main(["refit", "bench", "--device", "cuda:99", "--gb", "0.001"]) == 1
    said = capsys.readouterr().err
    assert "Error: refit bench: device 'cuda:99' cannot be used: " in said
    assert "Fix: " in said
    assert "Traceback" not in said
