"""Faults that are put into a backend's own source and sink for a while.

Core writes in place where it can, instead of through a method, and engines read the trainer's
memory instead of its tensors one by one; a fault in the one way switches the other off.
"""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_hook

from rl_conformance.expect import NotRun, require_fault
from rl_core.errors import CapabilityError
from rl_core.interfaces import Piece, WeightSink
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.protocol.messages import BucketReady
from rl_core.weights.sending.share import Share

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from rl_core.interfaces import (
        ColocatablePolicyInterface,
        GenerationInterface,
        TensorSpec,
        WeightSource,
    )

__all__ = [
    "InjectedFault",
    "a_bit_changes",
    "at_the_first_bucket",
    "between_tensors",
    "casting_down",
    "detached",
    "dropping",
    "failing_finish",
    "failing_write",
    "in_the_engine",
    "in_the_forward_pass",
    "kill_engine_at",
    "misplacing",
    "one_by_one",
    "rounded",
    "source_class",
    "writes_in_place",
]


class InjectedFault(Exception):
    """Raised by a fault on purpose."""


@contextmanager
def in_the_engine(
    generation: GenerationInterface, fault: Callable[..., Any], **arguments: Any
) -> Generator[None]:
    """Puts a fault into each class that writes into the engine, in whatever process that is.

    Args:
        generation: A :class:`rl_backends.GenerationBackend`.
        fault: A function of this module that takes the class of the sink.
        **arguments: Its further arguments.

    Raises:
        NoVerdict: At the end, whatever the block raised, if the fault took place in no process.
    """
    beside = _beside(generation)
    key = secrets.token_hex(8)
    beside(f"{__name__}:begin", key=key, fault=fault.__name__, arguments=arguments)
    try:
        yield
    finally:
        struck = beside(f"{__name__}:end", key=key)
        what = f"{fault.__name__}, in the class of the engine's weight_sink()"
        why = "the refit failed before, or does not write through a WeightSink of weight_sink()"
        require_fault(any(struck), what, why)


@contextmanager
def in_the_forward_pass() -> Generator[None]:
    """Fault: in the block, the third module of torch that has computed raises.

    Raises:
        NotRun: Fewer modules computed in this process.
    """
    called: list[None] = []

    def fail(*_: Any) -> None:
        called.append(None)
        if len(called) == 3:
            raise InjectedFault("a module fails amid the forward pass")

    hook = register_module_forward_hook(fail)
    try:
        yield
    finally:
        hook.remove()
        if len(called) < 3:
            raise NotRun("the model does not compute in this process", excused=True)


def writes_in_place(generation: GenerationInterface) -> bool:
    """Whether core writes into the engine's own tensors."""
    return all(_beside(generation)(f"{__name__}:has_targets"))


def kill_engine_at(generation: GenerationInterface, method: str, count: int) -> list[int]:
    """Puts a SIGKILL into a method of the engine's sink; the processes that it will hit."""
    return list(_beside(generation)(f"{__name__}:die_at", method=method, count=count))


def _beside(generation: GenerationInterface) -> Callable[..., list[Any]]:
    beside: Any = getattr(generation, "call_in_workers", None)
    if beside is None:
        raise NotRun(
            "the engine has no call_in_workers (of GenerationBackend), so the suite cannot break it"
        )

    def call(function: str, **arguments: Any) -> list[Any]:
        try:
            found: list[Any] = beside(function, **arguments)
        except CapabilityError as error:
            raise NotRun(str(error), excused=True) from error
        return found

    return call


# -- called beside the weights ---------------------------------------------------------------------

#: By key: what takes a fault out, and for each class that has it how often it took place.
_ENTERED: dict[str, tuple[ExitStack, list[list[None]]]] = {}


def begin(
    make_sink: Callable[[], WeightSink], key: str, fault: str, arguments: dict[str, Any]
) -> None:
    """Puts a fault of this module into the classes of an engine's sinks."""
    entered, struck = _ENTERED[key] = ExitStack(), []

    def enter(sink: type[WeightSink], /, **_: Any) -> None:
        struck.append(entered.enter_context(globals()[fault](sink, **arguments)))

    enter(type(make_sink()))
    # An engine may make a new class for each sink.
    new = mock.patch.object(WeightSink, "__init_subclass__", classmethod(enter))
    entered.enter_context(new)


def end(_: Callable[[], WeightSink], key: str) -> bool:
    """Takes it out; whether it changed anything."""
    entered, struck = _ENTERED.pop(key)
    entered.close()
    return any(struck)


def has_targets(make_sink: Callable[[], WeightSink]) -> bool:
    """Whether tensors may be written in place."""
    return bool(make_sink().pieces())


def die_at(make_sink: Callable[[], WeightSink], method: str, count: int) -> int:
    """Kills this process at the given call of a method of its sink; its pid."""
    begin(make_sink, "die_at", "dying", {"method": method, "count": count})
    return os.getpid()


# -- faults ----------------------------------------------------------------------------------------
# Those of a sink yield a list that grows each time they strike.


def source_class(policy: ColocatablePolicyInterface) -> type[WeightSource]:
    """The class that gives the policy's tensors, for a fault to be put into it."""
    make: Any = getattr(policy, "weight_source", None)
    if make is None:
        raise NotRun("the policy has no weight_source in this process (of PolicyBackend)")
    return type(make())


@contextmanager
def one_by_one(sink: type[WeightSink], write: Callable[..., None]) -> Generator[list[None]]:
    """``write(go, name, offset, data, of)`` stands before every write; ``go`` is the real one."""
    original = sink.write
    struck: list[None] = []

    def faulty(self: WeightSink, name: str, offset: int, data: torch.Tensor, **of: Any) -> None:
        unchanged = False

        def go(to: str, at: int, changed: torch.Tensor) -> None:
            nonlocal unchanged
            unchanged = (to, at) == (name, offset) and torch.equal(changed, data)
            original(self, to, at, changed, **of)

        try:
            write(go, name, offset, data, of["of"])
        finally:
            if not unchanged:
                struck.append(None)

    with (
        mock.patch.object(sink, "write", faulty),
        mock.patch.object(sink, "pieces", return_value=None),
    ):
        yield struck


def dropping(sink: type[WeightSink], tensor: str) -> Any:
    """Fault: the loader silently leaves one tensor out."""

    def write(go: Any, name: str, offset: int, data: torch.Tensor, of: TensorSpec) -> None:
        if name != tensor:
            go(name, offset, data)

    return one_by_one(sink, write)


def misplacing(sink: type[WeightSink], tensor: str) -> Any:
    """Fault: the loader writes one tensor's elements in the wrong order."""

    def write(go: Any, name: str, offset: int, data: torch.Tensor, of: TensorSpec) -> None:
        go(name, offset, data.roll(1) if name == tensor else data)

    return one_by_one(sink, write)


def rounded(data: torch.Tensor) -> torch.Tensor:
    """What is left of floats after they went through a narrower type."""
    narrower = torch.bfloat16 if data.element_size() > 2 else torch.float8_e4m3fn
    return data.to(narrower).to(data.dtype)


def casting_down(sink: type[WeightSink], tensor: str) -> Any:
    """Fault: the loader rounds one tensor to a narrower type on the way in."""

    def write(go: Any, name: str, offset: int, data: torch.Tensor, of: TensorSpec) -> None:
        go(name, offset, rounded(data) if name == tensor else data)

    return one_by_one(sink, write)


@contextmanager
def detached(sink: type[WeightSink], tensor: str) -> Generator[list[None]]:
    """Fault: what is written in place is, for one tensor, no longer what the engine reads."""
    original = sink.pieces
    struck: list[None] = []

    def faulty(self: WeightSink) -> list[Piece]:
        struck.append(None)
        pieces = list(original(self) or ())
        for at, (name, box, kept) in enumerate(pieces):
            if name == tensor and kept is not None:
                pieces[at] = Piece(name, box, kept.detach().clone())
        return pieces

    with mock.patch.object(sink, "pieces", faulty):
        yield struck


def failing_write(sink: type[WeightSink], after: int) -> Any:
    """Fault: the loader raises once it has written ``after`` runs of elements."""
    count = iter(range(1 << 30))

    def write(go: Any, name: str, offset: int, data: torch.Tensor, of: TensorSpec) -> None:
        if next(count) == after:
            raise InjectedFault("the loader gave up")
        go(name, offset, data)

    return one_by_one(sink, write)


@contextmanager
def dying(sink: type[WeightSink], method: str, count: int) -> Generator[list[None]]:
    """Fault: the process is killed at the given call of a method."""
    original, calls = getattr(sink, method), iter(range(1 << 30))

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(sink, method, faulty))
        if method == "write":  # what would bypass it is switched off
            patches.enter_context(mock.patch.object(sink, "pieces", return_value=None))
        yield []


@contextmanager
def failing_finish(sink: type[WeightSink]) -> Generator[list[None]]:
    """Fault: the engine fails once, when all tensors were written."""
    original = sink.finish
    struck: list[None] = []

    def faulty(self: WeightSink, version: int) -> None:
        if not struck:
            struck.append(None)
            raise InjectedFault("the engine gave up")
        original(self, version)

    with mock.patch.object(sink, "finish", faulty):
        yield struck


@contextmanager
def between_tensors(
    source: type[WeightSource], after: int, act: Callable[[], object]
) -> Generator[None]:
    """``act`` is done once, in the sender's thread, after so many tensors."""
    original, acted = source.tensors, False

    def faulty(self: WeightSource, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal acted
        for count, item in enumerate(original(self, names)):
            if count == after:
                acted = True
                act()
            yield item

    with (
        mock.patch.object(source, "tensors", faulty),
        mock.patch.object(source, "pieces", return_value=None),
    ):
        yield
    require_fault(acted, f"an act after {after} tensors of the source", "the refit ended before")


@contextmanager
def at_the_first_bucket(act: Callable[[], object]) -> Generator[None]:
    """``act`` is done once, in the sender's thread, when a bucket is ready, before its message.

    Args:
        act: What happens to the weights.
    """
    encode, pending = Channel.encode, [act]

    def faulty(channel: Channel, message: object) -> bytes:
        if pending and isinstance(message, BucketReady):
            pending.pop()()
        return encode(channel, message)

    with mock.patch.object(Channel, "encode", faulty):
        yield
    require_fault(not pending, "an act at the first bucket", "the refit ended before")


@contextmanager
def a_bit_changes() -> Generator[None]:
    """In the bytes of the next packed refit, on their way: the sender has hashed them."""
    shares: list[Any] = []
    prepare = Share.prepare

    def remember(*args: Any, **options: Any) -> Any:
        shares.append(prepare(*args, **options))
        return shares[-1]

    def damage() -> None:
        shares[-1].lane.data[5] ^= 64

    with mock.patch.object(Share, "prepare", remember), at_the_first_bucket(damage):
        yield
