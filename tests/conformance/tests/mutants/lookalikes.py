"""Mutants that a few short rows do not show: many rows do, long or similar ones, late readers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mutants.mutant import breaks
from rl_backends import Row
from rl_backends.policy.base import PolicyBackend
from rl_conformance.reference.generation import ReferenceGeneration, ReferenceRows
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.batch import BatchedDataDict
from rl_core.interfaces import LossInputType

#: Tokens after which a prompt has a whole block in a cache.
_BLOCK = 16
#: Rows from which on something else is done.
_MANY = 200


class _Kept(ReferenceGeneration):
    """Logits of prefixes of at least a block are kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[tuple[int, ...], torch.Tensor] = {}

    def key(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """What a prefix is kept under."""
        return prefix

    def next_logits(self, prefixes: set[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        found: dict[tuple[int, ...], torch.Tensor] = {}
        for prefix in sorted(prefixes):
            if len(prefix) < _BLOCK or self.key(prefix) not in self.kept:
                found |= super().next_logits({prefix})
                self.kept.setdefault(self.key(prefix), found[prefix])
            if len(prefix) >= _BLOCK:
                found[prefix] = self.kept[self.key(prefix)]
        return found

    def invalidate_kv_cache(self) -> bool:
        self.kept.clear()
        return True


@breaks("G8", checks="G8 and (similar or batch_order)")
class APrefixIsItsLengthAndItsEnd(_Kept):
    """A cache of prefixes looks at their length and their last 8 tokens."""

    def key(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        return (len(prefix), *prefix[-8:])


@breaks("R10", checks="R10 and (outlive or moves)")
class WholeBlocksOutliveARefit(_Kept):
    """A refit empties the cache but for whole blocks."""

    def invalidate_kv_cache(self) -> bool:
        return True


@breaks("G12", checks="G12")
class ManyRowsAreRounded(ReferenceGeneration):
    """The logits of many rows are made in bfloat16."""

    def next_logits(self, prefixes: set[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        found = super().next_logits(prefixes)
        if self.rows >= _MANY:
            found = {ids: logits.bfloat16().double() for ids, logits in found.items()}
        return found

    def generate(self, data: Any, greedy: bool = False) -> Any:
        self.rows = len(data["input_ids"])
        return super().generate(data, greedy)


@breaks("G12", checks="G12")
class APlaceKeepsWhatItsLastRowHad(ReferenceRows):
    """Rows that wait for the place of another attend to a token of it."""

    def submit(self, rows: Sequence[Row]) -> None:
        super().submit(rows)
        for row in list(self.rows.values())[_MANY:]:
            row.ids[0] = row.ids[-1]


@breaks("P2", checks="P1 or P2")
class ManyRowsAreScoredInBfloat16(ReferencePolicy):
    """The logits of a large microbatch are made in bfloat16."""

    def forward(self, rows: BatchedDataDict[Any], wanted: LossInputType) -> torch.Tensor:
        scores = super().forward(rows, wanted)
        return scores.bfloat16().float() if len(scores) >= _MANY else scores


@breaks("G1", checks="G1 or G2")
class AMaskEndsBeforePadding(ReferenceGeneration):
    """Of a mask's rows, last tokens that are the pad token are left out."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        if "input_lengths" not in data and "attention_mask" in data:
            ids, mask = data["input_ids"], data["attention_mask"].bool()
            behind = (~mask | (ids == self.facts.pad_token_id)).flip(1).cummin(1).values.flip(1)
            data = BatchedDataDict({**data, "attention_mask": mask & ~behind})
        return super().generate(data, greedy)


@breaks("G15", checks="G15")
class RowsSayTheVersionAtWhichTheyAreRead(ReferenceGeneration):
    """A streamed row's version is asked for when it is handed out."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        async for index, row in super().generate_async(data, greedy):
            row["weights_version"] = torch.tensor([self.weights_version])
            yield index, row


@breaks("G16", checks="G16")
class AStreamedRowWithoutRoomHasStopped(ReferenceGeneration):
    """A prompt that fills the context is not truncated where it is streamed."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        async for index, row in super().generate_async(data, greedy):
            row["truncated"] &= row["generation_lengths"] > 0
            yield index, row


@breaks("R1", checks="R1 and during_sleep or G13 and keeps")
class ASleeperForgetsARefit(ReferenceGeneration):
    """Waking brings back what was there when the weights fell asleep."""

    asleep: dict[str, torch.Tensor] | None = None

    def on_sleep(self, tags: frozenset[str]) -> None:
        if "weights" in tags:
            self.asleep = {name: t.clone() for name, t in self.model.state_dict().items()}

    def on_wake(self, tags: frozenset[str]) -> None:
        if "weights" in tags and self.asleep is not None:
            self.model.load_state_dict(self.asleep)


@breaks("P9", checks="P9 and (resumed_again or narrow)")
class MasterWeightsAreNotSaved(ReferencePolicy):
    """A policy in bfloat16 learns in float32, and resumes from what it exports."""

    narrow = False

    def __init__(self, model_name: str, *, torch_dtype: str = "float32", **config: Any) -> None:
        self.narrow = torch_dtype == "bfloat16"
        super().__init__(model_name, torch_dtype="float32", **config)

    def read_checkpoint(self, directory: Path) -> Callable[[], None]:
        install = super().read_checkpoint(directory)

        def rounded() -> None:
            install()
            for parameter in self.model.parameters() if self.narrow else ():
                parameter.data = parameter.data.bfloat16().float()

        return rounded


@breaks("P5", "P7", checks="P5 and same_data or P7 and masked_data")
def every_row_counts_as_a_sequence() -> AbstractContextManager[Any]:
    """Rows with sample_mask 0 are among those that losses of sequences divide by."""
    honest = PolicyBackend._loss

    def counted(policy: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        honest_values = policy.reported_values

        def all_rows(value: Any) -> Any:
            if isinstance(value, list) and len(value) == 2:
                value = [float(len(rows["sample_mask"])), value[1]]
            return honest_values(value)

        with mock.patch.object(policy, "reported_values", all_rows):
            return honest(policy, rows, *args, **kwargs)

    return mock.patch.object(PolicyBackend, "_loss", counted)
