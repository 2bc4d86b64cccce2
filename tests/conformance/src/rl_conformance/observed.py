"""What an FP8 key/value cache would hold, seen in the oracle's own forward pass."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from rl_conformance.oracle import Oracle
    from rl_core.batch import BatchedDataDict

__all__ = ["magnitudes", "scales_by_layer"]


@torch.no_grad()
def magnitudes(oracle: Oracle, data: BatchedDataDict[Any]) -> dict[tuple[int, str], torch.Tensor]:
    """Of all real tokens, by layer and kind (``"q"``, ``"k"`` or ``"v"``).

    Keys and values are read from the cache that transformers fills, queries where their rotation
    leaves them.
    """
    found: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
    module = sys.modules[type(oracle.model).__module__]
    rotate = module.apply_rotary_pos_emb
    queries: list[torch.Tensor] = []

    def rotated(*args: Any, **kwargs: Any) -> Any:
        both = rotate(*args, **kwargs)
        queries.append(both[0])
        return both

    for row, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        queries.clear()
        with mock.patch.object(module, "apply_rotary_pos_emb", rotated):
            output = oracle.model(row[None, :length], use_cache=True)
        # Since transformers 5.24 under another name.
        cache = getattr(output, "cache", None) or output.past_key_values
        for layer, cached in enumerate(cache.layers):
            for kind, values in (("q", queries[layer]), ("k", cached.keys), ("v", cached.values)):
                found[layer, kind].append(values.abs().flatten().float())
    return {key: torch.cat(values) for key, values in found.items()}


def scales_by_layer(scales: Any, path: str = "") -> dict[tuple[int, str], float]:
    """Scales by layer and kind, however deep they lie: by the number and the name on the way."""
    if isinstance(scales, dict):
        found: dict[tuple[int, str], float] = {}
        for key, value in scales.items():
            found |= scales_by_layer(value, f"{path}.{key}")
        return found
    numbers, kinds = re.findall(r"\d+", path), re.findall(r"([qkv])_scale", path)
    if isinstance(scales, int | float) and numbers and kinds:
        return {(int(numbers[0]), kinds[-1]): float(scales)}
    return {}
