"""What a trainer tells an engine before any refit, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rl_core.errors import LifecycleError, RefitProtocolError
from rl_core.interfaces.weights import TensorSpec  # noqa: TC001 - msgspec resolves it
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.protocol.frames import origin_of
from rl_core.weights.protocol.messages import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.weights.data.parts import Layout


class _Info(msgspec.Struct, frozen=True):
    digest: str
    tensors: tuple[TensorSpec, ...]
    token: str
    addresses: dict[str, dict[str, Any]]
    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    lacks: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class SenderInfo:
    """What an engine knows of the other side.

    Attributes:
        manifest: Its tensors.
        token: The secret that frames are authenticated with.
        addresses: By transport, the address of its end.
        lacks: By transport, why it has no end.
        dtypes: What the engine wants instead, by tensor.
        wire: The manifest in the dtypes that travel.
        keeps: The boxes that the engine keeps.
    """

    manifest: WeightManifest
    token: str
    addresses: dict[str, dict[str, Any]]
    lacks: dict[str, str]
    dtypes: dict[str, str]
    wire: WeightManifest
    keeps: Layout

    @property
    def origin(self) -> int:
        """Identifies the trainer that counts these versions."""
        return origin_of(self.token)

    def address_of(self, transport: str, name: str) -> dict[str, Any]:
        """The address of its end of a transport; ``name`` is who asks."""
        if transport not in self.addresses:
            why, _, fix = self.lacks.get(transport, "it was not opened").partition("\nFix: ")
            raise LifecycleError(
                f"{name}: the trainer does not offer the transport {transport}: {why}",
                fix=fix
                or "open it on both sides (init_collective), then call prepare_refit_info again",
            )
        return self.addresses[transport]


def introduction(manifest: WeightManifest, token: str) -> dict[str, Any]:
    """How a trainer describes itself; the caller adds the addresses of its transports."""
    return {
        "protocol": PROTOCOL,
        "rl_core": _release(),
        "digest": manifest.digest,
        "tensors": manifest.info,
        "token": token,
    }


def trainer_of(
    info: object,
    compare_with: Callable[[WeightManifest], tuple[dict[str, str], Layout]],
    last: SenderInfo | None,
) -> SenderInfo:
    """The trainer that an introduction is of."""
    fields = info if isinstance(info, Mapping) else {}
    spoken = fields.get("protocol", PROTOCOL)
    if spoken != PROTOCOL:
        release = fields.get("rl_core", "of another release")
        raise RefitProtocolError(
            f"the trainer (rl-core {release}) uses refit protocol {spoken}, this engine "
            f"(rl-core {_release()}) protocol {PROTOCOL}",
            phase="DISCOVER",
        )
    try:
        theirs = msgspec.convert(info, _Info)
    except msgspec.ValidationError as error:
        raise RefitProtocolError(
            f"what prepare_refit_info got is not the info of refit protocol {PROTOCOL}: {error}",
            fix="pass what the policy's prepare_refit_info() returned",
            phase="DISCOVER",
        ) from error
    manifest = WeightManifest.of(theirs.tensors, last.manifest if last else None)
    if manifest.digest != theirs.digest:
        raise RefitProtocolError(
            "the digest in the trainer's refit info is not that of its tensors", phase="DISCOVER"
        )
    dtypes, keeps = compare_with(manifest)
    wire = manifest.cast(dtypes, last.wire if last else None)
    return SenderInfo(manifest, theirs.token, theirs.addresses, theirs.lacks, dtypes, wire, keeps)


@cache
def _release() -> str:
    """Of rl-core, here; metadata is read from disk."""
    return version("rl-core")
