"""Which part of every parameter a copy steps on, and files that cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_megatron import MegatronPolicy, sharding
from rl_megatron.checkpoint import _TensorFile
from rl_megatron.sharding import Share, make_optimizer, shares_of

OPTIONS: dict[str, Any] = {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}}


def group(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_copies_have_equal_parts_that_are_the_whole(tiny, built, monkeypatch, family, dtype):
    policy = built(MegatronPolicy(str(tiny(family)), torch_dtype=dtype, **OPTIONS))
    buffers = [*policy.model.buffers, *policy.model.expert_parallel_buffers]
    names = dict(policy._module.named_parameters())
    for size in (1, 2, 3, 4):
        if any(buffer.numel % size for buffer in buffers):
            continue  # megatron-core pads buffers for the copies there are
        found: dict[str, list[int]] = {name: [] for name in names}
        counts = []
        for rank in range(size):
            for buffer in buffers:
                monkeypatch.setattr(buffer, "data_parallel_group", group(size, rank))
            shares = shares_of(policy.model)
            assert list(shares) == list(shares_of(policy.model))
            for name, share in shares.items():
                assert share.parameter is names[name]
                found[name] += range(share.elements.start, share.elements.stop)
            optimizer = make_optimizer(shares, {})
            counts.append(sum(master.numel() for master in optimizer.masters.values()))
        for name, parameter in names.items():
            assert found[name] == list(range(parameter.numel()))
        padding = sum(buffer.numel for buffer in buffers) - sum(counts)
        assert max(counts) - min(counts) <= padding


def test_steps_of_parts_are_those_of_the_whole(tiny, built, monkeypatch):
    """Weight decay too, which a part, without the shape of its parameter, cannot know of."""
    path = str(tiny("qwen2"))
    whole, other = (built(MegatronPolicy(path, **OPTIONS)) for _ in range(2))
    data = training_batch([9, 4, 7])
    buffers = [*other.model.buffers]
    optimizers = []
    for rank in range(2):
        for buffer in buffers:
            monkeypatch.setattr(buffer, "data_parallel_group", group(2, rank))
        shares = shares_of(other.model)
        optimizers.append((shares, make_optimizer(shares, OPTIONS["optimizer"])))
    for _ in range(3):
        whole.train(data, NegativeLogLikelihood())
        with monkeypatch.context() as patched:
            # Both copies' steps here, from the gradients that one had of all rows.
            def take_step(lr: float, scale: float) -> None:
                for shares, optimizer in optimizers:
                    for name, master in optimizer.masters.items():
                        gradient = shares[name].of(shares[name].parameter.main_grad)
                        master.grad = gradient * scale
                    optimizer.step(lr)

            patched.setattr(other, "take_step", take_step)
            other.train(data, NegativeLogLikelihood())
    mine = dict(whole._module.named_parameters())
    for name, parameter in other._module.named_parameters():
        assert torch.equal(parameter, mine[name]), name


def test_parts_are_put_together_bit_for_bit(monkeypatch):
    parameter = torch.nn.Parameter(torch.zeros(3, 5))
    state = torch.tensor([-0.0, 0.0, 1e-45, float("nan"), -torch.inf] * 3)
    parts = [slice(0, 7), slice(7, 7), slice(7, 15)]
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(sharding.dist, "all_reduce", lambda bits, group: summed.append(bits))
    for rank, part in enumerate(parts):
        share = Share(parameter, part, group(3, rank))
        share.whole(state[part] if part.start < part.stop else None)
    together = torch.stack(summed).sum(0, dtype=torch.int32)
    assert torch.equal(together, state.view(torch.int32))


def write(path: Any, tensors: dict[str, torch.Tensor]) -> OSError | None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with _TensorFile(path, shapes, torch.float32, {"format": "pt"}) as file:
        for tensor in tensors.values():
            file.add(tensor)
    return file.failed


class _Full:
    """The device that is always full, as a path."""

    def open(self, mode: str) -> Any:
        return Path("/dev/full").open(mode)


def test_what_cannot_be_written_is_kept_until_all_tensors_have_come(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1 << 20)}
    assert write(tmp_path / "good", tensors) is None
    read = load_file(tmp_path / "good")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert isinstance(write(tmp_path, tensors), IsADirectoryError)
    full = write(_Full(), tensors)
    assert full is not None
    assert full.errno == errno.ENOSPC
