"""Copies between tensors and buckets, and the hashes of what was copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash

from rl_core.errors import ManifestMismatchError, RefitCorrupted
from rl_core.refit.manifest import dtype_of
from rl_core.refit.session import bucket_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_core.interfaces.weights import TensorSpec, WeightSink, WeightSource
    from rl_core.refit.manifest import WeightManifest
    from rl_core.refit.plan import Bucket, Segment

__all__ = ["Packer", "Unpacker", "copy_run"]


def copy_run(target: torch.Tensor, source: torch.Tensor, offset: int) -> None:
    """Fills 1-D ``target`` with the elements of ``source`` from ``offset`` on, in logical order.

    Casts if the dtypes differ. ``source`` may have any strides and device; no copy of it is made.
    """
    count = target.numel()
    if source.is_contiguous():
        target.copy_(source.view(-1)[offset : offset + count])
        return
    width = source.numel() // source.shape[0]
    done = 0
    while done < count:
        row, within = divmod(offset + done, width)
        whole = 0 if within else (count - done) // width
        if whole:
            part = target[done : done + whole * width]
            part.view(whole, *source.shape[1:]).copy_(source[row : row + whole])
        else:
            part = target[done : done + min(width - within, count - done)]
            copy_run(part, source[row], within)
        done += part.numel()


class Packer:
    """Fills slots from a source; tensors are asked for once, in order.

    Args:
        source: The trainer's tensors.
        declared: The source's own manifest.
        hashed: Whether to hash what is packed.

    Attributes:
        digests: Hashes of every tensor's segments so far, by name; empty unless hashed.
    """

    def __init__(self, source: WeightSource, declared: WeightManifest, *, hashed: bool) -> None:
        self.digests: dict[str, bytes] = {}
        self._declared = declared.by_name
        self._tensors: Iterator[tuple[str, torch.Tensor]] = iter(
            source.tensors([spec.name for spec in declared.owned])
        )
        self._hashed = hashed
        self._name = ""
        self._tensor = torch.empty(0)

    @torch.no_grad()
    def pack(self, bucket: Bucket, data: torch.Tensor, view: memoryview) -> list[bytes]:
        """Copies a bucket's tensors into a slot.

        Args:
            bucket: What to pack.
            data: The slot, uint8.
            view: The same bytes.

        Returns:
            The hash of each segment, if hashed.

        Raises:
            ManifestMismatchError: The source yields something else than its specs say.
        """
        parts = []
        for segment in bucket.segments:
            tensor = self._take(segment.spec.name)
            copy_run(segment.of(data), tensor, segment.offset)
            if self._hashed:
                part = xxhash.xxh3_128_digest(view[segment.start : segment.stop])
                parts.append(part)
                name = segment.spec.name
                self.digests[name] = self.digests.get(name, b"") + part
        return parts

    def _take(self, name: str) -> torch.Tensor:
        if name == self._name:
            return self._tensor
        self._name, self._tensor = next(self._tensors, ("nothing", self._tensor))
        spec = self._declared[name]
        wrong = (self._name != name, self._tensor.shape != spec.shape)
        if any(wrong) or self._tensor.dtype != dtype_of(spec):
            raise ManifestMismatchError(
                f"the source yielded {self._name} {list(self._tensor.shape)} {self._tensor.dtype} "
                f"where its specs say {name} {list(spec.shape)} {spec.dtype}",
                fix="make WeightSource.tensors yield the asked names as declared",
                misshaped=[name],
            )
        return self._tensor


class Unpacker:
    """Writes slots to a sink, and checks hashes on the way and at the end.

    Args:
        sink: The engine's tensors.
        manifest: The trainer's, in the dtypes that travel.
        expected: The sink's own.
        session: The session, which digests are bound to.
        verify: ``"none"``, ``"wire"`` or ``"installed"``.
        touch: Called before every write.
    """

    def __init__(
        self,
        sink: WeightSink,
        manifest: WeightManifest,
        expected: WeightManifest,
        *,
        session: str,
        verify: str,
        touch: Callable[[], None],
    ) -> None:
        self._sink = sink
        self._expected = expected
        self._session = session
        self._verify = verify
        self._touch = touch
        self._root = {name: manifest.root(name) for name in expected.by_name}
        self._installed: dict[str, list[tuple[Segment, bytes]]] = {}
        # What the trainer ties and the engine does not is written to each of its storages.
        self._targets: dict[str, list[TensorSpec]] = {}
        for spec in expected.owned:
            self._targets.setdefault(self._root[spec.name], []).append(spec)

    @torch.no_grad()
    def load(
        self, index: int, bucket: Bucket, data: torch.Tensor, view: memoryview, digest: str
    ) -> None:
        """Verifies a bucket, then writes it.

        Raises:
            RefitCorrupted: The bytes are not those that were packed; this bucket is not written.
        """
        if self._verify != "none":
            parts = [xxhash.xxh3_128_digest(view[s.start : s.stop]) for s in bucket.segments]
            if bucket_digest(self._session, index, parts) != digest:
                first = bucket.segments[0].spec.name
                raise RefitCorrupted(
                    f"bucket {index} (from {first} on) is not what the sender packed",
                    fix="refit again; if it happens twice, test the host's memory",
                    bucket=index,
                )
            if self._verify == "installed":
                for segment, part in zip(bucket.segments, parts, strict=True):
                    self._installed.setdefault(segment.spec.name, []).append((segment, part))
        self._touch()
        for segment in bucket.segments:
            run = segment.of(data)
            for spec in self._targets[segment.spec.name]:
                self._sink.write(spec.name, segment.offset, run.to(dtype_of(spec)), of=spec)

    @torch.no_grad()
    def check_installed(self, scratch_bytes: int) -> None:
        """Reads every tensor back and compares it with what arrived.

        Args:
            scratch_bytes: Size of a segment at most; memory of that size is used.

        Raises:
            RefitCorrupted: Names every tensor that is not what arrived.
        """
        scratch = memoryview(bytearray(scratch_bytes))
        names = [spec.name for spec in self._expected.tensors]
        wrong, read = [], dict.fromkeys(names, False)
        for name, tensor in self._sink.read(names):
            read[name] = True
            spec = self._expected.by_name[name]
            sound = tensor.shape == spec.shape and tensor.dtype == dtype_of(spec)
            if not (sound and self._matches(self._root[name], tensor, scratch)):
                wrong.append(name)
        wrong += [name for name, seen in read.items() if not seen]
        if wrong:
            raise RefitCorrupted(
                f"{len(wrong)} tensors are not installed as they arrived: {', '.join(wrong[:5])}",
                fix="the engine's loader drops, misplaces or converts them",
                tensors=wrong,
            )

    def _matches(self, root: str, tensor: torch.Tensor, scratch: memoryview) -> bool:
        for segment, part in self._installed.get(root, []):
            run = scratch[: segment.stop - segment.start]
            copy_run(torch.frombuffer(run, dtype=tensor.dtype), tensor, segment.offset)
            if xxhash.xxh3_128_digest(run) != part:
                return False
        return True
