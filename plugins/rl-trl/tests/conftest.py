"""A tiny model with a chat template, trainers of it and engines for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_conformance.models import make_tiny_model, make_tokenizer
from rl_core import create_generation

# TRL says with a warning that its hook is experimental; warnings are errors here.
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {{ prefix | default('') }}{% endif %}"
)
TOKENS = 8


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", weight_scale=2.0)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def engine(model: Path) -> Iterator[Callable[..., Any]]:
    """``engine(**config)`` is one of rl-hf in this process; all end with the test."""
    started = []

    def start(cluster: Any = None, **config: Any) -> Any:
        given = {"backend": "hf", "model_name": str(model), "max_new_tokens": TOKENS, "seed": 0}
        started.append(create_generation({**given, **config}, cluster))
        return started[-1]

    yield start
    for each in started:
        each.shutdown()


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> Callable[..., Any]:
    """``trainer(rollout_func, reward, **config)`` is TRL's, over sixteen prompts."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def make(rollout_func: Any, reward: Any = None, **config: Any) -> Any:
        parts = {
            key: config.pop(key) for key in ("peft_config", "callbacks", "tools") if key in config
        }
        prompts = config.pop("prompts", [f"{number}+{number + 1}=" for number in range(16)])
        settings = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": TOKENS,
            "learning_rate": 5e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
        }
        return GRPOTrainer(
            str(model),
            reward or share_of_even,
            GRPOConfig(**{**settings, **config}),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            rollout_func=rollout_func,
            **parts,
        )

    return make


def share_of_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
