"""The state of a world as bytes: two worlds with the same bytes have the same future."""

from __future__ import annotations

import concurrent.futures
import hashlib
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_core.weights.data.digests import TensorHasher
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.parts import Partition
from rl_core.weights.data.plan import TransferPlan
from rl_core.weights.protocol.session import Phase
from rl_core.weights.receiving.loading import Places, ReceiverBuckets
from rl_core.weights.sending.packing import SenderBuckets

if TYPE_CHECKING:
    from collections.abc import Callable

    import greenlet

#: Times that were measured, addresses, what a job keeps for its caller, and caches: what they know
#: of memory is of lanes that are open, which are written down.
_IGNORED = {
    "phase_seconds", "_entered", "_reported_at", "looked", "heard", "_lying", "_moved", "future",
    "at", "endpoint", "_buckets", "buckets", "_made", "_on_gpu",
}  # fmt: skip
#: Whose threads are written down: the product's, and those who ask for something.
_LOOKED_INTO = ("rl_core", "rl_hosting", "refit_model/people")
_KNOWN_MODULES = ("rl_core", "rl_hosting", "refit_model", "hosted_model")
_PLAIN = {int, float, str, bytes, bool, type(None), Phase}


class Canon:
    """Writes down all that can be reached from an object, each object once."""

    def __init__(self) -> None:
        self.out: list[Any] = []
        self._seen: dict[int, int] = {}
        self._keep: list[Any] = []

    def digest(self) -> bytes:
        return hashlib.blake2b(repr(self.out).encode(), digest_size=12).digest()

    def add(self, thing: Any) -> None:
        kind = type(thing)
        if kind in _PLAIN:
            self.out.append(thing)
            return
        if kind is tuple:
            self._sequence(thing)
            return
        seen = self._seen.get(id(thing))
        if seen is not None:
            self.out.append(seen)
            return
        self._seen[id(thing)] = -len(self._seen) - 1
        self._keep.append(thing)  # so that no id is used twice
        _WRITERS.get(kind, Canon._object)(self, thing)

    def _sequence(self, items: Any) -> None:
        self.out.append(len(items))
        for item in items:
            self.add(item)

    def _mapping(self, items: Any) -> None:
        out = self.out
        for key, value in items.items():
            if key not in _IGNORED:
                self.add(key)
                if type(value) in _PLAIN:
                    out.append(value)
                else:
                    self.add(value)
        out.append("}")

    def _set(self, items: Any) -> None:
        self._sequence(sorted(items, key=str))

    def _tensor(self, tensor: Any) -> None:
        self.out.append(tensor.detach().contiguous().view(-1).numpy().tobytes())

    def _generator(self, generator: Any) -> None:
        self._frame(generator.gi_frame)

    def _frame(self, frame: Any) -> None:
        if frame is not None:
            self.out.append((frame.f_code.co_name, frame.f_lasti))
            self._mapping(frame.f_locals)

    def stack(self, of: greenlet.greenlet) -> None:
        """All that a stopped thread has before it."""
        frame = of.gr_frame
        while frame is not None:
            if any(name in frame.f_code.co_filename for name in _LOOKED_INTO):
                self._frame(frame)
            frame = frame.f_back

    @classmethod
    def stops_at(cls, kind: type) -> None:
        """What can be reached from a thing of this kind is written down by other ways."""
        _WRITERS[kind] = cls._name_only

    def _name_only(self, thing: Any) -> None:
        self.out.append(type(thing).__name__)

    def _object(self, thing: Any) -> None:
        kind = type(thing)
        self.out.append(kind.__name__)
        module = kind.__module__
        if isinstance(thing, BaseException | types.FunctionType | types.MethodType):
            return
        if isinstance(thing, msgspec.Struct):
            self._sequence(msgspec.structs.astuple(thing))
        elif module.startswith(_KNOWN_MODULES):
            if hasattr(thing, "__dict__"):
                self._mapping(vars(thing))
            for slot in getattr(kind, "__slots__", ()):
                if slot not in _IGNORED:
                    self.add(getattr(thing, slot, None))
        elif hasattr(thing, "hexdigest"):
            self.out.append(thing.hexdigest())


def _sender_buckets(canon: Canon, buckets: Any) -> None:
    canon.out.append(buckets.plan.digest)
    canon.add(buckets.lane)


def _receiver_buckets(canon: Canon, buckets: Any) -> None:
    canon.out.append(buckets.plan.digest)
    canon.add(buckets.data)


def _future(canon: Canon, future: Any) -> None:
    done = future.done()
    canon.out.append(type(future.exception()).__name__ if done else "pending")


_WRITERS: dict[type, Callable[[Canon, Any], None]] = {
    list: Canon._sequence,
    deque: Canon._sequence,
    dict: Canon._mapping,
    set: Canon._set,
    frozenset: Canon._set,
    bytearray: lambda canon, memory: canon.out.append(bytes(memory)),
    torch.Tensor: Canon._tensor,
    concurrent.futures.Future: _future,
    types.GeneratorType: Canon._generator,
    TransferPlan: lambda canon, plan: canon.out.append(plan.digest),
    WeightManifest: lambda canon, manifest: canon.out.append(manifest.digest),
    TensorHasher: Canon._name_only,  # a cache
    SenderBuckets: _sender_buckets,
    ReceiverBuckets: _receiver_buckets,
    Partition: lambda canon, parts: canon.out.append(parts.manifest.digest),
    Places: Canon._name_only,  # the engine's tensors, which are written down by themselves
}
