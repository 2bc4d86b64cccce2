"""Mutants that serve adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mutants.mutant import breaks
from rl_conformance.reference.adapters import ReferenceAdapters
from rl_conformance.reference.generation import ReferenceGeneration


def _exchanged(name: str, one: str, other: str) -> str:
    """A name with two parts of it in each other's place."""
    return "\0".join(part.replace(other, one) for part in name.split(one)).replace("\0", other)


@breaks("R17", checks="R17")
class TheOldAdapterServesOn(ReferenceGeneration):
    """Rows get the adapter of the version before."""

    class adapters_class(ReferenceAdapters):  # noqa: N801 - takes the place of a class
        def used(self, name: str) -> torch.Tensor:
            return self.loaded.get(3 - self.serving, self.loaded[self.serving])[name]


@breaks("R17", checks="R17")
class AAndBAreOfAnotherLayer(ReferenceGeneration):
    """The adapter of one layer is computed in another, and read back as it came."""

    class adapters_class(ReferenceAdapters):  # noqa: N801 - takes the place of a class
        def used(self, name: str) -> torch.Tensor:
            return super().used(_exchanged(name, ".layers.0.", ".layers.1."))


@breaks("R17", checks="R17")
class TwoModulesAreExchanged(ReferenceGeneration):
    """Keys get the adapter of values."""

    class adapters_class(ReferenceAdapters):  # noqa: N801 - takes the place of a class
        def used(self, name: str) -> torch.Tensor:
            return super().used(_exchanged(name, "k_proj", "v_proj"))


@breaks("R17", checks="R17")
class AdaptersAreScaledAgain(ReferenceGeneration):
    """The engine multiplies by a scale that is in B already."""

    class adapters_class(ReferenceAdapters):  # noqa: N801 - takes the place of a class
        def used(self, name: str) -> torch.Tensor:
            return super().used(name) * (2 if "lora_B" in name else 1)


@breaks("R17", checks="R17")
class AFailedAdapterServes(ReferenceGeneration):
    """A refit that fails after the adapter was loaded leaves it in service."""

    class adapters_class(ReferenceAdapters):  # noqa: N801 - takes the place of a class
        def fail(self) -> None:
            pass


@breaks("R17", checks="R17")
class TheNewAdapterTakesThePlaceOfTheOld(ReferenceGeneration):
    """There is one adapter, which a refit overwrites while it serves."""

    class adapters_class(ReferenceAdapters):  # noqa: N801 - takes the place of a class
        def load(self, adapter: int, tensors: Mapping[str, torch.Tensor]) -> None:
            self.loaded = {number: dict(tensors) for number in (1, 2)}

        def unload(self, adapter: int) -> None:
            pass
