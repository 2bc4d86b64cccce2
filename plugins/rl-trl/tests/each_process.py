"""What each of several processes of accelerate runs: the engine is the main one's alone.

``torchrun ... each_process.py MODEL FOLDER`` writes ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import rl_trl
from rl_core import create_generation
from rl_core.errors import RLError

ROWS, TOKENS = 8, 8


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main(model: str, folder: str) -> GRPOTrainer:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config = {"backend": "hf", "model_name": model, "max_new_tokens": TOKENS, "seed": 0}
    generation = create_generation(config) if rank == 0 else None
    rollout, answered = rl_trl.rollout(generation), []

    def recording(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        output = rollout(prompts, trainer)
        answered.append({"prompts": prompts, **output})
        return output

    args = GRPOConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=ROWS // size,
        num_generations=ROWS,  # so that the processes share a group
        max_completion_length=TOKENS,
        learning_rate=5e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"prompt": [f"{number}+{number + 1}=" for number in range(16)]})
    trainer = GRPOTrainer(model, even, args, train_dataset=data, rollout_func=recording)
    trainer.train()
    weights = sum(float(value.double().sum()) for value in trainer.model.state_dict().values())
    said = []
    if rank == size - 1:  # its model alone is not the one that the engine has
        for parameter in trainer.model.parameters():
            parameter.data.mul_(1.5)
    for spoil in (lambda: None, lambda: generation and generation.shutdown()):
        spoil()
        try:
            rollout([f"{rank}+1="] * 2, trainer)
        except RLError as error:
            said.append([type(error).__name__, str(error), error.details])
    trainer.accelerator.end_training()
    kept = {
        "answered": answered,
        "log": trainer.state.log_history,
        "weights": weights,
        "said": said,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(kept, default=str))
    return trainer


if __name__ == "__main__":
    ended = main(*sys.argv[1:])
    sys.stdout.flush()
    # The trainer's DDP has a group of gloo, and to end that may take for ever: nobody does.
    os._exit(0)
