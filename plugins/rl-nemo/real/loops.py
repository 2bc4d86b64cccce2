"""NeMo RL's loops over policies and engines of rl-core, from their exemplary configurations."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import toy
from nemo_rl.algorithms import distillation, dpo, grpo, sft
from nemo_rl.algorithms.loss.loss_functions import (
    ClippedPGLossFn,
    DistillationLossFn,
    DPOLossFn,
    NLLLossFn,
)
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from nemo_rl.utils.logger import Logger, LoggerInterface
from omegaconf import OmegaConf
from transformers import AutoTokenizer

import rl_losses
import rl_nemo
from rl_conformance.models import make_tiny_model
from rl_core import create_generation, create_policy
from rl_hosting import LocalCluster
from rl_ray import RayVirtualCluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["LOOPS", "PLACES", "TRAINERS", "Backends", "Outcome", "run"]

PROMPTS, SAMPLES = 8, 8
#: For megatron; some of their examples have two of one kind or another.
ONE_RANK = {
    **{f"{kind}_parallel_size": 1 for kind in ("tensor_model", "pipeline_model", "context")},
    "sequence_parallel": False,
}
register_omegaconf_resolvers()


@dataclass(frozen=True)
class Backends:
    """What the loops drive.

    Attributes:
        policy: Its name; one of :data:`TRAINERS`.
        generation: The engine's name.
        python: The interpreter of the engine's environment. None is this one.
    """

    policy: str = "hf"
    generation: str = "hf"
    python: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Of a loop that ran to its end.

    Attributes:
        loop: Its name in :data:`LOOPS`.
        place: Its name in :data:`PLACES`.
        backends: The policy's and the engine's.
        steps: That it took.
        measure: What is followed: ``"reward"`` or ``"loss"``.
        first: Its mean over the first three steps.
        last: Its mean over the last three.
        apart: The loop's ``token_mult_prob_error``, the largest of all steps: 1 if the engine's
            log-probs are the trainer's. None without an engine.
        seconds: Of the loop itself, without models' start.
    """

    loop: str
    place: str
    backends: Backends
    steps: int
    measure: str
    first: float
    last: float
    apart: float | None
    seconds: float

    @property
    def learned(self) -> bool:
        """Whether the measure went where it should."""
        better = self.last - self.first if self.measure == "reward" else self.first - self.last
        return better > 0.05


class Recorder(LoggerInterface):
    """One of their loggers, which keeps the figures."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[Any]] = defaultdict(list)

    def log_metrics(self, metrics: Any, step: int, prefix: str = "", *_: Any, **__: Any) -> None:
        for name, value in metrics.items():
            self.metrics[f"{prefix}/{name}"].append(value)

    def log_hyperparams(self, params: Any) -> None:
        pass

    def log_histogram(self, histogram: Any, step: int, name: str) -> None:
        pass

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        pass


class Setting:
    """Models, places and figures of one run of a loop; ends with what it made."""

    def __init__(
        self, checkout: Path, folder: Path, place: str, backends: Backends, steps: int
    ) -> None:
        self.checkout, self.folder, self.steps = checkout, folder, steps
        self.backends = backends
        self.model = str(make_tiny_model(folder / "model"))
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.recorder = Recorder()
        self.seconds = 0.0
        self._stack = ExitStack()
        self.cluster = PLACES[place]()
        if self.cluster is not None:
            self._stack.enter_context(self.cluster)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def configuration(self, name: str, lr: float = 5e-3, **sections: Any) -> dict[str, Any]:
        """Their exemplary configuration, made small."""
        small = {
            "model_name": self.model,
            "precision": "float32",
            "max_total_sequence_length": 64,
            "make_sequence_length_divisible_by": 1,
            "train_global_batch_size": 8,
            "train_micro_batch_size": 4,
            "logprob_batch_size": 8,
            "optimizer": {"kwargs": {"lr": lr}},
            "megatron_cfg": {"optimizer": {"lr": lr}, **ONE_RANK},
        }
        changes = {
            "policy": small,
            "data": {"use_multiple_dataloader": False},
            "logger": {
                "log_dir": str(self.folder / "logs"),
                "monitor_gpus": False,
                "wandb_enabled": False,
                "tensorboard_enabled": False,
            },
            "checkpointing": {
                "enabled": True,
                "checkpoint_dir": str(self.folder / "checkpoints"),
                "metric_name": None,
                "save_period": 1000,
                "checkpoint_must_save_by": None,
            },
        }
        given = load_config(str(self.checkout / "examples" / "configs" / name))
        OmegaConf.set_struct(given, False)
        merged: Any = OmegaConf.to_container(
            OmegaConf.merge(given, changes, {"policy": TRAINERS[self.backends.policy]}, sections),
            resolve=True,
        )
        return merged

    def policy(self, section: dict[str, Any], **more: Any) -> Any:
        """A policy of ours from their section, and what of it has no meaning here, printed."""
        translated = rl_nemo.policy_config(section, **more)
        print(translated)
        return self._keep(create_policy(translated.config, self.cluster))

    def generation(self, section: dict[str, Any]) -> Any:
        """Likewise, an engine."""
        engine, python = self.backends.generation, self.backends.python
        elsewhere = {f"{engine}_cfg": {"python": python}} if python else {}
        own = {"backend": engine, "model_name": self.model, **elsewhere}
        translated = rl_nemo.generation_config(section, **own)
        print(translated)
        return self._keep(create_generation(translated.config, self.cluster))

    def _keep(self, made: Any) -> Any:
        self._stack.callback(made.shutdown)
        return made

    def run(self, loop: Callable[..., None], config: Any, state: Any, *arguments: Any) -> None:
        """Calls a loop with what all of them end with."""
        logger = Logger(config.logger)
        logger.loggers.append(self.recorder)
        checkpointer = CheckpointManager(config.checkpointing)
        start = time.perf_counter()
        by_name = {"master_config": config, "logger": logger, "checkpointer": checkpointer, **state}
        loop(*arguments, tokenizer=self.tokenizer, **by_name)
        self.seconds = time.perf_counter() - start
        saved = self.folder / "checkpoints" / f"step_{self.steps}" / "policy" / "weights"
        if not saved.is_dir():
            raise RuntimeError(f"the loop ended without its checkpoint {saved}")


ROLLOUTS = {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": SAMPLES}


def _generation(*, asynchronous: bool) -> dict[str, Any]:
    engine = {"async_engine": asynchronous, "enforce_eager": True}  # graphs are for a GPU
    return {"max_new_tokens": 8, "vllm_cfg": engine}


def _grpo(
    setting: Setting, *, loss: str = "theirs", asynchronous: bool = False, turns: int = 1
) -> str:
    # Asynchronous rollouts end a conversation with an answer that did not end by itself.
    ends = {"stop_token_ids": [*range(64, 128)]} if turns > 1 else {}
    config = setting.configuration(
        "grpo_math_1B.yaml",
        policy={
            "train_global_batch_size": PROMPTS * SAMPLES,
            "train_micro_batch_size": 16,
            "generation": _generation(asynchronous=asynchronous) | ends,
        },
        grpo={
            **ROLLOUTS,
            "max_rollout_turns": turns,
            "max_num_steps": setting.steps,
            "val_period": 10,
            "val_batch_size": PROMPTS,
            "max_val_samples": PROMPTS,
        },
    )
    master = grpo.MasterConfig(**config)
    policy = setting.policy(config["policy"])
    generation = setting.generation(config["policy"]["generation"])
    rl_nemo.connect(policy, generation)
    setting.run(
        grpo.grpo_train,
        master,
        {
            "wrapped_dataloader": toy.prompts(setting.tokenizer, PROMPTS, setting.steps),
            "val_dataloader": toy.prompts(setting.tokenizer, PROMPTS, 1),
            "loss_fn": _grpo_loss(loss, master),
            "task_to_env": toy.environment(turns),
            "val_task_to_env": toy.environment(turns),
            "grpo_save_state": grpo._initial_grpo_save_state(),
        },
        policy,
        generation,
    )
    return "reward"


def _grpo_loss(whose: str, master: Any) -> Any:
    if whose == "theirs":
        return ClippedPGLossFn(master.loss_fn)
    penalty = master.loss_fn.reference_policy_kl_penalty
    return rl_losses.GRPOLossFn(reference_policy_kl_penalty=penalty)


def _async_grpo(setting: Setting) -> str:
    for actor in ("AsyncTrajectoryCollector", "ReplayBuffer"):  # theirs would be built by uv
        ACTOR_ENVIRONMENT_REGISTRY[f"nemo_rl.algorithms.async_utils.{actor}"] = sys.executable
    config = setting.configuration(
        "grpo_math_1B.yaml",
        policy={
            "train_global_batch_size": PROMPTS * SAMPLES,
            "train_micro_batch_size": 16,
            "generation": {
                **_generation(asynchronous=True),
                "colocated": {
                    "enabled": False,
                    "resources": {"gpus_per_node": 1, "num_nodes": 1},
                },
            },
        },
        grpo={
            **ROLLOUTS,
            "max_num_steps": setting.steps,
            "val_period": 0,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
        },
        loss_fn={"use_importance_sampling_correction": True},
    )
    master = grpo.MasterConfig(**config)
    policy = setting.policy(config["policy"])
    generation = setting.generation(config["policy"]["generation"])
    rl_nemo.connect(policy, generation)
    setting.run(
        grpo.async_grpo_train,
        master,
        {
            "dataloader": toy.prompts(setting.tokenizer, PROMPTS, setting.steps + 4),
            "val_dataloader": None,
            "loss_fn": ClippedPGLossFn(master.loss_fn),
            "task_to_env": toy.environment(),
            "val_task_to_env": None,
            "grpo_save_state": grpo._initial_grpo_save_state(),
        },
        policy,
        generation,
    )
    return "reward"


def _sft(setting: Setting) -> str:
    config = setting.configuration(
        "sft.yaml", sft={"max_num_steps": setting.steps, "val_global_batch_size": 8}
    )
    master = sft.MasterConfig(**config)
    setting.run(
        sft.sft_train,
        master,
        {
            "train_dataloader": toy.answers(setting.tokenizer, 8, setting.steps),
            "val_dataloader": toy.answers(setting.tokenizer, 8, 1),
            "loss_fn": NLLLossFn(),
            "sft_save_state": sft._initial_sft_save_state(),
        },
        setting.policy(config["policy"], reference="none"),
    )
    return "loss"


def _dpo(setting: Setting, *, loss: str = "theirs") -> str:
    config = setting.configuration(
        "dpo.yaml",
        lr=2e-3,
        dpo={"max_num_steps": setting.steps, "val_global_batch_size": 8},
    )
    master = dpo.MasterConfig(**config)
    losses: dict[str, Callable[[], Any]] = {
        "theirs": lambda: rl_nemo.wrap_loss(DPOLossFn(master.dpo), group_size=2),
        "ours": lambda: rl_nemo.rolled_reference(
            rl_losses.DPOLossFn(
                beta=master.dpo.reference_policy_kl_penalty, preference_average_log_probs=False
            )
        ),
    }
    setting.run(
        dpo.dpo_train,
        master,
        {
            "train_dataloader": toy.pairs(setting.tokenizer, 8, setting.steps),
            "val_dataloader": {"pairs": toy.pairs(setting.tokenizer, 8, 1)},
            "loss_fn": losses[loss](),
            "dpo_save_state": dpo._initial_dpo_save_state(),
        },
        setting.policy(config["policy"]),
    )
    first = setting.recorder.metrics["train/loss"][0]
    if not math.isclose(first, math.log(2), abs_tol=1e-3):
        raise RuntimeError(f"the first step's loss is {first}, where the policy is the reference")
    return "loss"


def _distillation(setting: Setting) -> str:
    teacher_model = str(make_tiny_model(setting.folder / "teacher", seed=1))
    rollouts = {"generation": _generation(asynchronous=False)}
    config = setting.configuration(
        "distillation_math.yaml",
        policy={"train_global_batch_size": PROMPTS * SAMPLES, **rollouts},
        distillation={
            **ROLLOUTS,
            "max_num_steps": setting.steps,
            "val_period": 10,
            "val_batch_size": PROMPTS,
            "max_val_samples": PROMPTS,
        },
    )
    master = distillation.MasterConfig(**config)
    student = setting.policy(config["policy"], reference="none")
    teacher = setting.policy({**config["policy"], "model_name": teacher_model}, reference="none")
    generation = setting.generation(config["policy"]["generation"])
    rl_nemo.connect(student, generation)
    setting.run(
        distillation.distillation_train,
        master,
        {
            "dataloader": toy.prompts(setting.tokenizer, PROMPTS, setting.steps),
            "val_dataloader": toy.prompts(setting.tokenizer, PROMPTS, 1),
            "loss_fn": rl_nemo.wrap_loss(DistillationLossFn(master.loss_fn)),
            "task_to_env": toy.environment(),
            "val_task_to_env": toy.environment(),
            "distillation_save_state": distillation._initial_distillation_save_state(),
        },
        student,
        teacher,
        generation,
    )
    return "loss"


#: What of their configuration's policy section chooses each.
TRAINERS: dict[str, dict[str, Any]] = {
    "hf": {"dtensor_cfg": {"enabled": True}, "megatron_cfg": {"enabled": False}},
    "megatron": {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}},
}
#: Where policy and engine run.
PLACES: dict[str, Callable[[], Any]] = {
    "embedded": lambda: None,
    "cluster": lambda: LocalCluster(2),
    "ray": lambda: RayVirtualCluster([2], max_colocated_worker_groups=2),
}
#: Each returns what is followed.
LOOPS: dict[str, Callable[[Setting], str]] = {
    "grpo": _grpo,
    "grpo, our loss": lambda setting: _grpo(setting, loss="ours"),
    "grpo, two turns": lambda setting: _grpo(setting, turns=2),
    "grpo, asynchronous rollouts": lambda setting: _grpo(setting, asynchronous=True),
    "grpo, both": lambda setting: _grpo(setting, asynchronous=True, turns=2),
    "sft": _sft,
    "dpo": _dpo,
    "dpo, our loss": lambda setting: _dpo(setting, loss="ours"),
    "distillation": _distillation,
    "async_grpo": _async_grpo,
}


def run(
    checkout: Path, folder: Path, loop: str, place: str, backends: Backends, steps: int
) -> Outcome:
    """Runs a loop to its end."""
    with Setting(checkout, folder, place, backends, steps) as setting:
        measure = LOOPS[loop](setting)
        seen = setting.recorder.metrics[f"train/{measure}"]
        apart = setting.recorder.metrics["train/token_mult_prob_error"]
        return Outcome(
            loop,
            place,
            backends,
            len(seen),
            measure,
            first=sum(seen[:3]) / 3,
            last=sum(seen[-3:]) / 3,
            apart=max(apart, default=None),
            seconds=setting.seconds,
        )
