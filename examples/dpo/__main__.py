"""DPO on preference pairs: right sums are preferred to wrong ones.

A tiny model first learns the format by example, then prefers right answers by pairs alone. Run
with ``--help`` for the options.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

from examples.preflight import check, plain_errors, require_packages

require_packages("typer", "rich", "transformers", "tokenizers", "rl_core", "rl_losses")

import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from examples.additions import MAX_NEW_TOKENS, Additions, make_model  # noqa: E402
from rl_core import (  # noqa: E402
    BatchedDataDict,
    ColocatablePolicyInterface,
    GenerationInterface,
    create_generation,
    create_policy,
)
from rl_core.weights import refit  # noqa: E402
from rl_losses import DPOLossFn, NLLLossFn  # noqa: E402

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    policy: Annotated[str, typer.Option(help="Backend that trains.")] = "hf",
    generation: Annotated[str, typer.Option(help="Backend that generates.")] = "hf",
    steps: Annotated[int, typer.Option(min=1, help="DPO steps.")] = 100,
    warmup: Annotated[int, typer.Option(min=0, help="Supervised steps before.")] = 75,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs per step.")] = 64,
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
) -> None:
    """Teaches a model to prefer right sums."""
    with plain_errors():
        check(policy=policy, generation=generation, files=[json_file])
        history = run(policy, generation, steps, warmup, pairs, seed)
    show(history)
    if json_file is not None:
        json_file.write_text(json.dumps(history, indent=1))


def run(
    policy: str, generation: str, steps: int, warmup: int, pairs: int, seed: int
) -> dict[str, Any]:
    """Warms a tiny model up, and prefers."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="dpo-") as folder:
        model = make_model(Path(folder) / "model", seed)
        task = Additions(AutoTokenizer.from_pretrained(model), seed)
        warm = Path(folder) / "warm"
        teach_format(policy, model, task, warm, warmup, pairs)
        trainer = create_policy(
            {
                "backend": policy,
                "model_name": str(warm),
                "train_micro_batch_size": 2 * pairs,
                "optimizer": {"lr": 1e-4, "weight_decay": 0.0},
                "scheduler": {"name": "constant", "warmup_steps": 10},
            }
        )
        engine = create_generation(
            {"backend": generation, "model_name": str(warm), "max_new_tokens": MAX_NEW_TOKENS}
        )
        try:
            return prefer(trainer, engine, task, steps, pairs)
        finally:
            trainer.shutdown()
            engine.shutdown()


def teach_format(
    backend: str, model: Path, task: Additions, path: Path, steps: int, rows: int
) -> None:
    """Supervised steps, saved where DPO starts."""
    policy = create_policy(
        {
            "backend": backend,
            "model_name": str(model),
            "train_micro_batch_size": rows,
            "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        }
    )
    policy.prepare_for_training()
    for _ in track(range(steps), "warm-up"):
        policy.train(task.solved(task.draw(rows)), NLLLossFn())
    policy.save_checkpoint(str(path))
    policy.shutdown()


def prefer(
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    task: Additions,
    steps: int,
    pairs: int,
) -> dict[str, Any]:
    """DPO, with the solved fraction of fresh problems before and after."""
    loss_fn = DPOLossFn(beta=0.1, sft_loss_weight=0.1)
    history: dict[str, Any] = {"solved_before": solved(generation, task), "steps": []}
    policy.prepare_for_training()
    for _ in track(range(steps), "DPO"):
        batch: BatchedDataDict[Any] = task.preferences(task.draw(pairs))
        reference = policy.get_reference_policy_logprobs(batch)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]
        metrics = policy.train(batch, loss_fn)
        history["steps"].append({k: v for k, v in metrics.items() if isinstance(v, float | int)})
    history["refit"] = refit(policy, generation).as_dict()
    history["solved_after"] = solved(generation, task)
    return history


def solved(generation: GenerationInterface, task: Additions) -> float:
    """Fraction of 512 fresh problems that a greedy answer solves."""
    generation.prepare_for_generation()
    output = generation.generate(task.prompts(task.draw(512)), greedy=True)
    generation.finish_generation()
    return float(task.rewards(output).mean())


def show(history: dict[str, Any]) -> None:
    """First and last step side by side."""
    table = Table("", "first step", "last step", title="DPO on additions")
    first, last = history["steps"][0], history["steps"][-1]
    for key in (
        "loss",
        "accuracy",
        "rewards_chosen",
        "rewards_rejected",
        "rewards_margin",
        "grad_norm",
    ):
        if key in first:
            table.add_row(key, f"{first[key]:.3f}", f"{last[key]:.3f}")
    table.add_section()
    before, after = history["solved_before"], history["solved_after"]
    table.add_row("greedy answers right", f"{before:.3f}", f"{after:.3f}")
    Console().print(table)


if __name__ == "__main__":
    app()
