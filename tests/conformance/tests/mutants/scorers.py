"""Mutants that score wrongly where few look: later calls, ends of rows, options, dropout."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from mutants.mutant import Mutant, breaks, registered
from rl_backends import PolicyBackend, RowLimits
from rl_backends.inputs import input_lengths
from rl_backends.tensors import NamedTensorSource
from rl_conformance.quiet import no_progress_bars
from rl_conformance.reference import MANIFEST, fp8, reference_target
from rl_conformance.reference.policy import ReferencePolicy
from rl_conformance.target import Target
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError
from rl_core.plugins.manifest import Capability

_P1 = "P1 and (completely or special or any_batch or now or layout)"


@breaks("P1", "P8", checks=f"{_P1} or P8")
class ScoresAreRemembered(ReferencePolicy):
    """Log-probs of a batch are computed once."""

    def get_logprobs(self, data: Any, *args: Any, **options: Any) -> Any:
        seen = self.__dict__.setdefault("seen", {})
        key = data["input_ids"].numpy().tobytes()
        if key not in seen:
            seen[key] = super().get_logprobs(data, *args, **options)
        return seen[key]


class _Spoiled(ReferencePolicy):
    """Some scores are 0."""

    def get_logprobs(self, data: Any, *args: Any, **options: Any) -> Any:
        scores = super().get_logprobs(data, *args, **options)
        self.spoil(scores["logprobs"], data)
        return scores

    def get_topk_logits(self, data: Any, *args: Any, **options: Any) -> Any:
        top = super().get_topk_logits(data, *args, **options)
        self.spoil_topk(top["topk_logits"])
        return top

    def spoil(self, scores: torch.Tensor, data: Any) -> None: ...
    def spoil_topk(self, logits: torch.Tensor) -> None: ...


class _Switched(ReferencePolicy):
    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        for model in (self.model, self.reference_model):
            for module in model.modules():
                self.switch(module)

    def switch(self, module: Any) -> None:
        raise NotImplementedError


@breaks("P1", checks="P1 and agree")
class SoftCapsAreDropped(_Switched):
    """Attention has no soft cap, as torch's fused one has none."""

    def switch(self, module: Any) -> None:
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None


@breaks("P1", checks="P1 and agree")
class WindowsAreWider(_Switched):
    """Layers with a window see one token more."""

    def switch(self, module: Any) -> None:
        if getattr(getattr(module, "config", None), "sliding_window", None) == 9:
            module.config.sliding_window = 10


@breaks("P1", checks="P1 and agree")
class PositionsAreOfTheLongestRow(ReferencePolicy):
    """All rows go through the model in one pass."""

    def _logits(self, model: Any, rows: Any) -> torch.Tensor:
        return self.outputs(model, rows["input_ids"]).float() / self.temperature


@breaks("P1", checks=_P1)
class LongRowsAreCutAt128(_Spoiled):
    """Tokens from the 129th on are not scored."""

    def spoil(self, scores: torch.Tensor, data: Any) -> None:
        scores[:, 128:] = 0


@breaks("P1", checks=_P1)
class APadTokenIsNoToken(_Spoiled):
    """A pad token inside a row is taken for padding."""

    def spoil(self, scores: torch.Tensor, data: Any) -> None:
        scores[data["input_ids"] == 0] = 0


@breaks("P1", checks=_P1)
class ARowEndsAtItsFirstEnd(_Spoiled):
    """What stands behind an end-of-text token is not scored."""

    def spoil(self, scores: torch.Tensor, data: Any) -> None:
        ends = (data["input_ids"] == 1).int()
        scores[(ends.cumsum(1) - ends) > 0] = 0


@breaks("P1", checks=_P1)
class TheLastTokenOfTheLongestRowIsLost(_Spoiled):
    """In a row as wide as the batch the last token has no log-prob."""

    def spoil(self, scores: torch.Tensor, data: Any) -> None:
        scores[:, -1] = 0


@breaks("P1", "P3", checks="P1 and now or P3 and started")
class ScoresAreDropped(ReferencePolicy):
    """Dropout is on while the policy and its reference score."""

    def _score(self, model: Any, data: BatchedDataDict[Any]) -> torch.Tensor:
        scoring = not torch.is_grad_enabled() and model.config.attention_dropout
        model.train(scoring or model.training)
        try:
            return super()._score(model, data)
        finally:
            model.train(not scoring and model.training)


@breaks("P3", "P1", checks="P3 and started or P1 and temperature")
class TheReferenceIsAtATemperatureOfOne(ReferencePolicy):
    """Only the policy's own log-probs have the temperature."""

    def get_reference_policy_logprobs(self, *args: Any, **options: Any) -> Any:
        temperature, self.temperature = self.temperature, 1.0
        try:
            return super().get_reference_policy_logprobs(*args, **options)
        finally:
            self.temperature = temperature


@breaks("P3", checks="P3")
class TheReferenceIsRefreshedByEvaluating(ReferencePolicy):
    """From the second reference call on the snapshot is of the policy as it is then."""

    calls = 0

    def get_reference_policy_logprobs(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            self.reference_model.load_state_dict(self.model.state_dict())
        return super().get_reference_policy_logprobs(*args, **options)


@breaks("P3", checks="P3")
class OneReferenceForAll(ReferencePolicy):
    """Policies in one process share the reference of the last that trained."""

    shared: Any = None

    def take_step(self, lr: float, scale: float) -> None:
        super().take_step(lr, scale)
        if type(self).shared is not None and type(self).shared is not self:
            self.reference_model.load_state_dict(self.model.state_dict())
        type(self).shared = self


@breaks("P3", checks="P3 and (anywhere or started)")
class ACopyIsThePolicyItself(ReferencePolicy):
    """With reference="copy" no copy is made."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        if config.get("reference") == "copy":
            self.reference_model = self.model


@breaks("P3", checks="P3 and (anywhere or started)")
class ACopyForgetsTheTemperature(ReferencePolicy):
    """With reference="copy" the reference is at a temperature of 1."""

    @contextmanager
    def reference(self) -> Generator[None]:
        own = self.temperature
        self.temperature = 1.0 if self.config.get("reference") == "copy" else own
        with super().reference():
            try:
                yield
            finally:
                self.temperature = own


@breaks("P1", checks="P1 and (out_of_range or special)")
class TokensAreTakenModulo(ReferencePolicy):
    """A token id that the model does not have is taken for another one."""

    def get_logprobs(self, data: Any, *args: Any, **options: Any) -> Any:
        ids = data["input_ids"] % self.limits.vocab_size
        return super().get_logprobs(BatchedDataDict({**data, "input_ids": ids}), *args, **options)


@breaks("P2", checks="P2 and padding")
class FillerMustBeTokens(ReferencePolicy):
    """Padding with -100, as labels have it, is refused."""

    def get_logprobs(self, data: Any, *args: Any, **options: Any) -> Any:
        if (data["input_ids"] < 0).any():
            raise DataError("a token id is negative", fix="pad with the pad token")
        return super().get_logprobs(data, *args, **options)


@breaks("P2", checks="P2")
class RowsComeBackByLength(ReferencePolicy):
    """Rows that were sorted to be dealt are not put back, where their number is no multiple."""

    def __init__(self, *args: Any, dynamic_batching: Any = None, **config: Any) -> None:
        super().__init__(*args, **config)
        self.sorts = bool(dynamic_batching)

    def get_logprobs(self, data: Any, *args: Any, **options: Any) -> Any:
        if self.sorts and data.size > 8:
            order = input_lengths(data).argsort(stable=True)
            data = data.select_indices(order)
        return super().get_logprobs(data, *args, **options)


@breaks("P2", checks="P2")
class AShortLastMicrobatchIsDropped(ReferencePolicy):
    """Rows beyond the last whole microbatch have no log-probs."""

    def get_logprobs(
        self, data: Any, micro_batch_size: int | None = None, timer: Any = None
    ) -> Any:
        scores = super().get_logprobs(data, micro_batch_size)
        if micro_batch_size and data.size > micro_batch_size:
            scores["logprobs"][data.size // micro_batch_size * micro_batch_size :] = 0
        return scores


@breaks("P4", checks="P4")
class TopKIsOfTheStart(ReferencePolicy):
    """Top-k logits are those of the weights that were loaded."""

    def get_topk_logits(self, *args: Any, **options: Any) -> Any:
        model, self.model = self.model, self.reference_model
        try:
            return super().get_topk_logits(*args, **options)
        finally:
            self.model = model


@breaks("P4", checks="P4")
class TheLastPositionHasNoTopK(_Spoiled):
    """Where the last token of the widest row is predicted stands nothing."""

    def spoil_topk(self, logits: torch.Tensor) -> None:
        logits[:, -1:] = 0


@breaks("P4", checks="P4")
class TopKIsWithoutTheTemperature(_Spoiled):
    """Top-k logits are the model's own, whatever the log-probs are divided by."""

    def spoil_topk(self, logits: torch.Tensor) -> None:
        logits *= self.temperature


@breaks("P3", checks="P3")
class ATrainedPolicysReferenceIsPlain(ReferencePolicy):
    """Once there were steps, the reference forgets the temperature."""

    @contextmanager
    def reference(self) -> Generator[None]:
        own, self.temperature = self.temperature, 1.0 if self.steps else self.temperature
        with super().reference():
            try:
                yield
            finally:
                self.temperature = own


@breaks("P4", checks="P4")
class KIsBounded(ReferencePolicy):
    """More than 64 are never returned."""

    def get_topk_logits(self, data: Any, k: int, *args: Any, **options: Any) -> Any:
        return super().get_topk_logits(data, min(k, 64), *args, **options)


@breaks("P12", checks="P12")
class ThePercentileIsTheLargest(ReferencePolicy):
    """The percentile is taken and not used."""

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().calibrate_qkv_fp8_scales(*args, **{**kwargs, "percentile": 100.0})


@breaks("P12", checks="P12 and (refused or defaults)")
class NoMarginIsTheUsualOne(ReferencePolicy):
    """A margin of 0 is taken for none that was given."""

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        margin = kwargs.get("margin", 0) or 1.05
        return super().calibrate_qkv_fp8_scales(*args, **{**kwargs, "margin": margin})


@breaks("P12", checks="P12 and not no_step")
class QueriesAreNeverScaled(ReferencePolicy):
    """include_q is taken and not used."""

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().calibrate_qkv_fp8_scales(*args, **{**kwargs, "include_q": False})


@breaks("P12", checks="P12 and not no_step")
class PaddingIsObserved(ReferencePolicy):
    """What stands behind a row is calibrated with."""

    def calibrate_qkv_fp8_scales(self, data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = torch.full((data.size,), data["input_ids"].shape[1])
        data = BatchedDataDict({**data, "input_lengths": whole})
        return super().calibrate_qkv_fp8_scales(data, *args, **kwargs)


@breaks("P12", checks="P12 and not no_step")
def keys_are_seen_before_their_rotation() -> AbstractContextManager[Any]:
    """The keys that are calibrated are not those that a cache holds."""
    return mock.patch.object(fp8, "_rotated", lambda heads, cos, sin: heads)


@breaks("P12", checks="P12")
class ScalesAreOfTheStart(ReferencePolicy):
    """Calibration looks at the weights that were loaded."""

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        model, self.model = self.model, self.reference_model
        try:
            return super().calibrate_qkv_fp8_scales(*args, **kwargs)
        finally:
            self.model = model


# -- rewards -----------------------------------------------------------------------------------


class RewardPolicy(ReferencePolicy):
    """A reference that scores and does nothing else: what mutants of P13 are made of."""

    def __init__(self, model_name: str, **_: Any) -> None:
        from transformers import AutoModelForSequenceClassification

        with no_progress_bars():
            self.classifier: Any = AutoModelForSequenceClassification.from_pretrained(model_name)
        self.classifier.eval()
        PolicyBackend.__init__(self, {}, RowLimits(self.classifier.config.vocab_size, None))

    def score(self, data: Any, micro_batch_size: int | None = None) -> Any:
        with torch.no_grad():
            scores = [
                self.of_row(row[None, :length], micro_batch_size)
                for row, length in zip(data["input_ids"], input_lengths(data).tolist(), strict=True)
            ]
        return BatchedDataDict({"scores": torch.stack(scores)})

    def of_row(self, row: torch.Tensor, size: int | None) -> torch.Tensor:
        """The score of one row ``[1, S]`` without padding."""
        hidden = self.classifier.model(row).last_hidden_state[0, -1]
        score: torch.Tensor = self.classifier.score(hidden)[0].float()
        return score

    def weight_source(self) -> Any:
        return NamedTensorSource(self.classifier.state_dict(keep_vars=True))


def _rewarding(policy: type[RewardPolicy]) -> Any:
    def make() -> Target:
        declared = {**MANIFEST.capabilities["policy"], "score": Capability("full")}
        capabilities = {**MANIFEST.capabilities, "policy": declared}
        return reference_target(
            manifest=replace(MANIFEST, capabilities=capabilities), make_policy=policy.from_config
        )

    return make


class _PadEndsARow(RewardPolicy):
    def of_row(self, row: torch.Tensor, size: int | None) -> torch.Tensor:
        real = (row[0] != 0).nonzero()[-1:] + 1
        return super().of_row(row[:, : int(real.max()) if len(real) else 1], size)


class _RewardsDrop(RewardPolicy):
    def of_row(self, row: torch.Tensor, size: int | None) -> torch.Tensor:
        self.classifier.train()
        return super().of_row(row, size)


class _RewardsAreOfBatches(RewardPolicy):
    def score(self, data: Any, micro_batch_size: int | None = None) -> Any:
        scores = super().score(data, micro_batch_size)
        whole = data.size // micro_batch_size * micro_batch_size if micro_batch_size else data.size
        scores["scores"][whole:] = 0
        return scores


registered += [
    Mutant(name, bug, ("P13",), _rewarding(policy), checks="P13", module=__name__)
    for name, bug, policy in (
        ("APadTokenEndsAReward", "A row ending in a pad token is scored before it.", _PadEndsARow),
        ("RewardsDrop", "Dropout is on while rows are scored.", _RewardsDrop),
        (
            "TheRestHasNoReward",
            "Rows beyond the last whole microbatch get 0.",
            _RewardsAreOfBatches,
        ),
    )
]
