"""How a model is spread over the ranks of a trainer or of engines.

Tensor-parallel ranks are neighbours, then those of FSDP, then copies (data-parallel ranks), then
pipeline stages, then replicas of all that. So megatron-core numbers them by default.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from rl_cli.planning.models import EMBEDDING
from rl_cli.planning.moves import Shard, Stack
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_cli.planning.families import Tensors
    from rl_cli.planning.models import Model
    from rl_core.interfaces import Box

__all__ = ["Shape"]

_WORD = re.compile(r"(tp|pp|dp|ep|etp|fsdp|x)([1-9][0-9]*)")
#: Rows of a vocabulary on each rank are a multiple of it.
_VOCABULARY_MULTIPLE = 8
_MOST_RANKS = 16_384


@dataclass(frozen=True)
class Shape:
    """Sizes of the dimensions in which a model is spread.

    Attributes:
        option: What errors call it.
        text: As it was written.
        tp: Ranks that share every layer.
        pp: Stages, which have equally many layers, or one more.
        dp: Copies.
        fsdp: Ranks over which the first dimension of each tensor is cut.
        ep: Ranks over which the experts are dealt.
        etp: Ranks that share every expert.
        x: Replicas.
    """

    option: str
    text: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    etp: int = 1
    x: int = 1

    @classmethod
    def parse(cls, text: str, option: str, *, whole_experts: bool = False) -> Shape:
        """Reads a shape.

        Args:
            text: Such as ``tp8pp8dp2`` or ``fsdp64``.
            option: What errors call it.
            whole_experts: Whether ``ep`` without ``etp`` leaves experts whole, as vLLM does;
                otherwise, as megatron-core does, tensor parallelism cuts them as well.

        Raises:
            ConfigError: It cannot be read, or its sizes do not fit each other.
        """
        words = _WORD.findall(text)
        sizes = {key: int(size) for key, size in words}
        wrong = None
        if not words or "".join(f"{key}{size}" for key, size in words) != text:
            wrong = "is no shape"
        elif len(sizes) < len(words):
            wrong = "has a size twice"
        elif "fsdp" in sizes and "ep" in sizes:
            wrong = "has both fsdp and ep, which the planner does not know"
        elif "etp" in sizes and "ep" not in sizes:
            wrong = "has etp without ep"
        else:
            tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
            etp = sizes.setdefault("etp", 1 if whole_experts and "ep" in sizes else tp)
            if "dp" not in sizes and ep * etp > tp:
                sizes["dp"] = -(-ep * etp // tp)  # as many copies as the experts need
            if (ranks := tp * sizes.get("dp", 1)) % (ep * etp):
                wrong = f"has {ranks} ranks in a stage, which ep {ep} x etp {etp} does not divide"
            elif (ranks := prod(sizes.values()) // (ep * etp)) > _MOST_RANKS:
                wrong = f"has {ranks:,} ranks; at most {_MOST_RANKS:,} can be planned"
        if wrong:
            raise ConfigError(
                f"{option}: {text!r} {wrong}",
                fix="write the sizes one after another, each once: tp8pp8dp2, fsdp64, tp2ep4, or "
                "tp8x16 for 16 replicas of tp8",
                key=option,
            )
        return cls(option, text, **sizes)

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tp * self.fsdp * self.dp * self.pp * self.x

    def check(self, model: Model) -> None:
        """Compares the sizes with those of a model.

        Raises:
            ConfigError: They do not divide what they should cut.
        """
        experts = max(each.experts for each in model.tensors)
        wrong = []
        if self.pp > model.layers:
            wrong.append(f"pp {self.pp} is more than the {model.layers} layers")
        if self.ep > max(1, experts):
            wrong.append(f"ep {self.ep} is more than the {experts} experts")
        for each in model.tensors:
            key, size = ("etp", self.etp) if each.experts else ("tp", self.tp)
            repeats = each.repeats and size % each.units == 0
            if each.cut is not None and each.units and each.units % size and not repeats:
                wrong.append(f"{key} {size} does not divide the {each.units} parts of {each.name}")
        if wrong:
            raise ConfigError(
                f"{self.option}: {self.text!r} does not fit the model: {wrong[0]}",
                fix="choose a smaller size, or one that divides",
                key=self.option,
            )

    def stacks(self, model: Model) -> Iterator[Stack]:
        """What the ranks have of a model.

        Yields:
            For each name of tensors their distinct shards, with the ranks that have them.
        """
        self.check(model)
        width = self.tp * self.fsdp * self.dp
        for each in model.tensors:
            held: dict[Box, list[int]] = defaultdict(list)
            for stage in range(self.pp):
                first, after = (model.layers * n // self.pp for n in (stage, stage + 1))
                begin, end = max(first, each.layers[0]), min(after, each.layers[1])
                output = model.tied and stage == self.pp - 1 and each.name == EMBEDDING
                if begin >= end and not output:
                    continue
                layers = ((begin, end),) if "{}" in each.name else ()
                for place in range(width):
                    if box := self.box_at(place, each):
                        ranks = held[(*layers, *box)]
                        ranks += ((n * self.pp + stage) * width + place for n in range(self.x))
            shards = [Shard(box, tuple(sorted(ranks))) for box, ranks in held.items()]
            yield Stack(each.name, each.shape, model.dtype, shards)

    def box_at(self, place: int, tensors: Tensors) -> Box:
        """What the ranks at a place of a stage have of tensors, after the layers; () if nothing."""
        box = [(0, size) for size in tensors.shape]
        count = self.etp if tensors.experts else self.tp
        if tensors.cut is not None:
            size, number = tensors.shape[tensors.cut], place % count
            if tensors.units:
                parts = min(count, tensors.units)
                number, each = number * parts // count, size // parts
            else:
                each = -(-size // (_VOCABULARY_MULTIPLE * count)) * _VOCABULARY_MULTIPLE
            box[tensors.cut] = (number * each, min((number + 1) * each, size))
        if tensors.experts:
            number = place // self.etp % self.ep
            first, after = (tensors.experts * n // self.ep for n in (number, number + 1))
            box.insert(0, (first, after))
        # As torch.chunk cuts; trainers with FSDP have one tensor of all experts.
        (first, after), number = box[0], place // self.tp % self.fsdp
        each = -(-(after - first) // self.fsdp)
        box[0] = (first + number * each, min(after, first + (number + 1) * each))
        return tuple(box) if all(first < after for first, after in box) else ()
