"""What a trainer and an engine must have in common, and what a rollout cannot do."""

from __future__ import annotations

from importlib.metadata import requires, version
from typing import Any

from packaging.requirements import Requirement

from rl_core.errors import CapabilityError, ConfigError

__all__ = ["check_settings", "check_trainer", "check_trl"]


def check_trl() -> None:
    """Raises CapabilityError unless the installed TRL is one that this distribution requires."""
    installed = version("trl")
    required = [Requirement(line) for line in requires("rl-trl") or ()]
    tried = next(each.specifier for each in required if each.name == "trl")
    if not tried.contains(installed, prereleases=True):
        raise CapabilityError(
            f"rl-trl supports trl {tried}, but {installed} is installed, and TRL may change how it "
            "calls a rollout_func in any release",
            fix=f'pip install "trl{tried}", or install an rl-trl that supports trl {installed}',
            installed=installed,
        )


def check_trainer(trainer: Any) -> None:
    """Raises CapabilityError for a trainer that generates otherwise, or whose weights are spread.

    Args:
        trainer: A ``trl.GRPOTrainer``.
    """
    refused = {
        "use_vllm=True: TRL then starts its own engine": trainer.use_vllm,
        "tools or an environment: TRL generates all turns but the first itself": trainer.tools,
        "a vision-language model: only prompts of text are supported": trainer._is_vlm,
        "FSDP: no process has all weights": trainer.is_fsdp_enabled,
        "DeepSpeed: a process may not have all weights": trainer.is_deepspeed_enabled,
    }
    for what, asked in refused.items():
        if asked:
            raise CapabilityError(
                f"rl_trl.rollout does not support a {type(trainer).__name__} with {what}",
                fix=f"train without {what.split(':')[0]}, or without rollout_func",
            )


def check_settings(trainer: Any, generation: Any) -> None:
    """Compares how the trainer means to sample with how the engine does.

    Args:
        trainer: A ``trl.GRPOTrainer``.
        generation: The engine, embedded or in workers.

    Raises:
        ConfigError: Names every setting that differs, and both values.
        CapabilityError: They agree on what cannot be scored.
    """
    args, engine = trainer.args, generation.sampling
    stop_strings = list(generation.config.get("stop_strings") or ())
    stops = sorted({*trainer.eos_token_ids}), sorted(engine.stop_token_ids)
    penalty, most = engine.repetition_penalty, engine.max_new_tokens
    # What the trainer calls it, its value, what the engine calls it, its value.
    settings = [
        ("temperature", args.temperature, "temperature", engine.temperature),
        ("top_p", args.top_p, "top_p", engine.top_p),
        ("top_k", max(0, args.top_k or 0), "top_k", engine.top_k),
        ("min_p", args.min_p or 0.0, "min_p", 0.0),
        ("repetition_penalty", args.repetition_penalty, "repetition_penalty", penalty),
        ("max_completion_length", args.max_completion_length, "max_new_tokens", most),
        ("generation_kwargs", args.generation_kwargs or {}, "generation_kwargs", {}),
        ("do_sample", True, "do_sample", not engine.greedy),
        ("prompts repeated already, rows for each", 1, "num_generations", engine.num_generations),
        ("eos_token_ids", stops[0], "stop_token_ids", stops[1]),
        ("stop_strings", [], "stop_strings", stop_strings),
    ]  # fmt: skip
    different = [
        (f"the trainer has {ours} {value!r}, the engine has {theirs} {its!r}", theirs)
        for ours, value, theirs, its in settings
        if value != its
    ]
    if different:
        raise ConfigError(
            "trainer and engine would sample differently: "
            + "; ".join(text for text, _ in different),
            fix="set the same values in GRPOConfig and in the configuration of the engine; leave "
            "out an option that only one of them has",
            key=different[0][1],
        )
    if penalty != 1.0:
        raise CapabilityError(
            f"trainer and engine have repetition_penalty {penalty:g}, which GRPO's loss ignores",
            fix="set repetition_penalty to 1 in both",
        )
