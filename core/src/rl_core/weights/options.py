"""The choices that a refit offers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeGuard

from rl_core.errors import ConfigError
from rl_core.weights.data.plan import ALIGN, DataMode
from rl_core.weights.protocol.receiver_session import ISOLATION_LEVELS, VERIFY_LEVELS

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DEFAULT_DEADLINE_S",
    "MAX_DEADLINE_S",
    "MODES",
    "SendOptions",
    "check_deadline",
]

#: Buffers that fit a CPU's last cache together pass bytes on without the memory's help.
DEFAULT_BUCKET_BYTES = 8 << 20
#: By device and data mode. Where no cache is to be hit, larger
#: buckets have fewer messages, and between GPUs each of those costs as much as copying many
#: megabytes.
_BUCKET_BYTES = {
    ("cpu", DataMode.PACKED): DEFAULT_BUCKET_BYTES,
    ("cpu", DataMode.DIRECT): 64 << 20,
    ("cuda", DataMode.PACKED): 256 << 20,
    ("cuda", DataMode.DIRECT): 512 << 20,
}
#: Least and most of whole numbers. Versions are columns of 64 bits.
_BOUNDS = {
    "receivers": (1, 1 << 16),
    "version": (1, (1 << 63) - 1),
    "bucket_bytes": (ALIGN, (1 << 63) - 1),
    "number": (1, (1 << 63) - 1),
}
DEFAULT_DEADLINE_S = 120.0
MAX_DEADLINE_S = 7 * 24 * 3600.0
MODES = ("auto", "direct", "packed")
#: What loops of other libraries call an option; the number of buffers is not an option.
_ALSO_CALLED = {"buffer_size_bytes": "bucket_bytes", "num_buffers": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """How one refit is sent.

    Attributes:
        transport: Name of an installed transport.
        receivers: Engines that must take part; all commit or none.
        version: Label of the new weights, possibly lower than the last one; the last one plus 1 if
            None. The last committed version is for engines that come late: their hashes must show
            that the weights are still the same.
        verify: ``"none"``; ``"wire"``: every block is hashed on both sides; ``"installed"``: also,
            the engine reads its tensors back before the commit.
        isolation: ``"quiesced"``: engines do not generate while they are written to, in place;
            ``"staged"``: they generate with the old weights until a second copy has all new ones,
            and after a refit that fails.
        mode: ``"direct"``: engines read the trainer's memory, if the source keeps its tensors;
            ``"packed"``: tensors go through two buffers; ``"auto"``: direct if possible.
        delta: Send only tensors that the engines do not have. Not with ``verify="none"``.
        kv_scales: Scales of an FP8 key/value cache, applied with the weights: by names such as
            ``"layer_0.k_scale"``, or as ``calibrate_qkv_fp8_scales`` returns them (all of it, or
            what is under ``"layers"``).
        bucket_bytes: Largest size of each buffer and of each bucket; by data mode and device if
            None.
        deadline_s: Seconds for the whole refit, at most a week.
        number: Number of the refit, the same on both sides: the one in ``prepare_refit_info``, or,
            if None, the one after the last that was requested. ``refit`` sets it.

    Raises:
        ConfigError: A value is not legal.
    """

    transport: str = "ipc"
    receivers: int = 1
    version: int | None = None
    verify: str = "wire"
    isolation: str = "quiesced"
    mode: str = "auto"
    delta: bool = False
    kv_scales: Mapping[str, float] = field(default_factory=dict)
    bucket_bytes: int | None = None
    deadline_s: float = DEFAULT_DEADLINE_S
    number: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Options by name; ``buffer_size_bytes`` is ``bucket_bytes``, ``num_buffers`` is ignored.

        Raises:
            ConfigError: One is unknown, or its value is not legal.
        """
        given = dict(given)
        for other, name in _ALSO_CALLED.items():
            if other in given:
                value = given.pop(other)
                if name and value is not None:
                    given.setdefault(name, value)
        known = [option.name for option in fields(cls)]
        for key in given:
            if key not in known:
                raise ConfigError(
                    f"refit: unknown option {key!r}", fix=f"use one of {', '.join(known)}", key=key
                )
        scales = given.get("kv_scales") or {}
        if not isinstance(scales, Mapping):
            raise _illegal("kv_scales", scales, "give a mapping of names to numbers")
        if isinstance(layers := scales.get("layers"), Mapping):
            scales = layers
        flat: dict[str, Any] = {}  # by name, whether they were nested by layer or not
        for name, value in scales.items():
            nested = isinstance(value, Mapping)
            flat |= {f"{name}.{kind}": x for kind, x in value.items()} if nested else {name: value}
        for name, value in flat.items():
            number = _is_number(value, int | float)
            if not _is_text(name) or not number or not 0 < value <= sys.float_info.max:
                fix = "give names, and finite numbers above 0"
                raise _illegal(f"kv_scales[{name!r}]", value, fix)
        kv_scales = {name: float(value) for name, value in flat.items()}
        return cls(**{**given, "kv_scales": kv_scales})

    def bucket_for(self, device: torch.device, mode: DataMode) -> int:
        """The size of buckets for a lane on a device."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        return _BUCKET_BYTES["cuda" if device.type == "cuda" else "cpu", mode]

    def __post_init__(self) -> None:
        choices = {"verify": VERIFY_LEVELS, "isolation": ISOLATION_LEVELS, "mode": MODES}
        for key, legal in choices.items():
            if getattr(self, key) not in legal:
                raise _illegal(key, getattr(self, key), f"use one of {legal}")
        for key, (least, most) in _BOUNDS.items():
            value = getattr(self, key)
            given = value is not None or key == "receivers"
            if given and not (_is_number(value, int) and least <= value <= most):
                raise _illegal(key, value, f"give a whole number from {least} to {most}")
        check_deadline(self.deadline_s)
        if not _is_text(self.transport):
            raise _illegal("transport", self.transport, "give a name")
        if not isinstance(self.delta, bool):
            raise _illegal("delta", self.delta, "use True or False")
        if self.verify == "none" and self.delta:
            raise _illegal("verify", self.verify, 'use verify="wire": delta compares hashes')


def check_deadline(seconds: object) -> None:
    """Raises ConfigError unless these are seconds that a refit may take."""
    if not (_is_number(seconds, int | float) and 0 < seconds <= MAX_DEADLINE_S):
        fix = f"give the seconds that a refit may take, at most {MAX_DEADLINE_S:g} (a week)"
        raise _illegal("deadline_s", seconds, fix)


def _is_number(value: object, kind: Any) -> TypeGuard[float]:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Whether it can be written as UTF-8, which halves of a surrogate pair cannot."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


def _illegal(key: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"refit: {key}={value!r} is not valid", fix=fix, key=key)
