"""Mutants that serve adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mutants.mutant import breaks
from rl_conformance.reference.adapters import ReferenceAdapters


def _exchanged(name: str, one: str, other: str) -> str:
    """A name with two parts of it in each other's place."""
    return "\0".join(part.replace(other, one) for part in name.split(one)).replace("\0", other)


@breaks("R17", checks="R17")
class TheOldAdapterServesOn(ReferenceAdapters):
    """Rows get the adapter of the version before."""

    def used(self, name: str) -> torch.Tensor:
        return self.loaded.get(3 - self.serving, self.loaded[self.serving])[name]


@breaks("R17", checks="R17")
class AAndBAreOfAnotherLayer(ReferenceAdapters):
    """The adapter of one layer is computed in another, and read back as it came."""

    def used(self, name: str) -> torch.Tensor:
        return super().used(_exchanged(name, ".layers.0.", ".layers.1."))


@breaks("R17", checks="R17")
class TwoModulesAreExchanged(ReferenceAdapters):
    """Keys get the adapter of values."""

    def used(self, name: str) -> torch.Tensor:
        return super().used(_exchanged(name, "k_proj", "v_proj"))


@breaks("R17", checks="R17")
class AdaptersAreScaledAgain(ReferenceAdapters):
    """The engine multiplies by a scale that is in B already."""

    def used(self, name: str) -> torch.Tensor:
        return super().used(name) * (2 if "lora_B" in name else 1)


@breaks("R17", checks="R17")
class AFailedAdapterServes(ReferenceAdapters):
    """A refit that fails after the adapter was loaded leaves it in service."""

    def fail(self) -> None:
        pass


@breaks("R17", checks="R17")
class TheNewAdapterTakesThePlaceOfTheOld(ReferenceAdapters):
    """There is one adapter, which a refit overwrites while it serves."""

    def load(self, adapter: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.loaded = {number: dict(tensors) for number in (1, 2)}

    def unload(self, adapter: int) -> None:
        pass
