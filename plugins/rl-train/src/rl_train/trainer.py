"""A run of GRPO in five lines of Python, for users of TRL."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError
from rl_train.config import check_run
from rl_train.run import train

if TYPE_CHECKING:
    from rl_train.run import Outcome

__all__ = ["GRPOTrainer"]

#: What arguments of TRL's class are in a run.
_OF_TRL = {
    "processing_class": "remove 'processing_class': the model's own tokenizer is loaded",
    "callbacks": "set args={'log.to': ['wandb']} for a tracker, or read metrics.jsonl in output",
    "optimizers": "set args={'policy.optimizer.lr': ...} and 'policy.scheduler.name'",
    "rollout_func": "set args={'environment.function': 'module:Class'}",
    "environment_factory": "set args={'environment.function': 'module:Class'}",
    "tools": "set args={'data.tools': ...} and 'environment.function'",
}


class GRPOTrainer:
    """GRPO with the model, reward functions and datasets of TRL's class of this name.

    Pass arguments by keyword: their order is not TRL's, and ``args`` is a dictionary of a run's
    keys, not a ``GRPOConfig``.

    ::

        trainer = GRPOTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            reward_funcs=score,
            train_dataset=rows,
            generation="vllm",
        )
        trainer.train()

    Args:
        model: Directory or hub name of a checkpoint, with its tokenizer.
        reward_funcs: A function with TRL's signature, a name such as ``"math"`` or
            ``"file.py:name"``, or a list of these. They are called in this process, unless
            ``args`` sets ``rewards.workers``.
        train_dataset: Rows with a ``prompt``: a list of dicts, or a ``datasets.Dataset``.
        eval_dataset: Rows for evaluation.
        generation: Backend that generates, such as ``"vllm"``.
        policy: Backend that trains.
        reward_weights: A weight for each function.
        args: Other keys of :class:`~rl_train.config.RunConfig`, nested or with dots, such as
            ``{"steps": 100, "policy.optimizer.lr": 1e-6}``.
        **keys: The same, for names without dots.

    Raises:
        ConfigError: A key is wrong; for the name of an argument of TRL, it names the key here.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
        train_dataset: Sequence[Mapping[str, Any]],
        *,
        eval_dataset: Sequence[Mapping[str, Any]] | None = None,
        generation: str = "hf",
        policy: str = "hf",
        reward_weights: Sequence[float] | None = None,
        args: Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        for name in keys.keys() & _OF_TRL.keys():
            raise ConfigError(f"GRPOTrainer takes no {name!r}", fix=_OF_TRL[name], key=name)
        if not isinstance(model, str | PathLike):
            raise ConfigError(
                f"model is a {type(model).__name__}, not a path or a name",
                fix="save it and its tokenizer with save_pretrained, and give the directory",
                key="model",
            )
        single = isinstance(reward_funcs, str) or callable(reward_funcs)
        self._rewards: Any = [reward_funcs] if single else list(reward_funcs or ())  # type: ignore[arg-type]
        self._weights, self._rows, self._eval_rows = reward_weights, train_dataset, eval_dataset
        self.config: dict[str, Any] = {"model": os.fspath(model)}
        named = {"policy.backend": policy, "generation.backend": generation}
        if args is not None and not isinstance(args, Mapping):
            raise ConfigError(
                f"args is a {type(args).__name__}, not a dict",
                fix='pass the keys of a run, such as {"steps": 100, "policy.optimizer.lr": 1e-6}',
                key="args",
            )
        for key, value in {**named, **(args or {}), **keys}.items():
            _put(self.config, key.split("."), value)
        check_run(self.config)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Outcome:
        """Trains until the last step; see :func:`rl_train.train`.

        Args:
            resume_from_checkpoint: True resumes from the newest checkpoint in ``output``, a path
                from that checkpoint; as ``checkpoint.resume`` in ``args``.

        Returns:
            Metrics of the last step and of evaluations, and the folder of the newest checkpoint.
        """
        if resume_from_checkpoint:
            resume = "auto" if resume_from_checkpoint is True else str(resume_from_checkpoint)
            _put(self.config, ["checkpoint", "resume"], resume)
        return train(
            self.config,
            rows=self._rows,
            eval_rows=self._eval_rows,
            rewards=self._rewards,
            reward_weights=self._weights,
        )


def _put(config: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *sections, key = path
    for section in sections:
        config = config.setdefault(section, {})
    if isinstance(value, Mapping) and isinstance(config.get(key), dict):
        for inner, one in value.items():
            _put(config[key], [inner], one)
    else:
        config[key] = value
