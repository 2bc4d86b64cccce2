"""Refits from models that somebody else trains, with peft's adapters and without."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from rl_core import CapabilityError, ConfigError
from rl_core.batch import BatchedDataDict
from rl_core.weights import refit
from rl_hf.generation import HuggingFaceGeneration
from rl_hf.lora import AdapterWeightSource


def train(model: Any) -> None:
    """Two steps over everything that is trained."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    ids = torch.randint(3, 272, (2, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def load(path: Any, **config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if config:
        settings = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
        model = peft.get_peft_model(model, settings)
    return model


@pytest.fixture
def engine(tiny: Any) -> Any:
    generation = HuggingFaceGeneration(str(tiny()), max_new_tokens=3)
    generation.prepare_for_generation()
    yield generation
    generation.shutdown()


def agree(model: Any, engine: Any) -> None:
    """The engine's log-probs are those of the model as it is now."""
    ids = torch.randint(3, 272, (3, 6), generator=torch.Generator().manual_seed(2))
    rows = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([6, 6, 6])})
    output = engine.generate(rows, greedy=True)
    for row, size in enumerate(output["unpadded_sequence_lengths"].tolist()):
        sequence = output["output_ids"][row, :size]
        model.eval()
        with torch.no_grad():
            scores = model(input_ids=sequence[None]).logits[0].log_softmax(-1)
        expected = scores[range(5, size - 1), sequence[6:]]
        torch.testing.assert_close(output["logprobs"][row, 6:size], expected, atol=2e-5, rtol=0)


def test_a_model_of_a_loop_of_ones_own(tiny: Any, engine: Any) -> None:
    model = load(tiny())
    for version in (1, 2):
        train(model)
        assert refit(model, engine, verify="installed").version == version
        agree(model, engine)


KINDS = {
    "linear": {"target_modules": "all-linear"},
    "rank stabilised": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "biases": {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
    "a module that is trained whole": {
        "target_modules": ["o_proj"],
        "modules_to_save": ["norm", "input_layernorm"],
    },
    "some layers": {"target_modules": ["up_proj"], "layers_to_transform": [1]},
    "ranks of their own": {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"q_proj": 2}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_merged(tiny: Any, engine: Any, kind: str) -> None:
    model = load(tiny(), r=4, **KINDS[kind])
    train(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    refit(model, engine, verify="installed")
    agree(model, engine)
    agree(copy.deepcopy(model).merge_and_unload(), engine)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_the_model_computes_now_is_sent(tiny: Any, engine: Any) -> None:
    model = load(tiny(), r=4, target_modules="all-linear", modules_to_save=["norm"])
    other = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False
    )
    model.add_adapter("other", other)
    train(model)
    refit(model, engine)
    agree(model, engine)
    model.set_adapter("other")
    refit(model, engine)
    agree(model, engine)
    with model.disable_adapter():
        refit(model, engine)
        agree(model, engine)
    agree(load(tiny()), engine)
    model.base_model.set_adapter(["default", "other"])
    refit(model, engine)
    agree(model, engine)
    model.merge_adapter()
    refit(model, engine)
    agree(model, engine)
    model.unmerge_adapter()


def test_an_embedding_with_an_adapter_is_merged(tiny: Any) -> None:
    path = tiny("llama")  # whose head is not tied to it
    generation = HuggingFaceGeneration(str(path), max_new_tokens=3)
    generation.prepare_for_generation()
    model = load(path, r=4, target_modules=["embed_tokens", "lm_head"])
    train(model)
    refit(model, generation)
    agree(model, generation)
    generation.shutdown()


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, checkpoint_wrapper])
@pytest.mark.parametrize("part", ["blocks", "adapted layers", "base layers"])
def test_adapters_in_wrapped_parts_are_merged(tiny: Any, engine: Any, wrap: Any, part: str) -> None:
    model = load(tiny(), r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])
    train(model)
    plain = copy.deepcopy(model)
    layers = model.get_base_model().model.layers
    for index, block in enumerate(layers):
        if part == "blocks":
            layers[index] = wrap(block)
        elif part == "adapted layers":
            block.self_attn.q_proj = wrap(block.self_attn.q_proj)
        else:
            block.mlp.down_proj.base_layer = wrap(block.mlp.down_proj.base_layer)
    refit(model, engine, verify="installed")
    agree(plain, engine)


REFUSED = {
    "not plain LoRA": {"target_modules": ["q_proj"], "use_dora": True},
    "lora_bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "TrainableTokensWrapper": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [1, 2]},
    },
}


@pytest.mark.parametrize("why", REFUSED)
def test_other_adapters_are_refused(tiny: Any, engine: Any, why: str) -> None:
    model = load(tiny(), r=4, **REFUSED[why])
    with pytest.raises(CapabilityError, match=f"cannot be merged.*{why}"):
        refit(model, engine)
    with pytest.raises(CapabilityError, match="without merging it"):
        AdapterWeightSource(model)
    assert engine.weights_version == 0


def test_adapters_on_weights_that_are_elsewhere_are_refused(tiny: Any, engine: Any) -> None:
    model = load(tiny(), r=4, target_modules=["q_proj"]).to("meta")
    with pytest.raises(CapabilityError, match="is on the meta device"):
        refit(model, engine)


def test_adapters_of_another_kind_are_refused(tiny: Any, engine: Any) -> None:
    settings = peft.IA3Config(task_type="CAUSAL_LM")
    model = peft.get_peft_model(load(tiny()), settings)
    with pytest.raises(CapabilityError, match=r"cannot be merged.*ia3"):
        refit(model, engine)
    with pytest.raises(CapabilityError, match="without merging it"):
        AdapterWeightSource(model)


def two_adapters(path: Any, **config: Any) -> Any:
    """The second one has one module, and scales otherwise."""
    model = load(path, r=4, target_modules="all-linear", **config)
    other = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["q_proj"],
        init_lora_weights=False,
        use_rslora=True,
        alpha_pattern={"layers.0.self_attn.q_proj": 3},
    )
    model.add_adapter("other", other)
    return model


CHANGES: dict[str, Any] = {
    "nothing": lambda model: None,
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "disabled in a module": lambda model: adapted(model)[0][1].enable_adapters(False),
    "the other is active": lambda model: model.set_adapter("other"),
}


def adapted(model: Any) -> list[Any]:
    modules = model.get_base_model().named_modules()
    return [(name, layer) for name, layer in modules if hasattr(layer, "lora_A")]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_adapters_sent_alone_are_what_the_model_computes(tiny: Any, change: str) -> None:
    model = two_adapters(tiny())
    CHANGES[change](model)
    source = AdapterWeightSource(model)
    sent = dict(source.tensors([spec.name for spec in source.specs()]))
    for name, layer in adapted(model):
        a, b = (sent[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
        inputs = torch.eye(layer.in_features)
        added = layer(inputs) - layer.base_layer(inputs)
        torch.testing.assert_close((b @ a).T, added, atol=1e-5, rtol=0)


NOT_ALONE: dict[str, Any] = {
    "several active": lambda model: model.base_model.set_adapter(["default", "other"]),
    "merged into its weight": lambda model: model.merge_adapter(),
    "no adapter left": lambda model: model.set_adapter("other") or model.delete_adapter("default"),
    "norm has trained weights of its own": lambda model: None,
}


@pytest.mark.parametrize("why", NOT_ALONE)
def test_what_cannot_be_sent_alone_is_refused_by_name(tiny: Any, why: str) -> None:
    model = two_adapters(tiny(), modules_to_save=["norm"] if "norm" in why else None)
    NOT_ALONE[why](model)
    with pytest.raises(CapabilityError, match=why):
        AdapterWeightSource(model)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_of_a_tied_weight_is_refused(tiny: Any, engine: Any) -> None:
    model = load(tiny(), r=4, target_modules=["embed_tokens"])
    with pytest.raises(ConfigError, match="share one weight"):
        refit(model, engine)


def test_a_model_that_is_merged_for_good_is_a_model(tiny: Any, engine: Any) -> None:
    model = load(tiny(), r=4, target_modules="all-linear")
    train(model)
    refit(model.merge_and_unload(), engine)
    agree(model.merge_and_unload(), engine)
