"""A trainer and an engine over plain dictionaries of tensors, for the tests of the refit."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from rl_backends.tensors import tensor_specs, whole_pieces
from rl_conformance import doubles
from rl_conformance.doubles import Engines as Replicas
from rl_core.interfaces import Piece, TensorSpec, WeightSink, WeightSource
from rl_core.weights import RefitReport, refit
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.parts import LanePlaces
from rl_core.weights.data.plan import ALIGN
from rl_core.weights.data.runs import flat
from rl_core.weights.job import Runtime

Tensors = dict[str, torch.Tensor]

#: Small, so that the tensors of :func:`make_tensors` take many buckets.
BUCKET = 1024
#: Seconds within which everything must have happened.
SOON = 60.0


def until(condition: Callable[[], object], what: str = "it") -> None:
    """Waits for something that will be so soon."""
    ends = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < ends, f"{what} did not come so"
        time.sleep(0.002)


def describe(tensors: Tensors, ties: Mapping[str, str] | None = None) -> list[TensorSpec]:
    ties = ties or {}
    replace = msgspec.structs.replace
    return [replace(spec, alias_of=ties.get(spec.name)) for spec in tensor_specs(tensors)]


def in_order(manifest: WeightManifest) -> LanePlaces:
    """Where whole tensors are in a lane in which they lie one after another."""
    starts = array("q")
    end = 0
    for spec in manifest.owned:
        starts.append(end)
        end = -(-(end + spec.nbytes) // ALIGN) * ALIGN
    return LanePlaces(starts.tobytes())


class DictSource(WeightSource):
    """``before`` runs before each tensor that is asked for.

    ``on[what]`` runs before the tensor of that name, at ``"confirm"``, or at ``"device"``: every
    second time that its device is asked for, which is when a refit that was begun is prepared.
    """

    def __init__(
        self, tensors: Tensors, ties: Mapping[str, str] | None = None, *, at_home: bool = False
    ) -> None:
        self.tensor, self.ties, self.at_home = tensors, ties, at_home
        self.before: Callable[[str], Any] = lambda name: None
        self.on: dict[str, Callable[[], Any]] = {}
        self._device = "cpu"
        self._asked = 0

    @property
    def device(self) -> str:
        self._asked += 1
        if self._asked % 2 == 0:
            self._reached("device")
        return self._device

    @device.setter
    def device(self, device: str) -> None:
        self._device = device

    def _reached(self, what: str) -> None:
        self.on.get(what, lambda: None)()

    def specs(self) -> Sequence[TensorSpec]:
        return describe(self.tensor, self.ties)

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            self.before(name)
            self._reached(name)
            yield name, self.tensor[name]

    def pieces(self) -> Sequence[Piece] | None:
        return whole_pieces(self.tensor) if self.at_home else None

    def confirm(self) -> None:
        self._reached("confirm")


class DictSink(WeightSink):
    """Records what writes; ``on[call]`` runs at the start of that call, or of ``"pieces"``."""

    def __init__(self, tensors: Tensors, ties: Mapping[str, str] | None = None) -> None:
        self.tensor, self.ties = tensors, ties
        self.calls: list[str] = []
        self.on: dict[str, Callable[[], Any]] = {}

    def _called(self, call: str) -> None:
        self.calls.append(call)
        self.on.get(call, lambda: None)()

    def specs(self) -> Sequence[TensorSpec]:
        return describe(self.tensor, self.ties)

    def pieces(self) -> Sequence[Piece] | None:
        self.on.get("pieces", lambda: None)()
        return None

    def begin(self, version: int) -> None:
        self._called("begin")

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        self._called("write")
        flat = self.tensor[name].view(-1)
        flat[offset : offset + data.numel()].copy_(data)

    def finish(self, version: int) -> None:
        self._called("finish")

    def fail(self) -> None:
        self._called("fail")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self.tensor[name]


class InPlaceSink(DictSink):
    """Its tensors are written directly."""

    def pieces(self) -> Sequence[Piece]:
        return whole_pieces(self.tensor)


class MuteSink(DictSink):
    """Cannot say what is installed."""

    read = WeightSink.read


class Clock:
    """The clock of refits, which a test puts forward: a deadline passes once all is as it should
    be by then, however long that takes.

    Attributes:
        ahead_s: How far it is put forward.
        each_look_s: By how much each look at it does so.
    """

    def __init__(self) -> None:
        self.ahead_s = self.each_look_s = 0.0

    def __call__(self) -> float:
        self.ahead_s += self.each_look_s
        return time.monotonic() + self.ahead_s


class Gate:
    """Holds up a call until it is opened; those after that pass."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self.opened.wait(6 * SOON), "nobody opened it"


class Trainer(doubles.Trainer):
    def __init__(
        self, tensors: Tensors, ties: Mapping[str, str] | None = None, *, at_home: bool = False
    ) -> None:
        self.source = DictSource(tensors, ties, at_home=at_home)
        super().__init__({}, source=lambda: self.source)
        self.clock = Clock()
        self.sender.runtime = Runtime(clock=self.clock)


class Engine(doubles.Engine):
    def __init__(
        self,
        tensors: Tensors,
        ties: Mapping[str, str] | None = None,
        *,
        kind: type[DictSink] = DictSink,
    ) -> None:
        self.sink = kind(tensors, ties)
        super().__init__({}, sink=lambda: self.sink)
        self.on["commit"] = lambda: self.sink._called("commit")
        self.clock = Clock()
        self.receiver.runtime = Runtime(clock=self.clock)

    def snapshot(self) -> Tensors:
        """Copies of what is installed."""
        return {name: t.clone() for name, t in self.sink.tensor.items()}

    def idle(self) -> Engine:
        """Itself, once its refits are over."""
        with self.receiver.turn:
            return self

    def held_up(self) -> bool:
        """Whether a refit waits for generation to end."""
        return any(job.session.held_up for job in list(self.receiver.jobs))

    def may_generate(self) -> bool:
        """Whether another thread could generate now."""
        result: list[bool] = []

        def attempt() -> None:
            result.append(self.lock.acquire(blocking=False))
            if result[0]:
                self.lock.release()

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(SOON)
        return result[0]


def go(trainer: Trainer, engine: Engine | Replicas, **options: Any) -> RefitReport:
    """A refit of small buckets that ends soon."""
    return refit(trainer, engine, **{"bucket_bytes": BUCKET, "deadline_s": SOON} | options)


def begin(
    trainer: Trainer, engine: Engine, **options: Any
) -> tuple[concurrent.futures.Future[Any], concurrent.futures.Future[Any]]:
    """A refit of small buckets that is under way on both sides."""
    engine.prepare_refit_info(trainer.prepare_refit_info())
    sending = trainer.sender.send(**{"bucket_bytes": BUCKET, "deadline_s": SOON} | options)
    return sending, engine.receiver.receive(deadline_s=SOON)


def fails(
    trainer: Trainer, engine: Engine, **options: Any
) -> tuple[BaseException | None, BaseException | None]:
    """What each side says of a refit that fails: the sender, then the receiver."""
    sending, receiving = begin(trainer, engine, **options)
    return sending.exception(SOON), receiving.exception(SOON)


def make_tensors(seed: int = 0) -> Tensors:
    """Every awkward kind: larger than a bucket, 0-d, empty, strided, many dtypes."""
    torch.manual_seed(seed)
    return {
        "big": torch.randn(50, 41),
        "scalar": torch.randn(()),
        "empty": torch.empty(0, 3),
        "strided": torch.randn(30, 44).t(),
        "sliced": torch.randn(8, 10, 3)[:, ::2],
        "half": torch.randn(33).bfloat16(),
        "counts": torch.randint(0, 9, (7,)),
        "flags": torch.rand(13) > 0.5,
        "bytes": torch.randint(0, 256, (5,), dtype=torch.uint8),
    }


def make_persistent(seed: int = 0) -> Tensors:
    """The same values in tensors that can be moved to shared memory."""
    return {name: t.clone().contiguous() for name, t in make_tensors(seed).items()}


def blank(tensors: Tensors) -> Tensors:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}


def same(left: Tensors, right: Tensors) -> bool:
    """Whether the names are the same, and all bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(_bits(left[name]), _bits(right[name]))
        for name in left
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor.contiguous()).view(torch.uint8)
