"""What a refit did, in numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self

import torch

from rl_core.errors import RefitProtocolError

__all__ = ["RefitReport", "copy_rate"]

_CUDA: Any = torch.cuda  # its events are not typed

#: Bytes that are copied to measure the rate: with the copy, more than most caches hold, and no more
#: than a refit may take beside its buffers.
_PROBE_BYTES = {"cpu": 32 << 20, "cuda": 40 << 20}
#: What is tried at least on a device that is full.
_LEAST_PROBE_BYTES = 1 << 19
#: Copies that a GPU is given at once: what it still has to write when they end is little of all.
_COPIES = 16


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What a committed refit did.

    Attributes:
        version: The version that serves now.
        bytes: Bytes sent: each tensor once, in the engine's dtype.
        seconds: From the first message to the last commit.
        gb_per_s: ``bytes / seconds / 1e9``.
        of_copy_rate: ``gb_per_s`` as a fraction of :func:`copy_rate` where the tensors are.
        phases: Seconds in each phase, as the sender saw them.
        extra_memory_bytes: Size of the sender's buffers; 0 if they are the tensors' own memory.
        tensors: Tensors sent, without aliases and empty ones.
        skipped: Tensors that were not sent because every engine had them.
        unchanged: Tensors that are bit for bit what they were in the version before; None if that
            is not known, because nothing was hashed.
        cast: Tensors that were rounded to another dtype for the engine.
        buckets: Buckets sent.
        receivers: Engines that committed.
        transport: What moved the bytes.
        mode: ``"direct"`` or ``"packed"``.
        verify: How the transfer was verified.
        isolation: Whether engines served meanwhile.
        attempts: How often it was tried, this time included.
        fallback: Why ``mode="auto"`` did not read the tensors where they are; None if it did.
    """

    version: int
    bytes: int
    seconds: float
    gb_per_s: float
    of_copy_rate: float
    phases: Mapping[str, float]
    extra_memory_bytes: int
    tensors: int
    skipped: int
    unchanged: int | None
    cast: int
    buckets: int
    receivers: int
    transport: str
    mode: str
    verify: str
    isolation: str
    attempts: int = 1
    fallback: str | None = None

    @classmethod
    def of(cls, results: list[Any], attempts: int) -> Self:
        """The report among the results of both sides' futures.

        Raises:
            RefitProtocolError: The policy returned none.
        """
        for result in results:
            if isinstance(result, Mapping) and "phases" in result:
                return cls(**{**result, "attempts": attempts})
        raise RefitProtocolError(
            "the policy's futures returned no report",
            fix="derive the policy from rl_core.backends.PolicyBackend",
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        same = "" if self.unchanged is None else f", {self.unchanged} unchanged"
        why = f" ({self.fallback})" if self.fallback else ""
        skipped = f", {self.skipped} held already" if self.skipped else ""
        return (
            f"refit to version {self.version}: {self.bytes / 1e6:.1f} MB in {self.seconds:.3f} s "
            f"({self.gb_per_s:.2f} GB/s, {self.of_copy_rate:.0%} of a plain copy), "
            f"{self.tensors} tensors{skipped}{same}, {self.receivers} "
            f"receiver{'s' * (self.receivers > 1)}, {self.transport} {self.mode}{why}, "
            f"verify={self.verify}, {self.extra_memory_bytes / 1e6:.1f} MB of buffers"
        )


@cache
def copy_rate(device: str) -> float:
    """Bytes per second of a plain copy on a device, by the threads that torch uses here.

    Measured once per process, with 64 to 80 MiB, or with what a full device has left.
    """
    nbytes = _PROBE_BYTES["cuda" if torch.device(device).type == "cuda" else "cpu"]
    while True:
        try:
            return _measure_copies(device, nbytes)
        except torch.OutOfMemoryError:
            if nbytes <= _LEAST_PROBE_BYTES:
                raise
            nbytes //= 4


def _measure_copies(device: str, nbytes: int) -> float:
    source = torch.ones(nbytes // 4, device=device)
    target = torch.zeros_like(source)
    timed = _seconds_on_gpu if source.is_cuda else _seconds
    return nbytes / min(timed(source, target) for _ in range(4))


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """Of one copy."""
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def _seconds_on_gpu(source: torch.Tensor, target: torch.Tensor) -> float:
    """Of one copy among many, by the GPU's own clock: launching one takes longer than the copy."""
    with torch.cuda.device(source.device):
        begun, ended = (_CUDA.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(_COPIES):
            target.copy_(source)
        ended.record()
        ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / _COPIES
