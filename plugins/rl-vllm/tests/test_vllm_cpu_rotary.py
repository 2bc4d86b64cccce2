"""Heads of a query that has them as a dimension are turned by the position of their token."""

from __future__ import annotations

import pytest
import torch

from rl_vllm.cpu_rotary import mixes_up_heads


def turned(values: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = values.chunk(2, dim=-1)
    cos, sin = angles
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def by_token(positions, query, key, size, table, halves):
    assert halves
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    for each in (query, key):
        heads = each.view(len(positions), -1, size)
        heads.copy_(turned(heads.clone(), (cos, sin)))


def by_row(positions, query, key, size, table, halves):
    """Takes the last dimension but one for tokens, as vLLM's kernel does."""
    assert halves
    if query.dim() == 2:
        return by_token(positions, query, key, size, table, halves)
    for each in (query, key):
        rows = each.view(-1, size)
        beyond = positions.as_strided((len(rows),), (1,))
        cos, sin = table[beyond].chunk(2, dim=-1)
        rows.copy_(turned(rows.clone(), (cos, sin)))
    return None


def test_a_kernel_that_takes_heads_for_tokens_is_found():
    assert mixes_up_heads(by_row)
    assert not mixes_up_heads(by_token)


@pytest.mark.engine
def test_vllm_turns_a_query_of_three_dimensions_by_its_formula(imported, monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.platforms import current_platform

    import rl_vllm.cpu_rotary

    if not current_platform.is_cpu():
        pytest.skip("only the CPU's kernel is replaced")
    rl_vllm.cpu_rotary.repair_rotary()
    with set_current_vllm_config(VllmConfig()):
        positions = {"rope_type": "default", "rope_theta": 1e4}
        rotary = get_rope(32, 64, True, positions, dtype=torch.float32)
    query, key = torch.randn(5, 4, 32), torch.randn(5, 2, 32)
    wanted = rotary.forward_native(torch.arange(5), query.clone(), key.clone())
    given = (query.clone(), key.clone())
    for found, right in zip(rotary.forward_cpu(torch.arange(5), *given), wanted, strict=True):
        assert torch.allclose(found, right, atol=1e-5)
    flat = (query.clone().flatten(1), key.clone().flatten(1))
    for found, right in zip(rotary.forward_cpu(torch.arange(5), *flat), wanted, strict=True):
        assert torch.allclose(found.view(right.shape), right, atol=1e-5)
