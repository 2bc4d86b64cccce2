"""Scales for an FP8 key/value cache, from the keys and values that attention sees.

Keys are observed where a cache would hold them: after their norm and their rotation. Magnitudes are
counted in bins of the float32 format, 1/512 wide relatively, so the result does not depend on how
rows were split and is never below the percentile.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import DataError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = ["Calibration", "check_calibration"]

#: Largest finite value of float8_e4m3fn.
E4M3_MAX = 448.0
#: Mantissa bits of a float32 that a bin does not tell apart.
COARSE_BITS = 14
BINS = 1 << (31 - COARSE_BITS)


def check_calibration(rows: int, percentile: float, margin: float) -> None:
    """Checks the arguments of a calibration.

    Args:
        rows: To observe.
        percentile: In (0, 100].
        margin: Above 0.

    Raises:
        DataError: There is no row, or a number is out of range.
    """
    if not (0 < percentile <= 100 and margin > 0):
        raise DataError(
            f"percentile must be above 0 and at most 100, margin above 0; got {percentile} and "
            f"{margin}",
            fix="use a percentile such as 99.9 and a margin such as 1.05",
        )
    if not rows:
        raise DataError("there are no rows to observe", fix="pass at least one row")


class Calibration:
    """Observes the attention of every layer.

    Args:
        include_q: Also observe the queries.

    Attributes:
        counts: ``[BINS]`` int64 on the CPU by layer and kind (``"q"``, ``"k"``, ``"v"``): how many
            magnitudes are in each bin. Ranks that saw other rows, heads or layers :meth:`add` up.
    """

    def __init__(self, *, include_q: bool = False) -> None:
        self._kinds = ("q", "k", "v") if include_q else ("k", "v")
        self.counts: dict[tuple[int, str], torch.Tensor] = {}

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """:meth:`observe` for a module that knows its ``layer_idx``."""
        layer: Any = module.layer_idx
        self.observe(layer, query, key, value)

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Counts the magnitudes of one layer's tensors, of any shape; those of padding count."""
        seen = {"q": query, "k": key, "v": value}
        for kind in self._kinds:
            bits = seen[kind].detach().float().abs().contiguous().view(torch.int32)
            counts = torch.bincount((bits >> COARSE_BITS).flatten(), minlength=BINS).cpu()
            self.add({(layer, kind): counts})

    def add(self, counts: Mapping[tuple[int, str], torch.Tensor]) -> None:
        """Adds what was counted elsewhere, such as another rank's :attr:`counts`."""
        for which, more in counts.items():
            self.counts[which] = self.counts[which] + more if which in self.counts else more

    def scales(self, percentile: float, margin: float) -> dict[str, Any]:
        """The factor that brings ``percentile`` of the magnitudes, times ``margin``, to 448.

        Returns:
            ``{"format": "e4m3", "layers": {"layer_0": {"k_scale": ..., "v_scale": ...}, ...}}``;
            a cache stores ``x / scale``.

        Raises:
            TrainingError: A key or value is not finite.
        """
        layers: dict[str, dict[str, float]] = {}
        for (layer, kind), counts in sorted(self.counts.items()):
            below = counts.cumsum(0)
            wanted = max(1, math.ceil(int(below[-1]) * percentile / 100))
            bin_ = int(torch.searchsorted(below, wanted))
            # The upper edge of the bin that holds the percentile.
            edge = torch.tensor((bin_ + 1) << COARSE_BITS, dtype=torch.int32)
            largest = float(edge.view(torch.float32))
            if not math.isfinite(largest):
                raise TrainingError(
                    f"layer {layer}: {kind} has values that are not finite",
                    fix="check the weights, and calibrate with fewer rows to find the one that "
                    "causes them",
                    layer=layer,
                )
            smallest = torch.finfo(torch.float32).tiny
            scale = max(largest * margin / E4M3_MAX, smallest)
            layers.setdefault(f"layer_{layer}", {})[f"{kind}_scale"] = scale
        return {"format": "e4m3", "layers": layers}
