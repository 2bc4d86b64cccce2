"""The page for those who have a trainer: what it shows works."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rl_core
from rl_conformance.models import make_tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "own-trainer.md"
FIRST, RENAMED, MODULES, ENDS = re.findall(
    r"(?ms)^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", seed=0)


@pytest.fixture
def names(path: Path) -> dict[str, Any]:
    """What the page takes for granted: a model, and its checkpoint's path."""
    model = shaken(path)
    return {"model": model, "path": str(path)}


def shaken(path: Path) -> torch.nn.Module:
    """The checkpoint's model, with other weights than the checkpoint's."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def test_an_engine_under_a_model_and_under_one_with_a_prefix(names, path):
    assert FIRST.count('"vllm"') == 1
    exec(FIRST.replace('"vllm"', '"hf"'), names)
    generation = names["generation"]
    assert names["report"].version == generation.weights_version == 1
    inner = AutoModelForCausalLM.from_pretrained(path)
    prefixed = torch.nn.Module()
    prefixed.model = inner
    prefixed.value_head = torch.nn.Linear(3, 1)
    assert apart(generation, inner) > 1e-2
    with pytest.warns(rl_core.LoopWarning, match="had version 1 of origin"):  # of the first model
        exec(RENAMED, names | {"model": prefixed})
    assert apart(generation, inner) < 1e-4
    generation.shutdown()


def test_a_module_into_a_module(names, path):
    engine = AutoModelForCausalLM.from_pretrained(path)
    exec(MODULES, names | {"refit": rl_core.refit, "sampler_model": engine})
    same(names["model"], engine)


def test_the_two_ends(names, path):
    """Each half in a thread of its own, as the page has them in processes."""
    trainer, engine = ENDS.split("# the engine's process\n")
    given = threading.Event()
    wanted = AutoModelForCausalLM.from_pretrained(path)
    theirs: dict[str, Any] = {"rl_core": rl_core, "model": wanted, "lock": threading.Lock()}

    def hand_over() -> None:
        theirs["info"] = ours["info"]
        given.set()

    ours = {**names, "rl_core": rl_core, "hand_over": hand_over}
    assert trainer.count("...  # hand info") == 1
    with ThreadPoolExecutor() as threads:
        done = threads.submit(exec, trainer.replace("...  # hand info", "hand_over()  #"), ours)
        assert given.wait(60)
        exec(engine, theirs)
        done.result(120)
    assert theirs["receiver"].weights_version == 1
    same(names["model"], wanted)


def apart(generation: Any, model: torch.nn.Module) -> float:
    """How far the engine's log-probs of its own tokens are from the model's."""
    prompts = {"input_ids": torch.tensor([[5, 6, 7]]), "input_lengths": torch.tensor([3])}
    output = generation.generate(prompts, greedy=True)
    ids, theirs = output["output_ids"], output["logprobs"][:, 1:]
    with torch.no_grad():
        scores = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    ours = scores.gather(-1, ids[:, 1:, None])[..., 0]
    return float((ours - theirs)[:, 2:].abs().max())


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    theirs = other.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())
