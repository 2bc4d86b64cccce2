"""The sender's side of the bytes: tensors into a lane, packed or living there."""

from __future__ import annotations

import operator
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch

from rl_core.errors import ManifestMismatchError
from rl_core.refit._digests import Digester, DigestTable, copy_run
from rl_core.refit.manifest import dtype_of, nbytes, numel
from rl_core.refit.plan import places

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rl_core.interfaces.weights import TensorSpec, WeightSource
    from rl_core.refit._layout import Layout
    from rl_core.refit.hashing import BlockHash
    from rl_core.refit.manifest import WeightManifest
    from rl_core.refit.transports.base import Lane

__all__ = ["Arena", "Packer", "checked_tensors", "digest_all", "direct_obstacle"]


def checked_tensors(
    source: WeightSource, specs: Sequence[TensorSpec]
) -> Generator[tuple[TensorSpec, torch.Tensor]]:
    """The source's tensors of these specs, in order. Closing it closes the source's iterator.

    Raises:
        ManifestMismatchError: The source yields something else than its specs say.
    """
    tensors = iter(source.tensors([spec.name for spec in specs]))
    nothing = ("nothing", torch.empty(0))
    try:
        for spec in specs:
            name, tensor = next(tensors, nothing)
            sound = name == spec.name and tensor.shape == spec.shape
            if not sound or tensor.dtype != dtype_of(spec):
                raise ManifestMismatchError(
                    f"the source yielded {name} {list(tensor.shape)} {tensor.dtype} where its "
                    f"specs say {spec.name} {list(spec.shape)} {spec.dtype}",
                    fix="make WeightSource.tensors yield the asked names as declared",
                    misshaped=[spec.name],
                )
            yield spec, tensor
    finally:
        if isinstance(tensors, Generator):  # now, not when an error that holds it is forgotten
            tensors.close()


def digest_all(
    given: Iterable[tuple[TensorSpec, torch.Tensor]],
    lasting: Mapping[str, torch.Tensor],
    wire: WeightManifest,
    block_bytes: int,
    block_hash: BlockHash,
) -> DigestTable:
    """The digest of every tensor as it is now, in the dtype that travels.

    Args:
        given: Tensors with the source's own specs; one may be gone once the next is asked for.
        lasting: By name, tensors that stay where they are.
        wire: The manifest with the dtypes that travel.
        block_bytes: Bytes under one digest, at most.
        block_hash: The trainer's.
    """
    table, digester = DigestTable(wire), Digester(block_bytes, block_hash)
    with torch.no_grad():
        named = ((wire.by_name[spec.name], tensor) for spec, tensor in given)
        table.known.update(digester.all(named, lasting))
    return table


class Packer:
    """Puts the buckets of one refit into its lane, in order.

    Args:
        layout: What goes where.
        tensors: Those that are copied, each once and in order; None if all live in the lane.
        table: Collects the digests of what is put; None if nothing is hashed.

    Attributes:
        layout: What goes where.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Generator[tuple[TensorSpec, torch.Tensor]] | None,
        table: DigestTable | None,
    ) -> None:
        self.layout = layout
        self._tensors = tensors
        self._table = table
        self._tensor = torch.empty(0)

    @torch.no_grad()
    def put(self, index: int) -> bytes:
        """Makes a bucket ready in the lane.

        Returns:
            The digests of its blocks, if they are hashed.

        Raises:
            ManifestMismatchError: The source yields something else than its specs say.
        """
        layout = self.layout
        bucket = layout.plan.buckets[index]
        if self._tensors is not None:
            for segment, view in zip(bucket.segments, layout.views(index), strict=True):
                if segment.offset == 0:
                    _, self._tensor = next(self._tensors)
                if segment.whole:
                    view.copy_(self._tensor)
                else:
                    copy_run(view, self._tensor, segment.offset)
        found: list[bytes] = []
        if self._table is not None:
            found = layout.digests(index)
            self._table.add(bucket, found, layout.plan.block_bytes)
        layout.lane.publish(bucket.start, bucket.stop)
        return b"".join(found)

    def close(self) -> None:
        """Reads nothing more from the source."""
        if self._tensors is not None:
            self._tensors.close()


def direct_obstacle(
    manifest: WeightManifest, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> str | None:
    """Why engines cannot read these tensors in shared memory; None if they can."""
    owners: dict[int, str] = {}
    for spec in manifest.tensors:
        tensor = tensors.get(spec.name)
        if spec.alias_of is not None:
            if tensor is not None and tensor is not tensors.get(spec.alias_of):
                return f"{spec.name} shares memory with {spec.alias_of} by another tensor object"
            continue
        if not numel(spec):
            continue
        if tensor is None:
            return f"the source keeps no tensor {spec.name}"
        if tensor.device != device:
            return f"{spec.name} is on {tensor.device}, which engines cannot read"
        if tensor.shape != spec.shape or tensor.dtype != dtype_of(spec):
            return f"{spec.name} is not kept as it is declared"
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != nbytes(spec):
            return f"{spec.name} is a view of other memory"
        if (owner := owners.setdefault(tensor.data_ptr(), spec.name)) != spec.name:
            return f"{spec.name} shares memory with {owner}, and does not say so"
    return None


class Arena:
    """Remembers which tensors were moved into a lane, so that this is looked at once."""

    def __init__(self) -> None:
        self._lane: Lane | None = None
        self._manifest: WeightManifest | None = None
        self._tensors: list[torch.Tensor] = []
        self._places: list[int] = []
        self._lack: tuple[WeightManifest, str] | None = None

    def lacks(self, manifest: WeightManifest) -> str | None:
        """Why there was no memory for these tensors when they were to be moved; None if there was.

        It is remembered, so that not every refit moves a part of a large model in vain.
        """
        known = self._lack
        return known[1] if known is not None and known[0] is manifest else None

    def remember_lack(self, manifest: WeightManifest, why: str) -> None:
        """There was no memory to move them all."""
        self._lack = (manifest, why)

    def holds(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the tensors that were moved, and are where they were moved to."""
        if manifest is not self._manifest:
            return False
        given = tensors.values()
        same = len(given) == len(self._tensors) and all(map(operator.is_, given, self._tensors))
        return same and [tensor.data_ptr() for tensor in given] == self._places

    @torch.no_grad()
    def adopt(
        self, lane: Lane, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Moves tensors into a lane, each to its place; those that are there stay.

        One tensor is moved at a time. Where the lane's memory grows with them, memory for one more
        is enough. If it lacks, tensors that were moved are whole, and those that were not, too.

        Raises:
            RefitError: There is not enough memory.
        """
        if self._lane is lane and self.holds(manifest, tensors):
            return
        base = lane.data.data_ptr()
        here = range(base, base + lane.data.numel())
        moves = [
            (tensors[spec.name], spec, place)
            for spec, place in zip(manifest.owned, places(manifest.owned)[0], strict=True)
            if tensors[spec.name].data_ptr() != base + place
        ]
        for tensor, _, _ in moves:
            if tensor.data_ptr() in here:  # in the place of another one, which comes back to it
                tensor.data = tensor.clone()
        for tensor, spec, place in moves:
            moved = lane.allocate_view(place, place + nbytes(spec))
            moved = moved.view(dtype_of(spec)).view(spec.shape)
            moved.copy_(tensor)
            tensor.data = moved
        if moves:
            lane.moved_in()
        self._lane, self._manifest, self._tensors = lane, manifest, list(tensors.values())
        self._places = [tensor.data_ptr() for tensor in self._tensors]
        self._lack = None
