"""What a refit did, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rl_core.errors import RefitProtocolError

__all__ = ["RefitReport"]


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What a committed refit did.

    Attributes:
        version: The version that serves now.
        bytes: Bytes sent: each tensor once, in the engine's dtype.
        seconds: Of the last attempt, from the moment at which the sender got the call, to the last
            commit. Waiting for its turn, for the engines and for generation to end are in it, and
            in ``phases``.
        gb_per_s: ``bytes / seconds / 1e9``.
        phases: Seconds in each phase, as the sender saw them. Engines have all bytes when INSTALL
            begins: it is their own work in ``WeightSink.finish``, what ``verify="installed"`` reads
            back, and with ``isolation="staged"`` the wait for generation to end.
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
        origin: Identifies the trainer of that version; constant while its sending end lives.
        compared_bytes: Bytes of copies that ranks of the trainer hashed without sending them.
        compared_seconds: In which rank 0 hashed its own of these, and waited for the others.
        taken_over: The engines that had another trainer's weights before, each with its ``name``
            and the ``origin`` and ``version`` of these. Versions of two origins do not compare.
    """

    version: int
    bytes: int
    seconds: float
    gb_per_s: float
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
    origin: int = 0
    compared_bytes: int = 0
    compared_seconds: float = 0.0
    taken_over: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, results: list[Any], attempts: int) -> Self:
        """The report among the results of both sides' futures.

        Raises:
            RefitProtocolError: The policy returned none.
        """
        facts = [result for result in results if isinstance(result, Mapping)]
        taken = [{"name": r["name"], **r["replaced"]} for r in facts if r.get("replaced")]
        for result in facts:
            if "phases" in result:
                return cls(**{**result, "attempts": attempts, "taken_over": taken})
        raise RefitProtocolError(
            "the futures of the policy's send_weights returned no report",
            fix="build the policy on rl_backends.PolicyBackend",
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
            f"({self.gb_per_s:.2f} GB/s), {self.tensors} tensors{skipped}{same}, {self.receivers} "
            f"receiver{'s' * (self.receivers > 1)}, {self.transport} {self.mode}{why}, "
            f"verify={self.verify}, {self.extra_memory_bytes / 1e6:.1f} MB of buffers"
        )
