"""What the ranks and engines of a refit agree on: the parts, who gives each one, who keeps it."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any

from rl_core.errors import ManifestMismatchError
from rl_core.weights.data.parts import Partition, check_layout, union, without

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.data.parts import Layout

__all__ = ["Agreement"]


class Agreement:
    """Of one refit, and of those after it in which nobody has other pieces.

    Args:
        wire: The tensors, in the dtypes that travel.
        layouts: What each rank of the trainer has.
        kept: What each engine keeps, by its id.
        hosts: Of the ranks and engines.
        names: What errors call the ranks and the engines.
        compared: Copies of a part are compared before they count.

    Attributes:
        parts: Each of them is in some rank, and in some engine.
        keeps: For each engine, a byte for each part, 1 for those that it keeps.
        takes: For each rank and engine, 1 for those that the engine takes from there.
        copies: For each rank, 1 for those that another rank has, too; 0s if none are compared.

    Raises:
        RefitProtocolError: Somebody has boxes that are in no tensor.
        ManifestMismatchError: A part is in no engine, or in no rank.
    """

    def __init__(
        self,
        wire: WeightManifest,
        layouts: Mapping[int, Layout],
        kept: Mapping[str, Layout],
        hosts: Mapping[Any, str],
        names: Mapping[Any, str],
        compared: bool,
    ) -> None:
        every: dict[Any, Layout] = {**layouts, **kept}
        for peer, layout in every.items():
            check_layout(wire, layout, names[peer])
        self.parts = parts = Partition.of(wire, every.values())
        self.keeps = {peer: parts.mask(layout) for peer, layout in kept.items()}
        engines = {peer: (hosts[peer], keeps) for peer, keeps in self.keeps.items()}
        self.takes = parts.shared_out(layouts, engines, hosts, compared=compared)
        have = {rank: int.from_bytes(parts.mask(layout)) for rank, layout in layouts.items()}
        once = twice = 0
        for mask in have.values() if compared else ():
            twice |= once & mask
            once |= mask
        count = len(parts.manifest.owned)
        self.copies = {rank: (mask & twice).to_bytes(count) for rank, mask in have.items()}
        owned, wanted = parts.manifest.owned, union(self.keeps.values())
        if lost := [part.name for part, keep in zip(owned, wanted, strict=True) if not keep]:
            raise ManifestMismatchError(
                f"no engine keeps {lost[0]} ({len(lost)} parts of tensors)",
                fix="make the pieces of the weight sinks cover every tensor",
                missing=lost,
            )
        for peer, keeps in self.keeps.items():
            given = union(its[peer] for its in self.takes.values())
            if lacking := [part.name for part in compress(owned, without(keeps, given))]:
                raise ManifestMismatchError(
                    f"the trainer has no {lacking[0]}, which {names[peer]} keeps "
                    f"({len(lacking)} parts of tensors are missing)",
                    fix="make the pieces of the weight source cover every tensor",
                    missing=lacking,
                )
