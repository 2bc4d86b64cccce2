"""Training steps with a large vocabulary: memory and time, with and without all logits.

    python benchmarks/bench_logprobs.py [--vocabulary 152000] [--hidden 128] [--json out.json]

Rows are a prompt and a completion; completions count. ``hidden states`` is rl-hf; ``all logits`` is
rl-hf with a model whose logits it cannot make some tokens at a time. ``completions`` is the plain
loop over transformers that makes the logits of completions alone, in one piece, as trainers of
other libraries do (with TRL's log-softmax, where it is installed). ``GRPOTrainer`` is a step of
TRL's trainer on the same rows, which its ``rollout_func`` gives it: its own scores, loss and
optimizer; the others have one loss. Each runs in a process of its own: memory is the growth of the
peak of resident memory during steps after the first, over what was resident before them. Seconds
are those of the processor, of the best step.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rl_conformance.models import make_tiny_model
from rl_core.batch import BatchedDataDict
from rl_hf.policy import HuggingFacePolicy
from rl_losses import NLLLossFn

Step = Callable[[], float]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def rollouts(rows: int, prompt: int, completion: int) -> BatchedDataDict[Any]:
    """Rows of one length, of which the completions count."""
    width = prompt + completion
    generator = torch.Generator().manual_seed(0)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 270, (rows, width), generator=generator),
            "input_lengths": torch.full((rows,), width),
            "token_mask": (torch.arange(width) >= prompt).float().expand(rows, -1),
            "sample_mask": torch.ones(rows),
        }
    )


def through_rl_hf(path: Path, data: BatchedDataDict[Any], *, whole: bool) -> Step:
    """One microbatch through the policy backend."""
    policy = HuggingFacePolicy(str(path), reference="none", train_micro_batch_size=data.size)
    assert policy.chunked
    if whole:
        policy._forward.body = None

    def step() -> float:
        loss: float = policy.train(data, NLLLossFn())["loss"]
        return loss

    return step


def completions(path: Path, data: BatchedDataDict[Any]) -> Step:
    """What one writes by hand with transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(path).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    score = _log_softmax()
    length = int(data["token_mask"][0].sum())
    ids = data["input_ids"]

    def step() -> float:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
        loss = -score(logits / 1.0, ids[:, -length:]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def grpo_trainer(path: Path, data: BatchedDataDict[Any]) -> Step:
    """TRL's own step; rewards differ, so that every token has a gradient."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    datasets, trl = importlib.import_module("datasets"), importlib.import_module("trl")
    prompt = int((data["token_mask"][0] == 0).sum())
    rows, width = data["input_ids"].shape

    def given(*_: Any) -> dict[str, Any]:
        ids = data["input_ids"]
        return {
            "prompt_ids": ids[:, :prompt].tolist(),
            "completion_ids": ids[:, prompt:].tolist(),
            "logprobs": None,
        }

    trainer = trl.GRPOTrainer(
        str(path),
        lambda completions, **_: [float(number) for number in range(len(completions))],
        trl.GRPOConfig(
            str(path / "run"),
            per_device_train_batch_size=rows,
            num_generations=rows,
            max_completion_length=width - prompt,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["2 plus 2 is "] * rows}),
        rollout_func=given,
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    inputs = [{"prompt": "2 plus 2 is "} for _ in range(rows)]

    def step() -> float:
        loss = trainer.training_step(trainer.model.train(), inputs, 1)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return float(loss)

    return step


def _log_softmax() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if importlib.util.find_spec("trl") is not None:
        score: Any = importlib.import_module("trl.trainer.utils").selective_log_softmax
        return score  # type: ignore[no-any-return]

    def by_hand(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        chosen = logits.gather(-1, ids[..., None])[..., 0]
        return chosen - torch.stack([row.logsumexp(-1) for row in logits])

    return by_hand


WAYS: dict[str, Callable[[Path, BatchedDataDict[Any]], Step]] = {
    "all logits": lambda path, data: through_rl_hf(path, data, whole=True),
    "completions": completions,
    "hidden states": lambda path, data: through_rl_hf(path, data, whole=False),
}
if importlib.util.find_spec("trl") is not None:
    WAYS["GRPOTrainer"] = grpo_trainer


def resident(field: str) -> int:
    """Bytes of this process that are resident (``VmRSS``) or were at most (``VmHWM``)."""
    found = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(way: str, path: Path, shape: tuple[int, int, int], threads: int, rounds: int) -> Any:
    """Loss of the first step, seconds of the best of the others, and bytes that they take."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    step = WAYS[way](path, rollouts(*shape))
    loss = step()
    before = resident("VmRSS")
    CLEAR.write_text("5")  # the peak starts again
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return {"loss": loss, "seconds": min(seconds), "bytes": resident("VmHWM") - before}


def main(
    rows: Annotated[int, typer.Option(help="Rows of the microbatch.")] = 4,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 256,
    completion: Annotated[int, typer.Option(help="Tokens of a completion.")] = 256,
    vocabulary: Annotated[int, typer.Option(help="Of the model.")] = 152_000,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option(help="Depth of the model.")] = 2,
    rounds: Annotated[int, typer.Option(help="The best round counts.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write JSON.")] = None,
) -> None:
    """Prints the table and writes it as JSON."""
    logging.disable_progress_bar()
    shape = (rows, prompt, completion)
    with TemporaryDirectory() as folder:
        path = make_tiny_model(
            folder,
            "qwen2",
            hidden_size=hidden,
            num_layers=layers,
            vocab_size=vocabulary,
            max_position_embeddings=prompt + completion,
            weight_scale=1.0,
        )
        found: dict[str, Any] = {}
        for way in WAYS:
            # A process each: what one has freed, another would not ask the system for.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[way] = pool.apply(measure, (way, path, shape, threads, rounds))
    losses = [one["loss"] for way, one in found.items() if way != "GRPOTrainer"]
    assert max(losses) - min(losses) < 1e-3, losses
    base = found["all logits"]
    table = Table(
        title=f"a step of {rows} x ({prompt} + {completion}) tokens, vocabulary {vocabulary}"
    )
    for column in ("way", "seconds", "of all logits", "MB", "of all logits"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, one in found.items():
        one |= {f"{key} / all logits": one[key] / base[key] for key in ("seconds", "bytes")}
        table.add_row(
            way,
            f"{one['seconds']:.2f}",
            f"{one['seconds / all logits']:.2f}",
            f"{one['bytes'] / 1e6:.0f}",
            f"{one['bytes / all logits']:.2f}",
        )
    Console().print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        shown = {"shape": shape, "vocabulary": vocabulary, "hidden": hidden, "threads": threads}
        json_path.write_text(json.dumps({**shown, "ways": found}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
