"""The task of the examples: additions, checked by arithmetic, and a tiny model that learns them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rl_core import BatchedDataDict, create_policy
from rl_losses import NLLLossFn

SYMBOLS = "0123456789+="
PAD, EOS = "<pad>", "<eos>"
MAX_OPERAND = 9
MAX_NEW_TOKENS = 4


def make_tokenizer() -> Any:
    """One token per symbol; ids 0 and 1 are padding and end of sequence."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate([PAD, EOS, *SYMBOLS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(path: Path, seed: int, layers: int = 3) -> Path:
    """Writes a randomly initialised Qwen2-shaped checkpoint with its tokenizer to ``path``."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


class Additions:
    """Draws problems and grades answers.

    Args:
        tokenizer: Turns ``"7+15="`` into ids; any tokenizer will do.
        seed: Of the stream of problems.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer = tokenizer
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, problems: int) -> torch.Tensor:
        """``[problems, 2]`` int64 operands."""
        return torch.randint(0, MAX_OPERAND + 1, (problems, 2), generator=self.generator)

    def prompts(self, operands: torch.Tensor) -> BatchedDataDict[Any]:
        """``input_ids``, ``input_lengths`` and the ``target`` sum of each problem."""
        texts = [f"{a}+{b}=" for a, b in operands.tolist()]
        return BatchedDataDict({**self._encode(texts), "target": operands.sum(1)})

    def solved(self, operands: torch.Tensor) -> BatchedDataDict[Any]:
        """Problems with their answers, with ``token_mask`` 1 on the answers."""
        return self._answered(operands, operands.sum(1))

    def _answered(self, operands: torch.Tensor, sums: torch.Tensor) -> BatchedDataDict[Any]:
        questions = [f"{a}+{b}=" for a, b in operands.tolist()]
        answers = [f"{total}{self.tokenizer.eos_token}" for total in sums.tolist()]
        batch = self._encode([q + a for q, a in zip(questions, answers, strict=True)])
        prompt_lengths = self._encode(questions)["input_lengths"]
        positions = torch.arange(batch["input_ids"].shape[1])
        answer = (positions >= prompt_lengths[:, None]) & (
            positions < batch["input_lengths"][:, None]
        )
        return BatchedDataDict(
            {**batch, "token_mask": answer.long(), "sample_mask": torch.ones(len(questions))}
        )

    def preferences(self, operands: torch.Tensor) -> BatchedDataDict[Any]:
        """For each problem the right answer and then a wrong one, laid out as :meth:`solved`."""
        off = torch.randint(1, 2 * MAX_OPERAND, (len(operands),), generator=self.generator)
        sums = operands.sum(1)
        wrong = (sums + off) % (2 * MAX_OPERAND + 1)
        return self._answered(
            operands.repeat_interleave(2, 0), torch.stack([sums, wrong], 1).flatten()
        )

    def rewards(self, output: BatchedDataDict[Any]) -> torch.Tensor:
        """``[rows]`` float32: 1 where the completion is the sum and then stops, else 0."""
        ends = output["unpadded_sequence_lengths"]
        starts = ends - output["generation_lengths"]
        texts = [
            self.tokenizer.decode(ids[start:end], skip_special_tokens=True).strip()
            for ids, start, end in zip(
                output["output_ids"].tolist(), starts.tolist(), ends.tolist(), strict=True
            )
        ]
        right = [
            text == str(target)
            for text, target in zip(texts, output["target"].tolist(), strict=True)
        ]
        return torch.tensor(right, dtype=torch.float32) * ~output["truncated"]

    def _encode(self, texts: list[str]) -> dict[str, torch.Tensor]:
        encoded = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        return {
            "input_ids": encoded["input_ids"],
            "input_lengths": encoded["attention_mask"].sum(1),
        }


def warm_up(backend: str, model: Path, task: Additions, path: Path, steps: int = 75) -> Path:
    """Teaches the format and some of the sums by example, and saves the model to ``path``."""
    policy = create_policy(
        {
            "backend": backend,
            "model_name": str(model),
            "train_micro_batch_size": 64,
            "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        }
    )
    policy.prepare_for_training()
    for _ in range(steps):
        policy.train(task.solved(task.draw(64)), NLLLossFn())
    policy.save_checkpoint(str(path))
    policy.shutdown()
    return path


def write_files(folder: Path, seed: int = 0) -> None:
    """Writes what ``examples/train`` trains with: a model, ``train.jsonl`` and ``test.jsonl``."""
    make_model(folder / "model", seed)
    numbers = range(MAX_OPERAND + 1)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    for name in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
