"""Mutants that train."""

from __future__ import annotations

from typing import Any

import torch

from mutants.mutant import breaks
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.batch import BatchedDataDict


@breaks("P3")
class ReferenceTrainsAlong(ReferencePolicy):
    """The reference is the policy itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference_model = self.model


@breaks("P1", "P5", "P6", "P7")
class ScoresTheNextToken(ReferencePolicy):
    """Entry t scores token t+1."""

    def _score(self, model: Any, data: BatchedDataDict[Any]) -> torch.Tensor:
        return super()._score(model, data).roll(-1, 1)


@breaks("P6")
class EvalModeTrains(ReferencePolicy):
    """eval_mode is not looked at."""

    def train(
        self, data: Any, loss_fn: Any, eval_mode: bool = False, **sizes: Any
    ) -> dict[str, Any]:
        return super().train(data, loss_fn, False, **sizes)


@breaks("P5")
class MicrobatchesAreAveraged(ReferencePolicy):
    """Each microbatch is normalised by its own tokens."""

    def accumulate(self, parts: Any, *args: Any, **kwargs: Any) -> None:
        total = sum(part["token_mask"][:, 1:].sum() for part in parts)
        for part in parts:
            own = part["token_mask"][:, 1:].sum().clamp(min=1)
            part["token_mask"] = part["token_mask"] * total / own / len(parts)
        super().accumulate(parts, *args, **kwargs)


@breaks("P7", "P5")
class NanReachesTheWeights(ReferencePolicy):
    """A gradient that is not finite is stepped with."""

    def gradient_norm(self) -> float:
        super().gradient_norm()
        return 1.0


@breaks("P2")
class FillerIsSeen(ReferencePolicy):
    """What stands behind a row has an influence on its scores."""

    def _score(self, model: Any, data: BatchedDataDict[Any]) -> torch.Tensor:
        scores, lengths = super()._score(model, data), data["input_lengths"]
        behind = torch.arange(scores.shape[1]) >= lengths[:, None]
        seen = (data["input_ids"] * behind).sum(1, keepdim=True) / 100
        return torch.where(scores == 0, scores, scores - seen)


@breaks("P4")
class TopKBelongsToTheTokenItself(ReferencePolicy):
    """Position t holds the logits for token t."""

    def get_topk_logits(
        self, data: Any, k: int, micro_batch_size: int | None = None, timer: Any = None
    ) -> Any:
        top = super().get_topk_logits(data, k, micro_batch_size)
        return BatchedDataDict({name: value.roll(1, 1) for name, value in top.items()})


@breaks("P8")
class LossesAreClimbed(ReferencePolicy):
    """The step goes up the gradient."""

    def gradient_norm(self) -> float:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.neg_()
        return super().gradient_norm()


@breaks("P7", checks="P7 and fails_midway")
class AFailedStepIsGoneOnWith(ReferencePolicy):
    """An error in the midst of a step is raised, and forgotten."""

    def train(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return super().train(*args, **kwargs)
        finally:
            self.changes.torn = ""


@breaks("P9", checks="P9 and (bit_equal or exported or missing)")
class TheOptimizerStartsAnew(ReferencePolicy):
    """Resuming brings the weights back, and not the optimizer's moments."""

    def load_checkpoint(self, path: Any) -> None:
        super().load_checkpoint(path)
        self.optimizer.state.clear()


@breaks("P10")
class FinishingForgetsTheMoments(ReferencePolicy):
    """finish_training drops the optimizer's state for good."""

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.state.clear()


@breaks("P11")
class GeneratesWhatItDoesNotOffer(ReferencePolicy):
    """policy.generate is declared as unsupported, and answers."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        return BatchedDataDict(data)


@breaks("P12")
class TheMarginIsLost(ReferencePolicy):
    """Scales are those of a margin of 1."""

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().calibrate_qkv_fp8_scales(*args, **{**kwargs, "margin": 1.0})


@breaks("P13")
class ScoresWithoutAHead(ReferencePolicy):
    """score is declared as unsupported, and answers."""

    def score(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return BatchedDataDict({"scores": torch.zeros(data.size)})
