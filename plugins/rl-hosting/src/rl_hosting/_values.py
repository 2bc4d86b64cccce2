"""What calls of a worker are given and return, as MessagePack: plain values, tensors, batches.

Arguments may also be objects, such as a loss: those are pickled (cloudpickle), and the worker,
which the driver has started from its own code, loads them. In the other direction nothing is
unpickled: a worker returns values alone.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_core.batch import BatchedDataDict
from rl_core.batch.data_dict import SlicedDataDict
from rl_core.errors import DataError
from rl_core.weights.data.runs import flat

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["decode_arguments", "decode_result", "encode_arguments", "encode_result"]

_TENSOR, _OBJECT = 1, 2
#: The key of what is not plain: no column or key of ours begins with it.
_KIND = "\0kind"
#: Classes of values are looked up here and nowhere else.
_OURS = ("rl_backends.", "rl_core.")
_BATCHES = {"batch": BatchedDataDict, "sliced": SlicedDataDict}
#: What wrong shapes, types and names end in.
_NONSENSE = (TypeError, ValueError, AttributeError, RuntimeError, ImportError)
_PLAIN = (str, bytes, bool, float, type(None))


def encode_result(value: Any) -> bytes:
    """What a worker returns, as bytes.

    Raises:
        DataError: It has an object in it that is no value.
    """
    return msgspec.msgpack.encode(_to_plain(value, _refused))


def decode_result(data: bytes) -> Any:
    """What :func:`encode_result` was given.

    Raises:
        DataError: The bytes are none of its.
    """
    try:
        return _from_plain(msgspec.msgpack.decode(data, ext_hook=_extension))
    except (msgspec.MsgspecError, ArithmeticError, LookupError, *_NONSENSE) as error:
        raise DataError(
            f"a worker's result cannot be decoded: {type(error).__name__}: {error}",
            fix="install the same rl-hosting and rl-core for the workers and the driver",
        ) from error


def encode_arguments(value: Any) -> bytes:
    """The arguments of a call, as bytes, for a worker that this process started."""
    return msgspec.msgpack.encode(_to_plain(value, _pickled))


def decode_arguments(data: bytes) -> Any:
    """What :func:`encode_arguments` was given; for bytes of this process's own driver alone."""
    return _from_plain(msgspec.msgpack.decode(data, ext_hook=_object_or_extension))


def _to_plain(value: Any, fallback: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else {_KIND: "int", "value": str(value)}
    if kind is list:
        return [_to_plain(item, fallback) for item in value]
    if kind is dict and all(type(key) is str for key in value) and _KIND not in value:
        return {key: _to_plain(item, fallback) for key, item in value.items()}
    if kind in (tuple, set, frozenset):
        return {_KIND: kind.__name__, "value": [_to_plain(item, fallback) for item in value]}
    if kind is dict:
        pairs = [
            [_to_plain(key, fallback), _to_plain(item, fallback)] for key, item in value.items()
        ]
        return {_KIND: "dict", "value": pairs}
    if isinstance(value, torch.Tensor) and not value.is_sparse and not value.is_quantized:
        return msgspec.msgpack.Ext(_TENSOR, _tensor_bytes(value))
    for name, batch in _BATCHES.items():
        if kind is batch:
            return {_KIND: name, "value": _to_plain(value.__getstate__(), fallback)}
    if isinstance(value, float):  # of a subclass, which the receiver makes again
        return float(value)
    if isinstance(value, Path):
        return {_KIND: "path", "value": str(value)}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if dataclasses.is_dataclass(value) and kind.__module__.startswith(_OURS):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        name = f"{kind.__module__}:{kind.__qualname__}"
        return {_KIND: "fields", "class": name, "value": _to_plain(fields, fallback)}
    return fallback(value)


def _from_plain(value: Any) -> Any:
    if type(value) is list:
        return [_from_plain(item) for item in value]
    if type(value) is not dict:
        return value
    if _KIND not in value:
        return {key: _from_plain(item) for key, item in value.items()}
    inner = _from_plain(value["value"])
    match value[_KIND]:
        case "int":
            return int(inner)
        case "tuple" | "set" | "frozenset" as name:
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[name](inner)
        case "dict":
            return dict(inner)
        case "batch" | "sliced" as name:
            batch: BatchedDataDict[Any] = _BATCHES[name]()
            vars(batch).update(inner)
            return batch
        case "path":
            return Path(inner)
        case "dtype":
            return _dtype_of(inner)
        case "fields":
            return _dataclass(value["class"])(**inner)
    raise msgspec.DecodeError(f"a value of the unknown kind {value[_KIND]!r}")


def _dataclass(name: str) -> Any:
    """One of our dataclasses."""
    module, _, path = name.partition(":")
    found: Any = None
    if module.startswith(_OURS):
        found = getattr(importlib.import_module(module), path, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise msgspec.DecodeError(f"a value of the unknown class {name!r}")
    return found


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise msgspec.DecodeError(f"the unknown dtype {name!r}")
    return found


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    there = tensor.cpu().contiguous()
    head = [str(there.dtype).removeprefix("torch."), list(there.shape)]
    return msgspec.msgpack.encode([*head, flat(there).view(torch.uint8).numpy().tobytes()])


def _extension(code: int, data: memoryview) -> Any:
    if code != _TENSOR:
        raise msgspec.DecodeError("a worker returned an object, which is not loaded")
    dtype_name, shape, content = msgspec.msgpack.decode(data)
    dtype = _dtype_of(dtype_name)
    if not content:
        return torch.empty(0, dtype=dtype).view(shape)  # which must have no elements
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).view(shape)


def _object_or_extension(code: int, data: memoryview) -> Any:
    if code != _OBJECT:
        return _extension(code, data)
    import pickle

    return pickle.loads(data)  # noqa: S301 - of the process that started this one


def _refused(value: Any) -> Any:
    raise DataError(
        f"a worker's result contains a {type(value).__module__}.{type(value).__qualname__}, which "
        "cannot be sent between processes",
        fix="return numbers, strings, tensors, batches, and lists, tuples and dicts of these",
    )


def _pickled(value: Any) -> Any:
    import cloudpickle

    return msgspec.msgpack.Ext(_OBJECT, cloudpickle.dumps(value))
