"""How fast refits are on this host, next to plain copies of the same bytes in the same run.

Bounds, all by processes of one thread each that do nothing else:

``one copy``: every engine's process copies the bytes out of shared memory, all at the same time.
``two copies``: the trainer's process copies them into two slots of shared memory while every
engine's copies them out, with nothing but a pipe to tell when.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_core.errors import ConfigError, DeadlineError
from rl_core.futures import wait
from rl_core.interfaces.weights import TensorSpec, WeightSink, WeightSource
from rl_core.refit.options import DEFAULT_DEADLINE_S, SendOptions
from rl_core.refit.plan import SLOTS
from rl_core.refit.receiver import RefitReceiver
from rl_core.refit.report import RefitReport
from rl_core.refit.sender import RefitSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from rl_core.refit.transports.base import Lane

__all__ = ["Bench", "Row", "Tensors"]

#: Bytes that a plain copy moves at once: what `copy_` takes for one tensor.
_STEP = 64 << 20
#: Seconds past the deadline in which a refit says itself what it waited for.
_GRACE_S = 5.0


class Tensors(WeightSource, WeightSink):
    """Bfloat16 tensors of equal size: a model as far as a refit is concerned.

    Args:
        nbytes: Of all together, about.
        count: How many.
        fill: Value of every element.
        device: Where they are.
        flat: Put them into one piece of memory, which plain copies can use too.
    """

    def __init__(
        self, nbytes: int, count: int, fill: float, device: str, *, flat: bool = False
    ) -> None:
        each = max(1, nbytes // count // 2)
        self.device = device
        self.flat = torch.empty(each * count if flat else 0, dtype=torch.bfloat16, device=device)
        self.held = {
            f"layers.{i}.weight": (
                self.flat[i * each : (i + 1) * each]
                if flat
                else torch.empty(each, dtype=torch.bfloat16, device=device)
            ).fill_(fill)
            for i in range(count)
        }
        self._specs = [TensorSpec(name, (each,), "bfloat16") for name in self.held]

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return self._specs

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        return ((name, self.held[name]) for name in names)

    def persistent(self) -> Mapping[str, torch.Tensor]:
        """See :meth:`WeightSource.persistent`."""
        return self.held

    def targets(self) -> Mapping[str, torch.Tensor]:
        """See :meth:`WeightSink.targets`."""
        return self.held

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        self.held[name][offset : offset + len(data)].copy_(data)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSink.read`."""
        return self.tensors(list(names))


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        what: What was measured.
        seconds: The best run.
        median_seconds: The median run.
        gb_per_s: Bytes of the model in the best run's time, as every engine saw it.
        of_bound: The bound's best time over this one's; None for the bounds.
        bound: Which.
    """

    what: str
    seconds: float
    median_seconds: float
    gb_per_s: float
    of_bound: float | None = None
    bound: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Bench:
    """A trainer in this process and engines in processes of their own.

    Use as a context manager: the engines end with it.

    Args:
        nbytes: Size of the model.
        tensors: In how many tensors.
        receivers: How many engines.
        repeats: Runs of which the best counts, after one that warms up.
        bucket_bytes: Size of each buffer; the default of the data mode if None.
        device: Where trainer and engines keep their tensors.
        deadline_s: Seconds for any one step.
    """

    def __init__(
        self,
        nbytes: int = 1 << 30,
        tensors: int = 200,
        receivers: int = 1,
        repeats: int = 5,
        bucket_bytes: int | None = None,
        device: str = "cpu",
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        if tensors < 1 or nbytes < 2 * tensors or repeats < 1 or receivers < 1:
            raise ConfigError(
                f"refit bench: {nbytes} bytes in {tensors} tensors, {receivers} receivers and "
                f"{repeats} repeats make no sense",
                fix="give at least one of each, and two bytes for every tensor",
                key="tensors",
            )
        self.tensors = Tensors(nbytes, tensors, 1.0, device)
        self.nbytes = sum(t.nbytes for t in self.tensors.held.values())
        self.reports: list[RefitReport] = []
        self._repeats = repeats
        self._bucket = bucket_bytes
        self._deadline = deadline_s
        self._threads = torch.get_num_threads()
        self._sender = RefitSender(lambda: self.tensors, name="trainer")
        self._engines = [_Engine(nbytes, tensors, device, deadline_s) for _ in range(receivers)]

    def __enter__(self) -> Self:
        """Starts the engines."""
        torch.set_num_threads(1)
        for engine in self._engines:
            engine.start()
        info = self._sender.prepare()
        self._tell("prepare", info)
        return self

    def __exit__(self, *error: object) -> None:
        """Ends them."""
        for engine in self._engines:
            engine.stop()
        self._sender.close()
        torch.set_num_threads(self._threads)

    # -- bounds -----------------------------------------------------------------------------------

    def one_copy(self) -> Row:
        """Every engine copies the bytes out of shared memory."""
        with closing(self._lane(self.nbytes)) as lane:
            lane.data.fill_(1)
            self._tell("attach", dict(lane.ref))
            times = [max(self._tell("copy")) for _ in range(self._repeats + 1)][1:]
        return self._row("one copy", times)

    def two_copies(self) -> Row:
        """The bytes go through two slots."""
        flat = torch.ones(self.nbytes, dtype=torch.uint8, device=self.tensors.device)
        device = torch.device(self.tensors.device)
        bucket = SendOptions(bucket_bytes=self._bucket).bucket_for(device, direct=False)
        size = min(bucket, self.nbytes)
        with closing(self._lane(SLOTS * size)) as lane:
            self._tell("attach", dict(lane.ref))
            times = [self._through_slots(flat, lane, size) for _ in range(self._repeats + 1)][1:]
        return self._row("two copies", times)

    def _lane(self, nbytes: int) -> Lane:
        return self._sender.end("ipc").lane(nbytes, torch.device(self.tensors.device), [])

    def _through_slots(self, flat: torch.Tensor, lane: Lane, size: int) -> float:
        for engine in self._engines:
            engine.say("load", size)
        began = time.perf_counter()
        for index, start in enumerate(range(0, len(flat), size)):
            if index >= SLOTS:
                self._hear()
            part, slot = flat[start : start + size], index % SLOTS * size
            lane.data[slot : slot + len(part)].copy_(part)
            lane.publish(slot, slot + len(part))
            for engine in self._engines:
                engine.connection.send(slot)
        for _ in range(min(SLOTS, -(-len(flat) // size))):
            self._hear()
        seconds = time.perf_counter() - began
        self._hear()
        return seconds

    # -- refits -----------------------------------------------------------------------------------

    def refit(self, bound: Row | None = None, **options: Any) -> Row:
        """One way to refit, as :class:`~rl_core.refit.options.SendOptions` tells it."""
        options = {"bucket_bytes": self._bucket, "deadline_s": self._deadline, **options}
        transport = options.get("transport", "ipc")
        reports = [self._refit_once(transport, options) for _ in range(self._repeats + 1)][1:]
        self.reports.append(min(reports, key=lambda report: report.seconds))
        last = self.reports[-1]
        more = "".join(f", {key}" for key in ("delta",) if options.get(key))
        if last.isolation != "quiesced":
            more += f", {last.isolation}"
        what = f"{last.transport} {last.mode}, verify={last.verify}{more}"
        return self._row(what, [report.seconds for report in reports], bound)

    def open_collective(self) -> None:
        """Lets trainer and engines meet for the transport ``collective``."""
        info = self._sender.prepare()
        meeting = {"ip": info["host"], "port": info["port"]}
        opened = self._sender.open(
            "collective", self._deadline, **meeting, receivers=len(self._engines)
        )
        self._tell("open", meeting)
        wait(opened, self._deadline)
        self._tell("prepare", self._sender.prepare())

    def _refit_once(self, transport: str, options: dict[str, Any]) -> RefitReport:
        for engine in self._engines:
            engine.say("receive", transport)
        sent = self._sender.send(receivers=len(self._engines), **options)
        report = RefitReport(**wait(sent, self._deadline + _GRACE_S)[0])
        self._hear()
        return report

    # -- the engines ------------------------------------------------------------------------------

    def _row(self, what: str, times: list[float], bound: Row | None = None) -> Row:
        best = min(times)
        return Row(
            what,
            best,
            statistics.median(times),
            self.nbytes / best / 1e9,
            None if bound is None else bound.seconds / best,
            "" if bound is None else bound.what,
        )

    def _tell(self, command: str, argument: Any = None) -> list[Any]:
        for engine in self._engines:
            engine.say(command, argument)
        return self._hear()

    def _hear(self) -> list[Any]:
        return [engine.hear() for engine in self._engines]


class _Engine:
    """One engine's process, seen from the trainer's."""

    def __init__(self, nbytes: int, count: int, device: str, deadline_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, self._theirs = context.Pipe()
        self._deadline = deadline_s
        self._process = context.Process(
            target=_serve, args=(self._theirs, nbytes, count, device, deadline_s), daemon=True
        )

    def start(self) -> None:
        self._process.start()
        self._theirs.close()

    def say(self, command: str, argument: Any = None) -> None:
        self.connection.send((command, argument))

    def hear(self) -> Any:
        if not self.connection.poll(self._deadline):
            raise DeadlineError(
                f"refit bench: an engine did not answer within {self._deadline:g} s",
                fix="give it more time: --deadline",
                seconds=self._deadline,
            )
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        if self._process.is_alive():
            self.connection.close()
            self._process.join(10)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()


def _serve(connection: Connection, nbytes: int, count: int, device: str, deadline_s: float) -> None:
    """An engine's process: does what it is told until the trainer is gone."""
    torch.set_num_threads(1)
    tensors = Tensors(nbytes, count, 0.0, device, flat=True)
    receiver = RefitReceiver(lambda: tensors, name="engine", lock=threading.RLock())
    copier = _Copier(tensors, connection)
    commands: dict[str, Callable[[Any], Any]] = {
        "prepare": receiver.prepare,
        "open": lambda meeting: wait(receiver.open("collective", deadline_s, meeting), deadline_s),
        "receive": lambda transport: wait(
            receiver.receive(transport=transport, deadline_s=deadline_s), deadline_s
        ),
        "attach": lambda ref: copier.attach(receiver, ref),
        "copy": copier.copy,
        "load": copier.load,
    }
    try:
        while True:
            command, argument = connection.recv()
            try:
                answer = commands[command](argument)
            except Exception as error:  # the trainer raises it
                answer = error
            connection.send(answer)
    except (EOFError, OSError):
        receiver.close()


class _Copier:
    """Plain copies into an engine's memory."""

    def __init__(self, tensors: Tensors, connection: Connection) -> None:
        self._flat = tensors.flat.view(torch.uint8)
        self._connection = connection
        self._lane: Lane

    def attach(self, receiver: RefitReceiver, ref: dict[str, Any]) -> None:
        self._lane = receiver.end("ipc").attach(ref, receiver.id)

    def copy(self, _: None) -> float:
        began = time.perf_counter()
        for start in range(0, len(self._flat), _STEP):
            stop = min(start + _STEP, len(self._flat))
            self._flat[start:stop].copy_(self._lane.data[start:stop])
        self._lane.release()
        return time.perf_counter() - began

    def load(self, size: int) -> None:
        for start in range(0, len(self._flat), size):
            part = self._flat[start : start + size]
            slot = self._connection.recv()
            part.copy_(self._lane.data[slot : slot + len(part)])
            self._lane.release()
            self._connection.send(None)
