"""How fast refits are on this host, next to plain copies of the same bytes in the same run.

Bounds, all by processes of one thread each that do nothing else:

``one copy``: every engine's process copies the bytes out of shared memory, all at the same time;
by ``copy_`` or ``memmove``, of all at once or of pieces, or in step with each other, so that they
find in the cache what another one has read; the fastest counts.
``two copies``: the trainer's process copies them into two slots of shared memory while every
engine's copies them out, with nothing between them but semaphores; with slots of several sizes,
the fastest of which counts.

A refit takes from the moment at which it is asked for on either side until both sides' futures
are done. Some of the trainer's tensors change before each.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from refit_bench.engine import Engine, Tensors, acquire
from rl_core.errors import ConfigError, RefitCorrupted
from rl_core.futures import wait
from rl_core.weights.data.plan import SLOTS
from rl_core.weights.options import DEFAULT_DEADLINE_S
from rl_core.weights.report import RefitReport
from rl_core.weights.sending.sender import RefitSender

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.weights.transports.base import Lane

__all__ = ["Bench", "Row", "Tensors"]

#: What a plain copy moves at once, if not all: what a cache holds.
_PIECE = 4 << 20
#: Slots through which plain copies are tried; the last one is for GPUs.
_SLOT_BYTES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
#: Seconds past the deadline in which a refit says itself what it waited for.
_GRACE_S = 5.0


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

    Raises:
        ConfigError: The numbers make no sense, or torch cannot use the device.
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
        self._device = _usable(device)
        device, each = str(self._device), nbytes // tensors // 2
        parts = (torch.empty(each, dtype=torch.bfloat16, device=device) for _ in range(tensors))
        self.tensors = Tensors.filled(parts, 1.0)
        self.nbytes = sum(t.nbytes for t in self.tensors.held.values())
        self.reports: list[RefitReport] = []
        self._repeats = repeats
        self._bucket = bucket_bytes
        self._deadline = deadline_s
        self._slots = _SLOT_BYTES[: None if self._device.type == "cuda" else -1]
        self._random = random.Random(0)
        self._threads = torch.get_num_threads()
        self._sender = RefitSender(lambda: self.tensors, name="trainer")
        self._engines = [Engine(each, tensors, device, deadline_s) for _ in range(receivers)]

    @property
    def pids(self) -> list[int]:
        """The trainer's process and the engines'."""
        return [os.getpid(), *(engine.pid for engine in self._engines)]

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
            calls = ("copy_", "memmove") if self._device.type == "cpu" else ("copy_",)
            ways = [(call, size) for call in calls for size in (_PIECE, self.nbytes)]
            times = [self._timed(partial(self._tell, "copy", way)) for way in ways]
            if len(self._engines) > 1:
                times += [self._timed(partial(self._step_by_step, lane, s)) for s in self._slots]
            self._tell("attach")
        return self._row("one copy", min(times, key=min))

    def two_copies(self) -> Row:
        """The bytes go through two slots."""
        flat = torch.ones(self.nbytes, dtype=torch.uint8, device=self._device)
        sizes = sorted({min(size, self.nbytes) for size in (*self._slots, self._bucket) if size})
        with closing(self._lane(SLOTS * sizes[-1])) as lane:
            self._tell("attach", dict(lane.ref))
            times = [self._timed(partial(self._step_by_step, lane, s, flat)) for s in sizes]
            self._tell("attach")
        return self._row("two copies", min(times, key=min))

    def _lane(self, nbytes: int) -> Lane:
        return self._sender.connection("ipc").end.lane(nbytes, self._device, [])

    def _timed(self, run: Callable[[], list[tuple[float, float]]]) -> list[float]:
        """Seconds from the first process's start to the last one's end, run by run."""
        times = []
        for _ in range(self._repeats + 1):
            begun, ended = zip(*run(), strict=True)
            times.append(max(ended) - min(begun))
        return times[1:]

    def _step_by_step(
        self, lane: Lane, size: int, packed: torch.Tensor | None = None
    ) -> list[tuple[float, float]]:
        """Engines copy so many bytes at a time, of slots that are packed or of a whole lane."""
        slots = -(-self.nbytes // size) if packed is None else SLOTS
        for engine in self._engines:
            engine.say("load", (size, slots))
        began = time.perf_counter()
        for index, start in enumerate(range(0, self.nbytes, size)):
            for engine in self._engines:
                acquire(engine.free, self._deadline)
            if packed is not None:
                part, slot = packed[start : start + size], index % SLOTS * size
                lane.data[slot : slot + len(part)].copy_(part)
                lane.publish(slot, slot + len(part))
            for engine in self._engines:
                engine.full.release()
        return [(began, ended) for ended in self._hear()]

    # -- refits -----------------------------------------------------------------------------------

    def refit(self, bound: Row | None = None, *, changed: float = 1.0, **options: Any) -> Row:
        """One way to refit.

        Args:
            bound: What to compare it with.
            changed: Fraction of the tensors that change before each refit, others every time.
            **options: Those of :class:`~rl_core.weights.options.SendOptions`.
        """
        options = {"bucket_bytes": self._bucket, "deadline_s": self._deadline, **options}
        runs = [self._refit_once(changed, options) for _ in range(self._repeats + 1)][1:]
        self.reports.append(min(runs, key=lambda run: run[0])[1])
        last = self.reports[-1]
        what = f"{last.transport} {last.mode}, verify={last.verify}"
        if options.get("delta"):
            what += f", delta, {changed:.0%} changed"
        if last.isolation != "quiesced":
            what += f", {last.isolation}"
        return self._row(what, [seconds for seconds, _ in runs], bound)

    def check(self) -> None:
        """Compares what the engines hold with what the trainer holds.

        Raises:
            RefitCorrupted: They differ.
        """
        ours = self.tensors.digests()
        if any(theirs != ours for theirs in self._tell("digests")):
            raise RefitCorrupted("refit bench: an engine does not hold what the trainer holds")

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

    def _refit_once(self, changed: float, options: dict[str, Any]) -> tuple[float, RefitReport]:
        names = list(self.tensors.held)
        self.tensors.change(self._random.sample(names, math.ceil(changed * len(names))))
        began = time.perf_counter()
        for engine in self._engines:
            engine.say("receive", options.get("transport", "ipc"))
        sent = self._sender.send(receivers=len(self._engines), **options)
        report = RefitReport(**wait(sent, self._deadline + _GRACE_S)[0])
        ended = max([time.perf_counter(), *self._hear()])
        return ended - began, report

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


def _usable(device: str) -> torch.device:
    """A device by the name that tensors on it have."""
    try:
        found = torch.empty(0, device=device).device
        cause = "refits are measured between processes, on the CPU or on GPUs of CUDA"
    except (AssertionError, RuntimeError) as error:  # the first says that torch has no CUDA
        found, cause = None, str(error).partition("\n")[0]
    if found is None or found.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"refit bench: device {device!r} cannot be used: {cause}",
            fix="give cpu, or on a machine with a GPU and a torch built for it cuda or cuda:N",
            key="device",
        )
    return found
