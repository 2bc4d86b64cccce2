"""The choices that a refit offers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from rl_core.config import Range, check_config
from rl_core.errors import ConfigError
from rl_core.weights.data.plan import ALIGN, DataMode

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
DEFAULT_DEADLINE_S = 120.0
MAX_DEADLINE_S = 7 * 24 * 3600.0
_Mode = Literal["auto", "direct", "packed"]
MODES: tuple[str, ...] = get_args(_Mode)
#: Versions are columns of 64 bits.
_MOST = (1 << 63) - 1


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
        check_finite: ``"warn"``: the trainer looks for NaN and infinity in the parameters that it
            is going to send, and warns of them; ``"refuse"``: it sends nothing then.
        kv_scales: Scales of an FP8 key/value cache, applied with the weights: by names such as
            ``"layer_0.k_scale"``, or as ``calibrate_qkv_fp8_scales`` returns them (all of it, or
            what is under ``"layers"``).
        bucket_bytes: Largest size of each buffer and of each bucket; by data mode and device if
            None.
        deadline_s: Seconds for the whole refit, at most a week.
        number: Number of the refit, the same on both sides: the one in ``prepare_refit_info``, or,
            if None, the one after the last that was requested. ``refit`` sets it.
    """

    transport: str = "ipc"
    receivers: Annotated[int, Range(ge=1, le=1 << 16)] = 1
    version: Annotated[int | None, Range(ge=1, le=_MOST)] = None
    verify: Literal["none", "wire", "installed"] = "wire"
    isolation: Literal["quiesced", "staged"] = "quiesced"
    mode: _Mode = "auto"
    delta: bool = False
    check_finite: Literal["off", "warn", "refuse"] = "off"
    kv_scales: Mapping[str, Annotated[float, Range(gt=0, le=sys.float_info.max)]] = field(
        default_factory=dict
    )
    bucket_bytes: Annotated[int | None, Range(ge=ALIGN, le=_MOST)] = None
    deadline_s: Annotated[float, Range(gt=0, le=MAX_DEADLINE_S)] = DEFAULT_DEADLINE_S
    number: Annotated[int | None, Range(ge=1, le=_MOST)] = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Options by name; ``buffer_size_bytes`` is ``bucket_bytes``, ``num_buffers`` is ignored.

        Loops of other libraries call them so.

        Raises:
            ConfigError: One is unknown, or its value is not legal.
        """
        given = dict(given)
        given.pop("num_buffers", None)
        if (size := given.pop("buffer_size_bytes", None)) is not None:
            given.setdefault("bucket_bytes", size)
        scales = given.get("kv_scales") or {}
        if isinstance(scales, Mapping):
            layers = scales.get("layers")
            flat: dict[Any, Any] = {}  # by name, whether they were nested by layer or not
            for name, value in (layers if isinstance(layers, Mapping) else scales).items():
                nested = isinstance(value, Mapping)
                inner = {f"{name}.{kind}": x for kind, x in value.items()} if nested else {}
                flat |= inner if nested else {name: value}
            scales = flat
        checked = check_config(cls, {**given, "kv_scales": scales}, what="refit")
        checked["kv_scales"] = {name: float(value) for name, value in checked["kv_scales"].items()}
        for name in checked["kv_scales"]:
            if name.encode(errors="replace").decode() != name:  # half of a surrogate pair
                text = f"refit: the name {name!r} in kv_scales cannot be sent"
                raise ConfigError(text, fix="give names that UTF-8 can have", key="kv_scales")
        if checked.get("delta") and checked.get("verify") == "none":
            text = "refit: verify='none' hashes nothing, and delta compares hashes"
            raise ConfigError(text, fix='use verify="wire"', key="verify")
        return cls(**checked)

    def bucket_for(self, device: torch.device, mode: DataMode) -> int:
        """The size of buckets for a lane on a device."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        return _BUCKET_BYTES["cuda" if device.type == "cuda" else "cpu", mode]


def check_deadline(seconds: object) -> None:
    """Raises ConfigError unless these are seconds that a refit may take."""
    SendOptions.of({"deadline_s": seconds})
