"""The manifest: which tensors a refit moves, agreed on by name before any weight is touched."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
import xxhash

from rl_core.errors import ManifestMismatchError, RefitProtocolError
from rl_core.interfaces.weights import whole_box

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rl_core.interfaces.weights import Box, TensorSpec

__all__ = ["WeightManifest", "compare"]

#: Dtypes between which a sender may round; quantised formats need scales and are not among them.
CASTABLE = frozenset({"float64", "float32", "float16", "bfloat16"})

_DTYPES = frozenset(
    name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
)
_SHOWN = 5
#: Of one tensor: 1 PiB.
_MOST_BYTES = 1 << 50


@dataclass(frozen=True)
class WeightManifest:
    """All tensors of a model, aliases included, in the order in which they are sent."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        counts = Counter(spec.name for spec in self.tensors)
        if duplicate := [name for name, count in counts.items() if count > 1]:
            _mismatch(duplicate=duplicate)
        for spec in self.tensors:
            if cause := self._fault(spec):
                raise RefitProtocolError(
                    f"manifest: {spec.name!r}: {cause}",
                    fix="correct WeightSource.specs() or WeightSink.specs()",
                    phase="DISCOVER",
                )

    def _fault(self, spec: TensorSpec) -> str | None:
        if spec.dtype not in _DTYPES:
            return f"unknown dtype {spec.dtype!r}"
        if not all(type(size) is int and size >= 0 for size in spec.shape):
            return f"a size in the shape {spec.shape} is not an integer of 0 or more"
        if spec.nbytes > _MOST_BYTES:
            return f"its {spec.nbytes} bytes are more than any memory has"
        try:
            msgspec.msgpack.encode(spec)
        except (TypeError, ValueError, OverflowError) as error:  # such as half a character
            return f"it cannot be sent: {error}"
        if spec.alias_of is None:
            return None
        owner = self.by_name.get(spec.alias_of)
        if owner is None or owner.alias_of is not None:
            return f"alias_of names {spec.alias_of!r}, which is missing or itself an alias"
        if (owner.shape, owner.dtype) != (spec.shape, spec.dtype):
            return f"shape or dtype differs from that of {owner.name!r}, which it aliases"
        return None

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], last: WeightManifest | None = None) -> WeightManifest:
        """The manifest of a source's or a sink's specs; ``last`` itself if it is the same."""
        tensors = tuple(specs)
        return last if last is not None and last.tensors == tensors else cls(tensors)

    @cached_property
    def info(self) -> list[dict[str, Any]]:
        """Plain dicts, one per tensor, for ``prepare_refit_info``."""
        tied = {spec.alias_of for spec in self.tensors if spec.alias_of}
        return [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "role": spec.role,
                "alias_group": spec.alias_of or (spec.name if spec.name in tied else None),
                "alias_of": spec.alias_of,
                "trainable": spec.trainable,
            }
            for spec in self.tensors
        ]

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """The specs under their names."""
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def owned(self) -> tuple[TensorSpec, ...]:
        """What is sent: all but aliases and empty tensors."""
        return tuple(s for s in self.tensors if s.alias_of is None and s.numel)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Index in :attr:`owned`, by name."""
        return {spec.name: index for index, spec in enumerate(self.owned)}

    @cached_property
    def boxes(self) -> list[Box]:
        """All of each tensor in :attr:`owned`."""
        return [whole_box(spec.shape) for spec in self.owned]

    @cached_property
    def digest(self) -> str:
        """128-bit hash over every field of every tensor, in order."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self.tensors))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors that are sent."""
        return sum(spec.nbytes for spec in self.owned)

    def root(self, name: str) -> str:
        """The tensor that owns the storage of ``name``."""
        return self.by_name[name].alias_of or name

    def cast(self, dtypes: Mapping[str, str], last: WeightManifest | None = None) -> WeightManifest:
        """The manifest with other dtypes for some names; ``last`` itself if it is the same."""
        if not dtypes:
            return self
        for name, dtype in dtypes.items():
            spec = self.by_name.get(name)
            if spec is None or not _castable(spec.dtype, dtype):
                raise RefitProtocolError(
                    f"manifest: {name} cannot be sent as {dtype}", phase="DISCOVER"
                )
        replace = msgspec.structs.replace
        tensors = (
            replace(s, dtype=dtypes[s.name]) if s.name in dtypes else s for s in self.tensors
        )
        return self.of(tensors, last)


def compare(
    theirs: WeightManifest, expected: WeightManifest, *, casts: bool = False
) -> dict[str, str]:
    """Checks the trainer's tensors against the engine's."""
    ours, dtypes = expected.by_name, {}
    faults: dict[str, list[str]] = {
        "missing": [name for name in ours if name not in theirs.by_name],
        "unexpected": [name for name in theirs.by_name if name not in ours],
        "misshaped": [],
        "mistyped": [],
        "untied": [],
    }
    notes: dict[str, str] = {}
    for spec in theirs.tensors:
        mine = ours.get(spec.name)
        if mine is None:
            continue
        if tuple(mine.shape) != tuple(spec.shape):
            faults["misshaped"].append(spec.name)
            notes[spec.name] = f"trainer {list(spec.shape)}, engine {list(mine.shape)}"
        if mine.dtype != spec.dtype:
            if casts and _castable(spec.dtype, mine.dtype):
                dtypes[spec.name] = mine.dtype
            else:
                faults["mistyped"].append(spec.name)
                notes[spec.name] = f"trainer {spec.dtype}, engine {mine.dtype}"
        owner = mine.alias_of or spec.name
        if owner in theirs.by_name and theirs.root(owner) != theirs.root(spec.name):
            faults["untied"].append(spec.name)
            notes[spec.name] = f"the engine ties it to {owner}, the trainer does not"
    for spec in theirs.tensors:  # a tied tensor is sent once, in one dtype
        root = theirs.root(spec.name)
        wanted, sent = (dtypes.get(n, theirs.by_name[n].dtype) for n in (spec.name, root))
        if wanted != sent and not {spec.name, root} & {*faults["missing"], *faults["mistyped"]}:
            faults["mistyped"].append(spec.name)
            notes[spec.name] = f"tied to {root}, but the engine wants {wanted} and {sent}"
    if any(faults.values()):
        _mismatch(notes=notes, **faults)
    return dtypes


def _castable(source: str, target: str) -> bool:
    return source in CASTABLE and target in CASTABLE


def _mismatch(notes: Mapping[str, str] | None = None, **faults: list[str]) -> NoReturn:
    lines = []
    for kind, names in faults.items():
        if names:
            shown = [f"{n} ({notes[n]})" if notes and n in notes else n for n in names[:_SHOWN]]
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"  {len(names)} {kind}: {', '.join(shown)}{more}")
    kinds = ("missing", "unexpected", "misshaped", "mistyped", "duplicate", "untied")
    raise ManifestMismatchError(
        "trainer and engine disagree on the tensors; nothing was written\n" + "\n".join(lines),
        fix="load the same model on both sides, or pass rename= to refit(module, engine); "
        "error.details lists all names",
        phase="DISCOVER",
        **{kind: faults.get(kind, []) for kind in kinds},
    )
