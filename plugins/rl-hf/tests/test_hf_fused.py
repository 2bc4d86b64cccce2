"""Where a fused kernel takes the place of the model's own head, and where it must not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from hidden_cases import KINDS, VOCABULARY, agree, both, half, made, rows
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from rl_hf import fused
from rl_hf.forward import Forward
from rl_hf.fused import fused_head, fused_kernel
from rl_hf.hidden import find_body
from rl_hf.lora import add_adapters

PLAIN = {"llama", "qwen2", "gpt2", "opt", "mamba", "qwen2_moe"}


class KernelDouble:
    """A test double for Liger's kernel, which runs on CUDA."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, weight: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        self.calls += 1
        logits = nn.functional.linear(hidden, weight).float()
        return nn.functional.cross_entropy(logits, targets, reduction="none")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> KernelDouble:
    double = KernelDouble()
    monkeypatch.setattr("rl_hf.fused.fused_kernel", lambda _: double)
    return double


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_the_place_of_a_head_that_is_one_matrix_and_of_no_other(tmp_path, kernel, kind):
    model = made(tmp_path, kind, **KINDS[kind])
    for counts in (None, half(rows())):
        agree(both(model, model, counts), 1e-4 if kind == "gpt2" else 1e-5)
    assert kernel.calls == (2 if kind in PLAIN else 0)


def test_a_temperature_is_the_models_own_way(tmp_path, kernel):
    model = made(tmp_path, "llama")
    agree(both(model, model, None, temperature=0.7))
    assert kernel.calls == 0


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]])
def test_adapters_on_the_head_are_more_than_a_matrix(tmp_path, kernel, targets):
    inner = made(tmp_path, "llama")
    model = add_adapters(inner, {"rank": 4, "target_modules": targets}, seed=0).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    agree(both(model, inner, None))
    assert kernel.calls == ("lm_head" not in targets)


def _hooked(layer: Any) -> Callable[[], None]:
    return layer.register_forward_hook(lambda _m, _a, output: output * 2).remove


def _hooked_before(layer: Any) -> Callable[[], None]:
    return layer.register_forward_pre_hook(lambda _m, args: (args[0] * 2,)).remove


def _replaced(layer: Any) -> Callable[[], None]:
    layer.forward = lambda states: nn.functional.linear(states, layer.weight) * 2
    return lambda: delattr(layer, "forward")


@pytest.mark.parametrize("change", [_hooked, _hooked_before, _replaced])
def test_what_is_put_around_the_head_later_counts(tmp_path, kernel, change):
    model = made(tmp_path, "llama")
    body = find_body(model, model, VOCABULARY)
    assert body is not None
    assert body.output == "lm_head"
    plain = Forward(model, body=body).logprobs(rows())
    assert kernel.calls == 1
    undo = change(model.lm_head)
    changed, expected = (Forward(model, body=one).logprobs(rows()) for one in (body, None))
    torch.testing.assert_close(changed, expected)
    assert (changed - plain).abs().max() > 1e-3
    undo()
    Forward(model, body=body).logprobs(rows())
    assert kernel.calls == 2


def test_it_scores_with_another_models_matrix(tmp_path, kernel):
    """A reference, say, is scored the same way."""
    model, other = made(tmp_path, "qwen2"), made(tmp_path, "qwen2")
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    forward = Forward(model, body=find_body(model, model, VOCABULARY)).over(other)
    torch.testing.assert_close(forward.logprobs(rows()), Forward(other).logprobs(rows()))
    assert kernel.calls == 1


def _hooked_model(model: Any) -> None:
    def double(_m: Any, _a: Any, output: Any) -> Any:
        output.logits = output.logits * 2
        return output

    model.register_forward_hook(double)


def _capped(model: Any) -> None:
    model.config.final_logit_softcapping = 1.0


def _large(model: Any) -> None:
    """What a soft cap left as it was, in bfloat16, is small no more."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)


@pytest.mark.parametrize(
    ("dtype", "cap", "change"),
    [
        ("float32", None, _hooked_model),
        ("float32", None, _capped),
        *(("bfloat16", cap, _large) for cap in (30.0, 64.0, 1024.0)),
    ],
)
def test_what_is_around_the_whole_model_counts(tmp_path, kernel, dtype, cap, change):
    settings = {"attn_implementation": "eager", "final_logit_softcapping": cap}
    model = made(tmp_path, "gemma2", dtype, **settings)
    body = find_body(model, model, VOCABULARY)
    assert body is not None
    assert (body.output is None) == (cap is not None)
    change(model)
    scores, expected = (Forward(model, body=one).logprobs(rows()) for one in (body, None))
    torch.testing.assert_close(scores, expected)
    assert kernel.calls == 0


class _Scaled(transformers.LlamaForCausalLM):
    """Learns a scale of its logits, which is 1 at first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.scale
        return output


class _Dropping(transformers.LlamaForCausalLM):
    """Drops hidden states in front of its head while it trains."""

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        states = self.model(input_ids=input_ids, **inputs).last_hidden_state
        states = nn.functional.dropout(states, training=self.training)
        return CausalLMOutputWithPast(logits=self.lm_head(states))


def test_a_scale_that_is_1_is_learned(tmp_path, kernel):
    made(tmp_path, "llama")
    model = _Scaled.from_pretrained(tmp_path / "llama").eval()
    nn.init.ones_(model.scale)
    agree(both(model, model, None))
    assert kernel.calls == 0


def test_what_drops_states_in_training_drops_them(tmp_path, kernel):
    made(tmp_path, "llama")
    model = _Dropping.from_pretrained(tmp_path / "llama").eval()
    forward = Forward(model, body=find_body(model, model, VOCABULARY))
    forward.logprobs(rows())
    assert kernel.calls == 1
    model.train()
    scores = [forward.logprobs(rows()) for _ in range(2)]
    assert (scores[0] - scores[1]).abs().max() > 1e-2
    assert kernel.calls == 1


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 5),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 5, bias=False)),
        nn.Linear(3, 5, bias=False, dtype=torch.float64),
        None,
    ],
)
def test_what_is_no_matrix_alone(layer, kernel):
    states = torch.randn(1, 1, 3)
    logits = torch.zeros(1, 1, 5) if layer is None else layer(states.to(layer.weight.dtype))
    assert fused_head(layer, states, logits) is None


def test_a_matrix_alone(kernel):
    layer, states = nn.Linear(3, 5, bias=False), torch.randn(1, 1, 3)
    assert fused_head(layer, states, layer(states)) is not None
    assert fused_head(layer, states, layer(states) + 1e-6) is None


@pytest.fixture
def _asked_anew() -> Iterator[None]:
    fused._liger.cache_clear()
    yield
    fused._liger.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
def test_a_release_whose_gradients_are_wrong_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(fused, "version", lambda _: "0.8.1")
    assert fused_kernel(torch.device("cuda")) is None
    assert "liger-kernel 0.8.1 is not used" in caplog.text


@pytest.mark.usefixtures("_asked_anew")
def test_without_it_the_models_own_code_is_used(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fused, "version", missing)
    assert fused_kernel(torch.device("cuda")) is None
    assert fused_kernel(torch.device("cpu")) is None


@pytest.mark.usefixtures("_asked_anew")
def test_one_that_cannot_be_imported_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(fused, "version", lambda _: "0.9.0")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    assert fused_kernel(torch.device("cuda")) is None
    assert "liger-kernel 0.9.0 is not used: it cannot be imported" in caplog.text


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None
    or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")),
    reason="needs liger-kernel, and CUDA or Triton's interpreter (TRITON_INTERPRET=1)",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_alone", [False, True])
def test_liger_itself(tmp_path, monkeypatch, dtype, head_alone):
    used: list[torch.Tensor] = []
    liger: Any = fused._liger()
    counted = lambda *args: (used.append(args[0]), liger(*args))[1]  # noqa: E731
    monkeypatch.setattr("rl_hf.fused.fused_kernel", lambda _: counted)
    model = made(tmp_path, "llama", dtype).to("cuda" if torch.cuda.is_available() else "cpu")
    if head_alone:
        model.model.requires_grad_(False)
    results = both(model, model, half(rows()))
    assert len(used) == 1
    if dtype == "float32":
        return agree(results, 1e-4)
    (expected, gradients), (found, ours) = results
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    assert gradients.keys() == ours.keys()
    for name, gradient in gradients.items():
        assert float((ours[name] - gradient).norm()) <= 3e-2 * float(gradient.norm()), name
    return None
