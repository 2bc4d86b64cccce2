"""A plain PyTorch loop of one's own, with an engine by name, each refit of which is verified.

    python -m examples.own_trainer --generation vllm

It rewards answers that consist of small digits, which a model with random weights learns in a
minute.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.additions import Additions, make_model
from rl_core import create_generation, refit


def train(path: Path, backend: str, steps: int) -> list[float]:
    """The mean reward of every step."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    task = Additions(AutoTokenizer.from_pretrained(path), seed=0)
    wanted = torch.tensor(task.tokenizer.convert_tokens_to_ids(list("01234")))
    generation = create_generation(
        {"backend": backend, "model_name": str(path), "max_new_tokens": 8, "seed": 0}
    )
    means = []
    try:
        generation.prepare_for_generation()
        for step in range(steps):
            report = refit(model, generation)  # the engine has exactly these weights, or it raises
            output = generation.generate(task.prompts(task.draw(64)))
            ids, ends = output["output_ids"], output["unpadded_sequence_lengths"]
            at = torch.arange(ids.shape[1])
            answer = (at < ends[:, None]) & (at >= (ends - output["generation_lengths"])[:, None])
            rewards = (torch.isin(ids, wanted) & answer).sum(1) / answer.sum(1)

            scores = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
            logprobs = scores.gather(-1, ids[:, 1:, None])[..., 0] * answer[:, 1:]
            apart = (logprobs - output["logprobs"][:, 1:] * answer[:, 1:]).abs().max()
            assert apart < 1e-3, f"engine and trainer are {apart} apart"
            loss = -((rewards - rewards.mean())[:, None] * logprobs).sum() / answer.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            means.append(float(rewards.mean()))
            print(f"step {step + 1}: reward {means[-1]:.3f}, {apart:.1e} apart, {report}")
    finally:
        generation.shutdown()
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--generation", default="hf", help="the engine, by its backend's name")
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rewards = train(make_model(Path(folder), seed=0), chosen.generation, chosen.steps)
    print(f"mean reward {rewards[0]:.3f} -> {rewards[-1]:.3f}")
