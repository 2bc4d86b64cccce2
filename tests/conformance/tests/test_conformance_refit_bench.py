"""The benchmark of refits: what it says of its tensors, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from rl_core.cli import main
from rl_core.errors import ConfigError
from rl_core.refit.bench import Bench, Tensors


def test_the_tensors_say_where_they_are():
    tensors = Tensors({"w": torch.empty(3, device="meta")})
    assert tensors.device == "meta"


@pytest.mark.parametrize("device", ["cuda:99", "cude", "meta"])
def test_a_device_that_cannot_be_used_is_refused(device):
    with pytest.raises(ConfigError, match=device) as caught:
        Bench(nbytes=1000, tensors=2, device=device)
    assert caught.value.details["key"] == "device"
    assert "cuda:N" in str(caught.value.fix)


def test_the_command_says_so_without_a_traceback(capsys):
    assert main(["refit", "bench", "--device", "cuda:99", "--gb", "0.001"]) == 1
    said = capsys.readouterr().err
    assert "Error: refit bench: device 'cuda:99' cannot be used: " in said
    assert "Fix: " in said
    assert "Traceback" not in said
