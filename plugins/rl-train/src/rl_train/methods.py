"""One step of each method: GRPO generates, grades and trains; DPO and SFT train on the data."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rl_core import BatchedDataDict
from rl_core.errors import ConfigError
from rl_losses import AdvantageEstimator, groups_without_spread, training_batch
from rl_train.config import LOSSES
from rl_train.data import import_function
from rl_train.encoding import pad
from rl_train.episodes import play, training_rows
from rl_train.metrics import generation_metrics
from rl_train.rewards import RewardError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_train.backends import Backends
    from rl_train.config import RunConfig
    from rl_train.data import Order
    from rl_train.encoding import Encoder
    from rl_train.rewards import Rewards

__all__ = ["METHODS", "Step", "Study", "environment_of", "evaluate", "learn_step", "loss_of"]

#: Does one step; returns its metrics and completions for the log.
Step: TypeAlias = Callable[["Study", "dict[str, float]"], "tuple[dict[str, float], list[Any]]"]
Batch: TypeAlias = BatchedDataDict[Any]
#: Metrics of the loss, and what TRL calls them.
_OF_TRL = {"kl": "kl", "approx_entropy": "entropy", "clip_fraction": "clip_ratio/region_mean"}
_OF_DPO = {
    "rewards_chosen": "rewards/chosen",
    "rewards_rejected": "rewards/rejected",
    "rewards_margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
}


@dataclass
class Study:
    """All that a step needs.

    Attributes:
        config: Of the run.
        backends: Policy and engine.
        rows: The data.
        encoder: From rows to tokens.
        order: Which rows come next.
        generator: All random numbers of the loop are drawn from it.
        loss: The method's.
        rewards: For GRPO; None if an environment alone gives rewards.
        context: Tokens of a row at most, for the engine.
        tokens: Tokens of all steps so far.
    """

    config: RunConfig
    backends: Backends
    rows: Sequence[Mapping[str, Any]]
    encoder: Encoder
    order: Order
    generator: torch.Generator
    loss: Any
    rewards: Rewards | None = None
    context: float = math.inf
    tokens: int = 0

    @property
    def pad_id(self) -> int:
        """Fills rows on the right."""
        tokenizer = self.encoder.tokenizer
        pad_id = tokenizer.pad_token_id
        return int(tokenizer.eos_token_id or 0) if pad_id is None else int(pad_id)

    def draw(self, n: int) -> list[Mapping[str, Any]]:
        """The next rows."""
        return [self.rows[i] for i in self.order.take(n)]


@dataclass
class Generated:
    """What was generated for some prompts, and its grades.

    Attributes:
        batch: What a policy trains on, without advantages, and more columns: ``rewards`` the sum,
            ``each`` the rewards by function, and ``shown`` what a log shows of a row.
        names: Of the columns of ``each``.
        timed_out: Completions without a reward because of a deadline.
    """

    batch: Batch
    names: list[str] = field(default_factory=list)
    timed_out: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens that the model generated, for each row."""
        lengths: list[int] = self.batch["token_mask"].sum(1).long().tolist()
        return lengths


@contextmanager
def timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    """Adds the wall time of its body to ``seconds[what]``."""
    start = time.perf_counter()
    yield
    seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - start


def loss_of(config: RunConfig) -> Any:
    """The loss of the method with the options of the section ``loss``.

    Raises:
        ConfigError: An option is unknown or not legal, or one of ``grpo.advantages`` is.
    """
    options, section = dict(config["loss"]), "loss"
    try:
        if config["method"] == "grpo":
            section = "grpo.advantages"
            AdvantageEstimator.from_config(config["grpo"].get("advantages", {}))
            section = "loss"
            options.setdefault("reference_policy_kl_penalty", 0.0)
            options.setdefault("on_policy", config["grpo"]["updates"] == 1)
        return LOSSES[config["method"]].from_config(options)
    except ConfigError as error:
        error.details["key"] = f"{section}.{error.details.get('key', '')}"
        raise


def environment_of(config: RunConfig) -> Callable[[], Any] | None:
    """What makes an environment for an episode; None if the run has none.

    Raises:
        ConfigError: It cannot be made with its options, or has no ``step(completion, row)``.
    """
    given = config.get("environment")
    if not given:
        return None
    made: Any = import_function(given["function"], key="environment.function")
    options = given.get("options", {})
    try:
        inspect.signature(made).bind(**options)
        is_class = inspect.isclass(made)  # else a function that makes one
        if is_class:
            inspect.signature(made.step).bind(None, "completion", {})
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"environment.function: {given['function']!r} cannot be used: {error}",
            fix="name a class with step(self, completion, row) that environment.options can make",
            key="environment.function",
        ) from error
    return partial(made, **options)


def generate(
    study: Study,
    rows: Sequence[Mapping[str, Any]],
    samples: int,
    seconds: dict[str, float],
    *,
    greedy: bool = False,
) -> Generated:
    """Generates ``samples`` completions (or episodes) of each row, and grades them."""
    generation = study.backends.generation
    every = [row for row in rows for _ in range(samples)]
    prompts = [study.encoder.prompt(row) for row in rows]
    seeds = torch.randint(0, 2**62, (len(every),), generator=study.generator)
    environment, make = study.config.get("environment"), environment_of(study.config)
    grades: dict[str, torch.Tensor] = {}
    made, texts = Generated(BatchedDataDict()), list[str]()
    with timed(seconds, "generate"):
        generation.prepare_for_generation()
        if environment and make:
            options: dict[str, Any] = {
                key: value
                for key, value in environment.items()
                if key in ("max_turns", "workers", "deadline_s")
            }
            episodes = play(
                generation,
                [prompt for prompt in prompts for _ in range(samples)],
                every,
                seeds.tolist(),
                make=make,
                encoder=study.encoder,
                room=study.context,
                greedy=greedy,
                **options,
            )
            made.batch = training_rows(episodes, study.pad_id)
            made.timed_out = sum(one.timed_out for one in episodes)
            grades["environment"] = torch.tensor([float(one.reward) for one in episodes])
            texts = ["\n".join(one.text) for one in episodes]
        else:
            given: Batch = pad(prompts, study.pad_id).repeat_interleave(samples)
            given["seed"] = seeds
            made.batch = training_batch(generation.generate(given, greedy))
        generation.finish_generation()
    batch = made.batch
    learned = batch["token_mask"].bool()
    ids = [row[mask].tolist() for row, mask in zip(batch["input_ids"], learned, strict=True)]
    texts = texts or study.encoder.tokenizer.batch_decode(ids, skip_special_tokens=True)
    shown = [study.encoder.shown(row) for row in every]
    batch["rewards"] = grades.get("environment", torch.zeros(len(every)))
    if study.rewards is not None:
        with timed(seconds, "reward"):
            columns = {
                name: [row.get(name) for row in every]
                for name in dict.fromkeys(name for row in rows for name in row)
            }
            found = study.rewards.grade(shown, texts, ids, columns)
        made.timed_out += sum(found.timed_out.values())
        batch["rewards"], grades = batch["rewards"] + found.total, found.each
    made.names = list(grades)
    batch["each"] = torch.stack(list(grades.values()), 1)
    batch["shown"] = [
        {
            "prompt": prompt,
            "completion": text,
            "rewards": dict(zip(grades, each, strict=True)),
            "truncated": cut,
        }
        for prompt, text, each, cut in zip(
            shown, texts, batch["each"].tolist(), batch["truncated"].tolist(), strict=True
        )
    ]
    return made


def grpo_step(study: Study, seconds: dict[str, float]) -> tuple[dict[str, float], list[Any]]:
    """Generates, grades, scores what the loss needs, and trains."""
    config, policy, loss = study.config, study.backends.policy, study.loss
    grpo, size = config["grpo"], config["grpo"]["num_generations"]
    made, redrawn = _drawn(study, seconds)
    batch, total = made.batch, made.batch["rewards"]
    shown, each = batch.pop("shown"), batch.pop("each")
    metrics = generation_metrics(
        dict(zip(made.names, each.T.tolist(), strict=True)),
        total.tolist(),
        size,
        made.lengths,
        batch["truncated"].tolist(),
    )
    metrics["groups/redrawn"] = redrawn
    if made.timed_out:
        metrics["rewards/timed_out"] = made.timed_out
        if bool(each.isnan().all()):
            raise RewardError(
                "every call of the reward functions in this step took longer than "
                "rewards.deadline_s, so that no completion has a reward",
                fix="make the functions faster, or raise rewards.deadline_s",
            )
    metrics["weights_version"] = int(batch["weights_version"].max())
    if grpo.get("truncated", "keep") == "mask":
        batch["sample_mask"] = batch["sample_mask"] * ~batch["truncated"]
    batch["advantages"] = AdvantageEstimator.from_config(grpo.get("advantages", {}))(
        total, components=each, lengths=made.lengths, group_size=size
    )
    for row, advantage in zip(shown, batch["advantages"].tolist(), strict=True):
        row["advantage"] = advantage
    with timed(seconds, "score"):
        previous = not loss.on_policy and loss.ratio_denominator == "prev_logprobs"
        if previous or loss.reference_policy_kl_penalty:
            policy.prepare_for_lp_inference()
        if previous:
            batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
        if loss.reference_policy_kl_penalty:
            reference = policy.get_reference_policy_logprobs(batch)
            batch["reference_policy_logprobs"] = reference["reference_logprobs"]
    if grpo["updates"] > 1:
        batch = batch.select_indices(torch.randperm(batch.size, generator=study.generator))
    trained, figures = learn_step(study, batch, seconds)
    metrics |= figures
    metrics |= {theirs: trained[ours] for ours, theirs in _OF_TRL.items() if ours in trained}
    # The ratio of the engine's and the trainer's probability before the steps, over all of them.
    unmoved = previous or loss.on_policy or grpo["updates"] == 1
    if unmoved and (worst := trained["all_mb_metrics"].get("token_mult_prob_error_max")):
        metrics["logprob_error/max"] = math.log(max(worst))
    return metrics, shown


def _drawn(study: Study, seconds: dict[str, float]) -> tuple[Generated, int]:
    """What is generated for the prompts of a step, and how many of them were taken anew."""
    grpo, size = study.config["grpo"], study.config["grpo"]["num_generations"]
    missing, redrawn, parts = study.config["batch_size"], 0, list[Batch]()
    made = generate(study, study.draw(missing), size, seconds)
    if grpo.get("equal_rewards", "keep") == "keep":
        return made, 0
    timed_out, most = made.timed_out, grpo.get("max_redraws", 4)
    while True:
        equal = groups_without_spread(made.batch["rewards"], group_size=size)
        parts.append(made.batch.select_indices(~equal))
        missing = int(equal.sum()) // size
        if not missing or most == 0:
            break
        most, redrawn = most - 1, redrawn + missing
        made = generate(study, study.draw(missing), size, seconds)
        timed_out += made.timed_out
    if not sum(part.size for part in parts):
        raise RewardError(
            f"all completions of a prompt have the same reward, for each of {redrawn + missing} "
            f"prompts; the last ones have {made.batch['rewards'][0]:g}",
            fix="correct the reward functions, or take data that the model solves now and then; "
            "grpo.equal_rewards=keep trains on such prompts",
        )
    if missing:  # after the last attempt
        parts.append(made.batch.select_indices(equal))
    batch: Batch = BatchedDataDict.from_batches([part for part in parts if part.size])
    return Generated(batch, made.names, timed_out), redrawn


def learn_step(
    study: Study, batch: Batch, seconds: dict[str, float]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Trains on a batch; returns what ``train`` returned, and the figures of every method."""
    policy = study.backends.policy
    # Before it trains: from here on the step can neither be done again nor be left out.
    study.tokens += int(batch["input_lengths"].sum())
    with timed(seconds, "train"):
        policy.prepare_for_training()
        trained = policy.train(batch, study.loss)
        policy.finish_training()
    return trained, {
        "loss": float(trained["loss"]),
        "grad_norm": float(trained["grad_norm"]),
        "learning_rate": float(trained["lr"]),
        "num_tokens": study.tokens,
        "epoch": study.order.epoch,
    }


def data_step(study: Study, seconds: dict[str, float]) -> tuple[dict[str, float], list[Any]]:
    """SFT and DPO: learns the answers of some rows, or to prefer the chosen ones."""
    batch = _answers(study, study.draw(study.config["batch_size"]), seconds)
    trained, metrics = learn_step(study, batch, seconds)
    return metrics | {
        theirs: trained[ours] for ours, theirs in _OF_DPO.items() if ours in trained
    }, []


def _answers(study: Study, rows: Sequence[Mapping[str, Any]], seconds: dict[str, float]) -> Batch:
    """Prompts with their answers; for DPO with the chosen one and the rejected one in turn."""
    if study.config["method"] == "sft":
        return pad([study.encoder.answered(row) for row in rows], study.pad_id)
    batch = pad([one for row in rows for one in study.encoder.pair(row)], study.pad_id)
    with timed(seconds, "score"):
        study.backends.policy.prepare_for_lp_inference()
        reference = study.backends.policy.get_reference_policy_logprobs(batch)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]
    return batch


METHODS: dict[str, Step] = {"grpo": grpo_step, "dpo": data_step, "sft": data_step}


def evaluate(study: Study, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of an evaluation; it changes neither the policy nor what the steps draw.

    GRPO: the mean reward, and for k samples ``pass@1`` and ``pass@k``: the chance that one of k
    completions is correct, without bias from n samples (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code", eq. 1). DPO and SFT: the loss.
    """
    config, drawn = study.config, study.generator.get_state()
    options, samples = config["evaluation"], config["evaluation"].get("samples", 1)
    if config["method"] != "grpo":
        batch = _answers(study, rows, {})
        trained = study.backends.policy.train(batch, study.loss, eval_mode=True, gbs=batch.size)
        return {
            theirs: float(trained[ours])
            for ours, theirs in {"loss": "loss", **_OF_DPO}.items()
            if ours in trained
        }
    study.generator.manual_seed(config["seed"] + 1)
    rewards, lengths, truncated = list[float](), list[int](), list[bool]()
    # As many rows at a time as a step has.
    size = max(1, config["batch_size"] * config["grpo"]["num_generations"] // samples)
    try:
        for begin in range(0, len(rows), size):
            part = rows[begin : begin + size]
            made = generate(study, part, samples, {}, greedy=options.get("greedy", False))
            rewards += made.batch["rewards"].tolist()
            truncated += made.batch["truncated"].tolist()
            lengths += made.lengths
    finally:
        study.generator.set_state(drawn)
    total = torch.tensor(rewards)
    right = (total >= options.get("correct", 1.0)).view(-1, samples).sum(1)
    metrics = {
        "reward": float(total.mean()),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
    }
    for k in sorted({1, samples}):
        wrong = [math.comb(samples - int(n), k) / math.comb(samples, k) for n in right]
        metrics[f"pass@{k}"] = 1.0 - sum(wrong) / len(wrong)
    return metrics
