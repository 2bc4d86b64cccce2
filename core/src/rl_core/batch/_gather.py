"""Batches over a process group, as two collectives of raw bytes that run no code when read."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rl_core.batch._columns import own_memory
from rl_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def gather_batches(
    data: Mapping[str, Any], group: dist.ProcessGroup | None
) -> list[dict[str, Any]]:
    """Every rank's batch, in rank order, on the CPU.

    Lists hold None, numbers, str, bytes, tensors, and lists or string-keyed dicts of these.

    Raises:
        DataError: A value is of another type; names key and type.
    """
    columns = {}
    for key, value in data.items():
        _check_plain(key, value)
        is_tensor = isinstance(value, torch.Tensor)
        columns[key] = own_memory(value.detach()) if is_tensor else value
    file = io.BytesIO()
    torch.save(columns, file)
    device = torch.device("cpu")
    if "nccl" in str(dist.get_backend(group)):
        device = torch.device("cuda", torch.cuda.current_device())
    frame = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device)
    sizes = torch.cat(_all_gather(torch.tensor([len(frame)], device=device), group)).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(frame)] = frame
    frames = zip(_all_gather(padded, group), sizes, strict=True)
    files = (io.BytesIO(frame[:size].cpu().numpy().tobytes()) for frame, size in frames)
    return [torch.load(each, map_location="cpu", weights_only=True) for each in files]


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return gathered


def _check_plain(key: str, value: Any) -> None:
    kind, inside = type(value), None
    if kind is list:
        inside = value
    elif kind is dict and all(type(name) is str for name in value):
        inside = value.values()
    elif kind not in _PLAIN and not isinstance(value, torch.Tensor):
        raise DataError(
            f"cannot gather key {key!r}: it holds a value of type {kind.__name__}",
            fix="use tensors, numbers, strings, bytes, None, and lists or dicts of these",
            key=key,
        )
    for item in inside or ():
        _check_plain(key, item)
