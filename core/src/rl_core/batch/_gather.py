"""Batches over a process group, as two collectives of raw bytes and without pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from rl_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TENSOR = 1  # msgpack extension type of a tensor inside a list
_HEADER_BYTES = 8  # the frame starts with the length of its header, little-endian


def gather_batches(
    data: Mapping[str, Any], group: dist.ProcessGroup | None
) -> list[dict[str, Any]]:
    """Every rank's batch, in rank order, on the device that the group communicates on.

    Lists hold None, numbers, str, bytes, tensors, and lists or string-keyed dicts of these.

    Raises:
        DataError: A value is of another type; names key and type.
    """
    frame = _encode(data)
    device = torch.device("cpu")
    if "nccl" in str(dist.get_backend(group)):
        device = torch.device("cuda", torch.cuda.current_device())
    sizes = torch.cat(_all_gather(torch.tensor([len(frame)], device=device), group)).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(frame)] = frame
    frames = _all_gather(padded, group)
    return [_decode(frame[:size]) for frame, size in zip(frames, sizes, strict=True)]


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return gathered


def _encode(data: Mapping[str, Any]) -> torch.Tensor:
    header: list[tuple[str, str, Any]] = []
    blocks: list[torch.Tensor] = []
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            name, shape, block = _parts(value)
            header.append((key, name, shape))
            blocks.append(block)
        else:
            _check_plain(key, value)
            header.append((key, "", value))
    try:
        encoded = msgspec.msgpack.encode(header, enc_hook=_encode_tensor)
    except OverflowError as error:
        raise DataError(f"cannot gather integers beyond 64 bits: {error}") from error
    size = len(encoded).to_bytes(_HEADER_BYTES, "little")
    return torch.cat([torch.frombuffer(bytearray(size + encoded), dtype=torch.uint8), *blocks])


def _decode(frame: torch.Tensor) -> dict[str, Any]:
    offset = _HEADER_BYTES + int.from_bytes(bytes(frame[:_HEADER_BYTES].tolist()), "little")
    header = msgspec.msgpack.decode(
        frame[_HEADER_BYTES:offset].cpu().numpy().tobytes(), ext_hook=_decode_tensor
    )
    batch: dict[str, Any] = {}
    for key, dtype_name, value in header:
        if not dtype_name:
            batch[key] = value
            continue
        dtype = getattr(torch, dtype_name)
        size = dtype.itemsize * torch.Size(value).numel()
        # The clone starts at an aligned address, which a view of another dtype needs.
        batch[key] = frame[offset : offset + size].clone().view(dtype).reshape(value)
        offset += size
    return batch


def _parts(tensor: torch.Tensor) -> tuple[str, list[int], torch.Tensor]:
    """Name of the dtype, shape, and all bytes on the CPU."""
    block = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), block


def _encode_tensor(value: Any) -> msgspec.msgpack.Ext:
    name, shape, block = _parts(value)
    described = (name, shape, block.numpy().tobytes())
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(described))


def _decode_tensor(_code: int, described: memoryview) -> torch.Tensor:
    name, shape, raw = msgspec.msgpack.decode(described, type=tuple[str, list[int], bytes])
    dtype = getattr(torch, name)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _check_plain(key: str, value: Any) -> None:
    kind = type(value)
    if kind is list:
        for item in value:
            _check_plain(key, item)
    elif kind is dict and all(type(name) is str for name in value):
        for item in value.values():
            _check_plain(key, item)
    elif kind not in {type(None), bool, int, float, str, bytes} and not isinstance(
        value, torch.Tensor
    ):
        raise DataError(
            f"cannot gather key {key!r}: it holds a value of type {kind.__name__}",
            fix="use tensors, numbers, strings, bytes, None, and lists or dicts of these",
            key=key,
        )
