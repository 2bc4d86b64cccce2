"""What the loops train on: prompts, pairs and answers of a few tokens, and an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
import torch
from nemo_rl.data.collate_fn import preference_collate_fn, rl_collate_fn
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from torchdata.stateful_dataloader import StatefulDataLoader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["answers", "environment", "pairs", "prompts"]

TASK = "plain"
WORDS = (
    "the string",
    "an inner ring",
    "then 12 or 34",
    "thin on",
    "in the end",
    "rather",
    "or",
    "her",
)


@ray.remote(num_cpus=0)
class Plain(EnvironmentInterface):
    """Rewards the share of an answer's characters that are ASCII, in each of its turns."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn[Any]:
        answers = [log[-1]["content"] for log in message_log_batch]
        rewards = [sum(c.isascii() for c in answer) / max(1, len(answer)) for answer in answers]
        taken = [each.get("turn", 0) + 1 for each in metadata]
        over = [turn >= self.turns for turn in taken]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": "" if last else " more:"} for last in over
            ],
            metadata=[{"turn": turn} for turn in taken],
            next_stop_strings=[None] * len(answers),
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(over),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        return batch, {}

    def shutdown(self) -> None:
        pass


def environment(turns: int = 1) -> dict[str, Any]:
    """Their ``task_to_env``."""
    return {TASK: Plain.remote(turns)}


def prompts(tokenizer: Any, batch: int, batches: int) -> StatefulDataLoader:
    """Prompts for rollouts, ``batch`` at a time."""
    rows = [_row(tokenizer, i, {"user": WORDS[i % len(WORDS)]}) for i in range(batch * batches)]
    return _loader(rows, batch, rl_collate_fn)


def answers(tokenizer: Any, batch: int, batches: int) -> StatefulDataLoader:
    """Prompts with answers, ``batch`` at a time."""
    rows = []
    for i in range(batch * batches):
        texts = {"user": WORDS[i % len(WORDS)], "assistant": WORDS[(i + 1) % len(WORDS)]}
        rows.append(_row(tokenizer, i, texts))
    return _loader(rows, batch, rl_collate_fn)


def pairs(tokenizer: Any, batch: int, batches: int) -> StatefulDataLoader:
    """Prompts with a better answer and a worse one, ``batch`` pairs at a time."""

    def collate(rows: list[Any]) -> Any:
        return preference_collate_fn(rows, tokenizer, 1, True)

    rows = []
    for i in range(batch * batches):
        prompt, good, bad = (WORDS[(i + j) % len(WORDS)] for j in range(3))
        chosen = _row(tokenizer, i, {"user": prompt, "assistant": good})
        rejected = _row(tokenizer, i, {"user": prompt, "assistant": bad})
        both = {"chosen": chosen, "rejected": rejected}
        rows.append(
            {
                **{f"message_log_{name}": row["message_log"] for name, row in both.items()},
                **{f"length_{name}": row["length"] for name, row in both.items()},
                "loss_multiplier": 1.0,
                "idx": i,
            }
        )
    return _loader(rows, batch, collate)


def _row(tokenizer: Any, index: int, texts: dict[str, str]) -> dict[str, Any]:
    log = [
        {"role": role, "content": text, "token_ids": torch.tensor(tokenizer(text)["input_ids"])}
        for role, text in texts.items()
    ]
    return {
        "message_log": log,
        "length": sum(len(message["token_ids"]) for message in log),
        "extra_env_info": {},
        "loss_multiplier": 1.0,
        "idx": index,
        "task_name": TASK,
    }


def _loader(rows: list[Any], batch: int, collate: Callable[[list[Any]], Any]) -> StatefulDataLoader:
    return StatefulDataLoader(rows, batch_size=batch, collate_fn=collate, drop_last=True)
