"""Log-probs from hidden states: equal to those of all logits, without ever holding all logits."""

from __future__ import annotations

import logging
from typing import Any

import peft
import pytest
import torch
from hidden_cases import KINDS, VOCABULARY, agree, both, half, made, rows
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_conformance.models import make_tiny_model
from rl_core.batch import BatchedDataDict
from rl_core.interfaces import LossInputType
from rl_hf import hidden
from rl_hf.forward import Forward
from rl_hf.hidden import find_body
from rl_hf.logprobs import chunks
from rl_hf.policy import HuggingFacePolicy
from rl_losses import NLLLossFn

#: Rows of a state-space model see each other.
UNPACKED = ("mamba", True)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three tokens."""
    monkeypatch.setattr("rl_hf.hidden.CHUNK_ELEMENTS", 3 * VOCABULARY + 1)
    monkeypatch.setattr("rl_hf.forward.CHUNK_ELEMENTS", 3 * VOCABULARY + 1)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("kind", "packed"),
    [(kind, packed) for kind in KINDS for packed in (False, True) if (kind, packed) != UNPACKED],
)
def test_log_probs_and_gradients_are_those_of_all_logits(tmp_path, kind, packed):
    model = made(tmp_path, kind, **KINDS[kind])
    # The tiny ones of these weights multiply rounding.
    rtol = 1e-4 if kind in ("gpt2", "gptj") else 1e-5
    for counts in (None, half(rows())):
        agree(both(model, model, counts, packed=packed, temperature=0.7), rtol)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_what_changes_logits_after_the_head_shows(tmp_path, kind):
    """So that the test above would see it left out: without it log-probs are others."""
    model = made(tmp_path, kind, **KINDS[kind])
    scores = Forward(model, body=find_body(model, model, VOCABULARY)).logprobs(rows())
    for key, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1.0)):
        if hasattr(model.config, key):
            setattr(model.config, key, neutral)
    if kind == "granite":
        model.logits_scaling = 1.0
    if kind == "cohere":
        model.logit_scale = 1.0
    others = Forward(model).logprobs(rows())
    assert float((scores - others).detach().abs().max()) > 0.1


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float64", 1e-6), ("bfloat16", 0.02)], ids=["float64", "bfloat16"]
)
def test_other_dtypes_agree(tmp_path, dtype, rtol):
    model = made(tmp_path, "qwen2", dtype)
    (expected, gradients), (found, ours) = both(model, model, half(rows()), temperature=1.3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=2e-2 if dtype == "bfloat16" else 1e-6, rtol=0)
    for name, gradient in gradients.items():
        assert ours[name].dtype == gradient.dtype
        assert float((ours[name] - gradient).norm()) <= rtol * float(gradient.norm()) + 1e-6, name


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.5},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["head alone", "dropout", "saved"],
)
def test_adapters_of_the_head_are_trained_and_switched_off(tmp_path, settings):
    inner = made(tmp_path, "llama")
    torch.manual_seed(5)
    model = peft.get_peft_model(inner, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    model.eval()
    agree(both(model, inner, half(rows()), packed=True))
    body = find_body(model, inner, VOCABULARY)
    with model.disable_adapter(), torch.no_grad():
        found = Forward(model, body=body).logprobs(rows())
        torch.testing.assert_close(found, Forward(model).logprobs(rows()))


@pytest.mark.usefixtures("small_chunks")
def test_what_the_head_drops_is_dropped_again_backwards(tmp_path):
    """A step along the gradient changes the loss of the same drops as the gradient says."""
    inner = made(tmp_path, "llama", "float64")
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["lm_head"], lora_dropout=0.5
    )
    model = peft.get_peft_model(inner, settings)
    weight = dict(model.named_parameters())["base_model.model.lm_head.lora_B.default.weight"]
    forward = Forward(model, body=find_body(model, inner, VOCABULARY))
    model.train()

    def loss() -> torch.Tensor:
        torch.manual_seed(6)
        return forward.logprobs(rows()).double().sum()

    before = loss()
    state = torch.get_rng_state()
    before.backward()
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        step = 1e-4 * weight.grad / weight.grad.norm()
        weight.add_(step)
        ahead = loss()
        weight.sub_(2 * step)
        slope = (ahead - loss()) / 2
    assert float(slope) == pytest.approx(float((weight.grad * step).sum()), rel=1e-2)


@pytest.mark.usefixtures("small_chunks")
def test_hooks_that_come_later_count(tmp_path):
    model = made(tmp_path, "llama")
    body = find_body(model, model, VOCABULARY)
    for module, change in (
        (model.lm_head, lambda _m, _a, out: out * 0.5),
        (model.model, lambda _m, _a, out: type(out)(last_hidden_state=out[0] * 1.5)),
        (model, lambda _m, _a, out: type(out)(logits=out.logits.sin())),
    ):
        plain = Forward(model).logprobs(rows())
        module.register_forward_hook(change)
        found, expected = (Forward(model, body=one).logprobs(rows()) for one in (body, None))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(found, plain, atol=1e-3)


def test_no_token_that_counts_needs_no_pass(tmp_path):
    model = made(tmp_path, "llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was called"))
    nothing = torch.zeros(5, 22, dtype=torch.bool)
    assert not Forward(model).logprobs(rows(), nothing[:, :20]).any()
    assert not Forward(model).logprobs(rows((1, 1, 1))).any()


class Crossing(nn.Module):
    """A head in which tokens see each other."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden + hidden.cumsum(1))


def test_a_head_in_which_tokens_see_each_other_gets_all_of_them(tmp_path, caplog):
    model = made(tmp_path, "llama")
    model.lm_head = Crossing(model.lm_head)
    with caplog.at_level(logging.WARNING):
        assert find_body(model, model, VOCABULARY) is None
    assert "LlamaForCausalLM computes the logits of all tokens" in caplog.text


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 9])
def test_chunks_hold_every_token_once(tokens):
    for elements in (1, 10, 30, 1000):
        parts = [list(range(tokens))[part] for part in chunks(tokens, 10, elements)]
        assert [token for part in parts for token in part] == list(range(tokens))
        assert all(0 < len(part) <= max(1, elements // 10) for part in parts)


class Largest(TorchDispatchMode):
    """The most elements of a tensor of floats that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self.elements = max(self.elements, one.numel())
        return result


@pytest.mark.parametrize("config", [{}, {"train_micro_batch_size": 2}], ids=["tokens", "rows"])
def test_no_tensor_is_as_large_as_tokens_times_vocabulary(tmp_path, monkeypatch, config):
    vocabulary, tokens = 4096, 4 * 60
    path = make_tiny_model(tmp_path, "llama", hidden_size=32, vocab_size=vocabulary)
    for module in ("hidden", "forward"):
        monkeypatch.setattr(f"rl_hf.{module}.CHUNK_ELEMENTS", 40 * vocabulary)
    policy = HuggingFacePolicy(str(path), **config)
    assert policy.chunked
    data = BatchedDataDict(
        {"input_ids": torch.randint(3, 269, (4, 60)), "input_lengths": torch.full((4,), 60)}
    )
    # The weights of the head are [vocabulary, 32].
    for call in (
        lambda: policy.get_logprobs(data),
        lambda: policy.get_topk_logits(data, 3),
        lambda: policy.train(data, NLLLossFn()),
    ):
        with Largest() as largest:
            call()
        assert vocabulary * 32 <= largest.elements <= vocabulary * 40 < vocabulary * tokens
    policy._forward.body = None
    with Largest() as largest:
        policy.train(data, NLLLossFn())
    assert largest.elements >= vocabulary * 2 * 60


def test_training_computes_the_tokens_that_count(tiny, monkeypatch):
    policy = HuggingFacePolicy(str(tiny()))
    sizes: list[int] = []
    original = hidden.token_logprobs

    def counted(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(logits))
        return original(logits, *rest)

    monkeypatch.setattr(hidden, "token_logprobs", counted)
    mask = torch.zeros(3, 10)
    mask[0, 4:], mask[1, 2:] = 1, 1
    data = BatchedDataDict(
        {
            "input_ids": torch.randint(3, 269, (3, 10)),
            "input_lengths": torch.tensor([10, 7, 9]),
            "token_mask": mask,
            "sample_mask": torch.tensor([1.0, 1, 0]),
        }
    )
    policy.train(data, NLLLossFn())
    assert sizes == [6 + 5]
    scores = policy.forward(data, LossInputType.LOGPROB)
    assert torch.equal(
        scores != 0, (mask != 0) & (torch.arange(10) < data["input_lengths"][:, None])
    )
