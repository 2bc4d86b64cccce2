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

from rl_core import BatchedDataDict, training_batch
from rl_core.errors import ConfigError
from rl_losses import AdvantageEstimator, groups_without_spread
from rl_train.config import LOSSES
from rl_train.data import import_function
from rl_train.encoding import pad
from rl_train.episodes import TurnEncoder, play, training_rows
from rl_train.metrics import generation_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_train.backends import Backends
    from rl_train.config import RunConfig
    from rl_train.data import Order
    from rl_train.encoding import Encoder
    from rl_train.rewards import Grades, Rewards

__all__ = [
    "METHODS",
    "Generated",
    "Step",
    "Study",
    "environment_of",
    "evaluate",
    "learn_step",
    "loss_of",
]

#: Does one step; returns its metrics and some completions for the log.
Step: TypeAlias = Callable[["Study", "dict[str, float]"], "tuple[dict[str, float], list[Any]]"]


@dataclass
class Study:
    """All that a step needs.

    Attributes:
        config: Of the run.
        backends: Policy and engine.
        rows: The data.
        encoder: From rows to tokens.
        order: Which rows come next.
        tokenizer: The model's.
        generator: All random numbers of the loop are drawn from it.
        loss: The method's.
        rewards: For GRPO; None if an environment alone gives rewards.
        tokens: Tokens of all steps so far.
    """

    config: RunConfig
    backends: Backends
    rows: Sequence[Mapping[str, Any]]
    encoder: Encoder
    order: Order
    tokenizer: Any
    generator: torch.Generator
    loss: Any
    rewards: Rewards | None = None
    tokens: int = 0

    @property
    def pad_id(self) -> int:
        """Fills rows on the right."""
        pad_id = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id or 0) if pad_id is None else int(pad_id)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


@dataclass
class Generated:
    """What was generated for some prompts, and its grades.

    Attributes:
        batch: The training batch, without advantages.
        grades: Of its rows.
        shown: For each row what a log shows.
        lengths: Tokens that the model generated, for each row.
        seconds: Of generating and of grading.
    """

    batch: BatchedDataDict[Any]
    grades: Grades
    shown: list[dict[str, Any]]
    lengths: list[int]
    seconds: dict[str, float] = field(default_factory=dict)


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
    *,
    greedy: bool = False,
) -> Generated:
    """Generates ``samples`` completions (or episodes) of each row, and grades them."""
    seconds: dict[str, float] = {}
    generation = study.backends.generation
    every = [row for row in rows for _ in range(samples)]
    ids = [study.encoder.prompt(row) for row in rows]
    seeds = torch.randint(0, 2**62, (len(every),), generator=study.generator)
    environment, make = study.config.get("environment"), environment_of(study.config)
    extra = torch.zeros(len(every))
    with timed(seconds, "generate"):
        generation.prepare_for_generation()
        if environment and make:
            episodes = play(
                generation,
                [one for one in ids for _ in range(samples)],
                every,
                seeds.tolist(),
                make=make,
                encode=TurnEncoder(
                    study.tokenizer,
                    chat=study.encoder.chat,
                    template={
                        "chat_template": study.encoder.template,
                        **study.config["data"].get("chat_template_kwargs", {}),
                    },
                ),
                decode=study.decode,
                room=study.config["generation"].get("max_model_len") or 2**31,
                max_turns=environment.get("max_turns", 8),
                workers=environment.get("workers"),
            )
            batch = training_rows(episodes, study.pad_id)
            extra = torch.tensor([one.reward for one in episodes])
            texts = ["\n".join(one.text) for one in episodes]
        else:
            prompts = pad(ids, study.pad_id).get_dict()
            given: BatchedDataDict[Any] = BatchedDataDict(
                {k: prompts[k] for k in ("input_ids", "input_lengths")}
            )
            given = given.repeat_interleave(samples)
            given["seed"] = seeds
            output = generation.generate(given, greedy)
            batch = training_batch(output)
            texts = []
        generation.finish_generation()
    mask = batch["token_mask"].bool()
    made = [row[where].tolist() for row, where in zip(batch["input_ids"], mask, strict=True)]
    texts = texts or [study.decode(one) for one in made]
    with timed(seconds, "reward"):
        prompts_shown = [study.encoder.shown(row) for row in every]
        grades = _grade(study.rewards, prompts_shown, texts, made, every, extra)
    shown = [
        {
            "prompt": prompts_shown[i],
            "completion": texts[i],
            "rewards": {name: float(value[i]) for name, value in grades.each.items()},
            "truncated": bool(batch["truncated"][i]),
        }
        for i in range(len(every))
    ]
    return Generated(batch, grades, shown, [len(one) for one in made], seconds)


def _grade(
    rewards: Rewards | None,
    prompts: Sequence[Any],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    rows: Sequence[Mapping[str, Any]],
    extra: torch.Tensor,
) -> Grades:
    from rl_train.rewards import Grades

    if rewards is None:
        return Grades(extra, {"environment": extra}, {}, 0.0)
    names = {name for row in rows for name in row}
    columns = {name: [row.get(name) for row in rows] for name in names}
    grades = rewards.grade(prompts, texts, ids, columns)
    return Grades(grades.total + extra, grades.each, grades.timed_out, grades.seconds)


def grpo_step(study: Study, seconds: dict[str, float]) -> tuple[dict[str, float], list[Any]]:
    """Generates, grades, scores what the loss needs, and trains."""
    config, policy = study.config, study.backends.policy
    grpo, size = config["grpo"], config["grpo"]["num_generations"]
    parts: list[Generated] = []
    equal: list[Generated] = []
    missing, redrawn = config["batch_size"], 0
    for attempt in range(1 + grpo.get("max_redraws", 4)):
        drawn = [study.rows[i] for i in study.order.take(missing)]
        part = generate(study, drawn, size)
        for phase, took in part.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + took
        if grpo.get("equal_rewards", "keep") == "keep":
            parts.append(part)
            break
        flat = groups_without_spread(part.grades.total, group_size=size)
        spread = ~flat.view(-1, size)[:, 0]
        parts.append(_groups(part, spread, size))
        equal.append(_groups(part, ~spread, size))
        missing = int((~spread).sum())
        if not missing:
            break
        redrawn += missing if attempt < grpo.get("max_redraws", 4) else 0
    else:  # what is missing after the last attempt are prompts of equal rewards
        parts.append(_groups(equal[-1], torch.ones(missing, dtype=torch.bool), size))
    made = parts[0] if len(parts) == 1 else _joined(parts)
    total = made.grades.total
    metrics = generation_metrics(
        {name: values.tolist() for name, values in made.grades.each.items()},
        total.tolist(),
        size,
        made.lengths,
        made.batch["truncated"].tolist(),
    )
    metrics["groups/redrawn"] = redrawn
    if late := sum(made.grades.timed_out.values()):
        metrics["rewards/timed_out"] = late
    batch = made.batch
    metrics["weights_version"] = int(batch["weights_version"].max())
    if grpo.get("truncated", "keep") == "mask":
        batch["sample_mask"] = batch["sample_mask"] * ~batch["truncated"]
    batch["rewards"] = total
    batch["advantages"] = AdvantageEstimator.from_config(grpo.get("advantages", {}))(
        total,
        components=torch.stack(list(made.grades.each.values()), dim=1),
        lengths=made.lengths,
        group_size=size,
    )
    for row, advantage in zip(made.shown, batch["advantages"].tolist(), strict=True):
        row["advantage"] = advantage
    with timed(seconds, "score"):
        loss = study.loss
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
    return metrics, made.shown


def _groups(part: Generated, which: torch.Tensor, size: int) -> Generated:
    """The chosen groups of what was generated."""
    index = which.repeat_interleave(size).nonzero().flatten()
    rows = index.tolist()
    grades = type(part.grades)(
        part.grades.total[index],
        {name: values[index] for name, values in part.grades.each.items()},
        part.grades.timed_out,
        part.grades.seconds,
    )
    shown, lengths = [part.shown[i] for i in rows], [part.lengths[i] for i in rows]
    return Generated(part.batch.select_indices(index), grades, shown, lengths)


def _joined(parts: Sequence[Generated]) -> Generated:
    """Several of them as one; those without rows do not count."""
    some = [part for part in parts if part.lengths]
    first = some[0].grades
    late = {n: sum(p.grades.timed_out.get(n, 0) for p in some) for n in first.timed_out}
    grades = type(first)(
        torch.cat([part.grades.total for part in some]),
        {name: torch.cat([part.grades.each[name] for part in some]) for name in first.each},
        late,
        sum(part.grades.seconds for part in some),
    )
    batch: BatchedDataDict[Any] = BatchedDataDict.from_batches([part.batch for part in some])
    shown = [row for part in some for row in part.shown]
    return Generated(batch, grades, shown, [n for part in some for n in part.lengths])


def learn_step(
    study: Study, batch: BatchedDataDict[Any], seconds: dict[str, float]
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


def sft_step(study: Study, seconds: dict[str, float]) -> tuple[dict[str, float], list[Any]]:
    """Learns the answers of some rows."""
    batch = answered(study, [study.rows[i] for i in study.order.take(study.config["batch_size"])])
    return learn_step(study, batch, seconds)[1], []


def dpo_step(study: Study, seconds: dict[str, float]) -> tuple[dict[str, float], list[Any]]:
    """Learns to prefer the chosen answers of some rows."""
    batch = pairs(study, [study.rows[i] for i in study.order.take(study.config["batch_size"])])
    with timed(seconds, "score"):
        study.backends.policy.prepare_for_lp_inference()
        reference = study.backends.policy.get_reference_policy_logprobs(batch)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]
    trained, metrics = learn_step(study, batch, seconds)
    return {**metrics, **_preferences(trained)}, []


def _preferences(trained: Mapping[str, Any]) -> dict[str, float]:
    return {
        "rewards/chosen": trained["rewards_chosen"],
        "rewards/rejected": trained["rewards_rejected"],
        "rewards/margins": trained["rewards_margin"],
        "rewards/accuracies": trained["accuracy"],
    }


def answered(study: Study, rows: Sequence[Mapping[str, Any]]) -> BatchedDataDict[Any]:
    """Prompts with their answers."""
    return pad([study.encoder.answered(row) for row in rows], study.pad_id)


def pairs(study: Study, rows: Sequence[Mapping[str, Any]]) -> BatchedDataDict[Any]:
    """Prompts with the chosen answer, and with the rejected one, in turn."""
    return pad([one for row in rows for one in study.encoder.pair(row)], study.pad_id)


#: Metrics of the loss, and what TRL calls them.
_OF_TRL = {"kl": "kl", "approx_entropy": "entropy", "clip_fraction": "clip_ratio/region_mean"}
METHODS: dict[str, Step] = {"grpo": grpo_step, "dpo": dpo_step, "sft": sft_step}


def evaluate(study: Study, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of an evaluation; it changes neither the policy nor what the steps draw.

    GRPO: the mean reward, and for k samples ``pass@1`` and ``pass@k``: the chance that one of k
    completions is correct, without bias from n samples (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code", eq. 1). DPO and SFT: the loss.
    """
    config = study.config
    options = config["evaluation"]
    drawn = study.generator.get_state()
    study.generator.manual_seed(config["seed"] + 1)
    try:
        if config["method"] != "grpo":
            return _evaluate_loss(study, rows)
        samples = options.get("samples", 1)
        made = generate(study, rows, samples, greedy=options.get("greedy", False))
        right = (made.grades.total >= options.get("correct", 1.0)).view(-1, samples).sum(1)
        metrics = {"reward": float(made.grades.total.mean())}
        for k in sorted({1, samples}):
            every = math.comb(samples, k)
            wrong = [math.comb(samples - int(n), k) / every for n in right]
            metrics[f"pass@{k}"] = 1.0 - sum(wrong) / len(wrong)
        metrics["completions/mean_length"] = sum(made.lengths) / len(made.lengths)
        metrics["completions/clipped_ratio"] = float(made.batch["truncated"].float().mean())
        return metrics
    finally:
        study.generator.set_state(drawn)


def _evaluate_loss(study: Study, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    policy, preference = study.backends.policy, study.config["method"] == "dpo"
    batch = pairs(study, rows) if preference else answered(study, rows)
    if preference:
        reference = policy.get_reference_policy_logprobs(batch)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]
    trained = policy.train(batch, study.loss, eval_mode=True, gbs=batch.size)
    metrics = {"loss": float(trained["loss"])}
    return {**metrics, **_preferences(trained)} if preference else metrics
