"""P5 and P8: training steps."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import torch
from allpairspy import AllPairs

from rl_conformance.checks.common import scores_after, trained_policy
from rl_conformance.continuing import dropping_model
from rl_conformance.expect import raises, require, same, same_tensor, within
from rl_conformance.losses import (
    LogitLikelihood,
    NanInARow,
    PairLoss,
    ReportingLoss,
    RowsLoss,
    SequenceLikelihood,
)
from rl_conformance.reference import make_reference
from rl_conformance.refits import run_refit
from rl_conformance.registry import check
from rl_conformance.several_ranks import policy_on
from rl_conformance.training import (
    AdvantageLoss,
    NegativeLogLikelihood,
    training_batch,
    training_config,
)
from rl_conformance.training_oracle import Step, TrainingOracle, update_error
from rl_conformance.weights import engine_weights, policy_weights, same_weights
from rl_core.errors import CapabilityError, TrainingError
from rl_core.plugins.discovery import load_object

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import ColocatablePolicyInterface, LossFunction


_LENGTHS = (12, 3, 30, 2, 17, 8, 21, 5)


_REQUIRED = {"loss", "grad_norm", "global_valid_toks", "global_valid_seqs", "lr"}


@check("P5")
def train_returns_the_declared_keys(ctx: Context) -> None:
    """loss, grad_norm, counts, lr and the loss function's own metrics."""
    data = training_batch(_LENGTHS)
    data["sample_mask"][1] = 0
    result = trained_policy(ctx).train(data, NegativeLogLikelihood())
    same(sorted(_REQUIRED - result.keys()), [], "keys missing in the result of train")
    tokens = float((data["token_mask"] * data["sample_mask"][:, None]).sum())
    same(float(result["global_valid_toks"]), tokens, "global_valid_toks")
    same(float(result["global_valid_seqs"]), 7.0, "global_valid_seqs")
    require(abs(float(result["lr"]) - 1e-3) < 1e-9, "lr, as configured", 0.001, result["lr"])
    got = float(result.get("conformance_tokens", "nan"))
    same(got, tokens, "conformance_tokens, the loss function's own metric")


_SPLITS: dict[str, dict[str, Any]] = {
    "mbs_1": {"mbs": 1, "config": {}},
    "mbs_2": {"mbs": 2, "config": {}},
    "mbs_8": {"mbs": 8, "config": {}},
    "dynamic": {
        "mbs": None,
        "config": {
            "dynamic_batching": {
                "enabled": True,
                "train_mb_tokens": 64,
                "sequence_length_round": 8,
            }
        },
    },
    "packed": {
        "mbs": None,
        "config": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64}},
    },
}


@check("P5", cases=_SPLITS)
def loss_and_gradient_agree_with_the_reference(
    ctx: Context, mbs: int | None, config: dict[str, Any]
) -> None:
    """Whatever the microbatches: the mean over all valid tokens, and its gradient's norm."""
    data = training_batch(_LENGTHS)
    data["token_mask"][2, 4:9] = 0
    result = trained_policy(ctx, **config).train(data, NegativeLogLikelihood(), mbs=mbs)
    loss, norm = ctx.oracle().nll(data["input_ids"], data["input_lengths"], data["token_mask"])
    ctx.measure_near("loss_error", result["loss"], loss, ctx.tolerance[0])
    got = result["grad_norm"]
    ctx.measure_near("grad_norm_relative_error", got, norm, _of_a_norm(ctx), norm)


def _of_a_norm(ctx: Context) -> float:
    """A gradient's norm depends on the order of sums, however exact the log-probs are declared."""
    return max(ctx.tolerance[0], 1e-4)


@check("P5", cases={name: case for name, case in _SPLITS.items() if name != "mbs_8"})
def updated_weights_do_not_depend_on_the_split(
    ctx: Context, mbs: int | None, config: dict[str, Any]
) -> None:
    """After two steps the log-probs are those of unsplit training."""
    data, probe = training_batch(_LENGTHS), training_batch((11, 6, 19), seed=9)
    whole, split = trained_policy(ctx), trained_policy(ctx, **config)
    for policy, size in ((whole, 8), (split, mbs)):
        for _ in range(2):
            policy.train(data, NegativeLogLikelihood(), mbs=size)
    ctx.measure_error(scores_after(split, probe), scores_after(whole, probe))


@check("P5")
def one_step_for_each_global_batch(ctx: Context) -> None:
    """Eight rows with gbs=4 are two steps of four rows."""
    data, probe = training_batch(_LENGTHS), training_batch((11, 6, 19), seed=9)
    at_once, in_turn = trained_policy(ctx), trained_policy(ctx)
    at_once.train(data, NegativeLogLikelihood(), gbs=4, mbs=2)
    for start in (0, 4):
        in_turn.train(data.slice(start, start + 4), NegativeLogLikelihood(), mbs=2)
    ctx.measure_error(scores_after(at_once, probe), scores_after(in_turn, probe))


@check("P5", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def two_ranks_train_as_one(ctx: Context) -> None:
    """Two workers with half of the global batch each: loss, norm and log-probs are those of one."""
    if not ctx.target.installed:
        ctx.not_run("the backend is not installed under a name", excused=True)
    # The ranks' counts of tokens are far apart: a mean over ranks is not the mean over tokens.
    data = _with_columns(training_batch(sorted(_LENGTHS, reverse=True)))
    probe = training_batch((11, 6, 19, 4), seed=9)
    alone = trained_policy(ctx)
    config = training_config() | {"model_name": str(ctx.model())}
    ranks: Any = ctx.closing(policy_on(ctx, 2, config, ctx.settings.dtype))
    ranks.prepare_for_training()
    for step in range(3):
        loss = RowsLoss(data)
        one, two = (p.train(data, loss) for p in (alone, ranks))
        processes = [two.get(f"process_of_row_{n}_max") for n in range(data.size)]
        both = {*processes} - {None}
        same(len(both), 1 if step == 2 else 2, f"ranks with rows that count in step {step}")
        _given_as_passed(two)
        if step == 1:  # in the next one nothing counts of what the first row's rank has
            own = torch.tensor([each == processes[0] for each in processes])
            data["sample_mask"][own] = 0
        ctx.measure_near("loss_error", two["loss"], one["loss"], ctx.tolerance[0])
        norm, got = float(one["grad_norm"]), two["grad_norm"]
        ctx.measure_near("grad_norm_relative_error", got, norm, _of_a_norm(ctx), norm)
        for key in ("global_valid_toks", "global_valid_seqs", "conformance_tokens", "lr"):
            same(float(two[key]), float(one[key]), f"{key} on two ranks, as on one")
    ctx.measure_error(scores_after(ranks, probe), scores_after(alone, probe))


@check("P8")
def nll_falls_on_one_batch(ctx: Context) -> None:
    """Ten steps on one batch lower its loss each time they are looked at."""
    data, policy = training_batch(_LENGTHS), trained_policy(ctx)
    losses = [float(policy.train(data, NegativeLogLikelihood())["loss"]) for _ in range(10)]
    falls = losses[9] < losses[4] < losses[0]
    require(falls, "losses of ten steps on one batch", "they fall", losses)


@check("P8")
def advantages_decide_the_direction(ctx: Context) -> None:
    """Rows with a positive advantage become likelier, the others less likely."""
    data = training_batch((9, 9, 9, 9), advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))
    policy = trained_policy(ctx)
    before = scores_after(policy, data).sum(1)
    policy.prepare_for_training()
    for _ in range(3):
        policy.train(data, AdvantageLoss())
    moved = (scores_after(policy, data).sum(1) - before) * data["advantages"]
    what = "change of each row's log-prob, times its advantage"
    require((moved > 0).all(), what, "all above 0", moved)


_OTHER_LENGTHS = (9, 3, 12, 1, 6)


#: Of an update: what the order of sums may change in AdamW's, which divides small gradients.
_OF_AN_UPDATE = 3e-2


def _pair(
    ctx: Context, config: dict[str, Any], path: Path | None = None, frozen: str = ""
) -> tuple[ColocatablePolicyInterface, TrainingOracle]:
    """A policy in float32 with just these keys, and the oracle of its training.

    Args:
        ctx: Of the check.
        config: The keys.
        path: The checkpoint of both; by default the main model.
        frozen: Parameters with this in their name require no gradient.
    """
    ctx.tolerance_of("float32")
    path = path or ctx.model()
    policy = ctx.workshop.build("policy", "float32", {"model_name": str(path), **config})
    oracle = TrainingOracle(path, config)
    if frozen and not hasattr(policy, "model"):
        ctx.not_run("the policy gives no access to its model", excused=True)
    for model in (oracle.oracle.model, policy.model) if frozen else ():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
    ctx.closing(policy).prepare_for_training()
    return policy, oracle


def _agrees(ctx: Context, result: dict[str, Any], step: Step) -> None:
    mean, largest = ctx.tolerance_of("float32")
    ctx.measure_near("loss_error", result["loss"], step.loss, largest)
    norm, got = step.grad_norm, result["grad_norm"]
    ctx.measure_near("grad_norm_relative_error", got, norm, max(mean, 1e-3), max(norm, 1e-6))
    rate = abs(float(result["lr"]) - step.lr) / step.lr
    require(rate < 1e-5, "lr of the step", step.lr, result["lr"])


def _moved_alike(ctx: Context, policy: ColocatablePolicyInterface, oracle: TrainingOracle) -> None:
    error, name = update_error(policy_weights(policy), oracle.weights(), oracle.start)
    ctx.measure(f"update_relative_error of {name}", error, _OF_AN_UPDATE)


_PLAIN: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}


#: With it the size of a gradient shows in the step, as it does not in AdamW's usual one.
_BLUNT: dict[str, Any] = {"lr": 0.1, "eps": 0.1, "weight_decay": 0.0}


_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": _PLAIN},
    "betas": {"optimizer": _PLAIN | {"betas": (0.5, 0.8)}},
    "eps_and_no_clipping": {"optimizer": _BLUNT, "max_grad_norm": None},
    "clipping": {"optimizer": _BLUNT, "max_grad_norm": 3.0},
    "clipping_above_the_norm": {"optimizer": _BLUNT, "max_grad_norm": 1e6},
    "clipping_by_default": {"optimizer": _BLUNT},
    "weight_decay": {"optimizer": _PLAIN | {"weight_decay": 5.0}},
    "weight_decay_by_default": {"optimizer": {"lr": 10.0, "eps": 1e3}},
    "temperature": {"optimizer": _BLUNT, "temperature": 0.6},
    "all_by_default": {},
}


@check("P5", cases={name: {"config": config} for name, config in _OPTIONS.items()})
def every_step_is_the_one_configured(ctx: Context, config: dict[str, Any]) -> None:
    """Four steps of AdamW: losses, norms before clipping, and how far each tensor moved."""
    policy, oracle = _pair(ctx, config)
    for seed in range(4):
        data = training_batch(_OTHER_LENGTHS, seed=seed)
        data["sample_mask"][seed] = 0
        _agrees(ctx, policy.train(data, NegativeLogLikelihood(), mbs=2), oracle.step(data))
    _moved_alike(ctx, policy, oracle)


_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "qwen3"},
    "experts": {
        "family": "qwen3",
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {"family": "gpt_oss"},
    "deepseek_v3": {"family": "deepseek_v3"},
}


@check("P5", cases={name: {"options": options} for name, options in _FAMILIES.items()})
def every_family_steps_as_configured(ctx: Context, options: dict[str, Any]) -> None:
    """Also where heads are not tied, where queries and keys have norms, and with experts."""
    decaying = {"optimizer": _PLAIN | {"weight_decay": 5.0}}
    with ctx.refusable(options["family"]):
        policy, oracle = _pair(ctx, decaying, ctx.model(**options))
    for seed in range(2):
        data = training_batch(_OTHER_LENGTHS, seed=seed)
        _agrees(ctx, policy.train(data, NegativeLogLikelihood()), oracle.step(data))
    _moved_alike(ctx, policy, oracle)


@check("P5")
def frozen_parameters_stay(ctx: Context) -> None:
    """Steps and norms are those of the other parameters; a refit sends the frozen ones, too."""
    path = ctx.model("llama")
    decaying = {"optimizer": _PLAIN | {"weight_decay": 5.0}}
    policy, oracle = _pair(ctx, decaying, path, frozen="embed")
    for seed in range(2):
        data = training_batch(_OTHER_LENGTHS, seed=seed)
        _agrees(ctx, policy.train(data, NegativeLogLikelihood()), oracle.step(data))
    _moved_alike(ctx, policy, oracle)
    frozen = "model.embed_tokens.weight"
    same_tensor(policy_weights(policy)[frozen], oracle.start[frozen], f"frozen {frozen}")
    other = {"model_name": str(ctx.model("llama", seed=1)), "device": ctx.settings.device}
    engine = ctx.closing(make_reference("generation", other))
    run_refit(policy, engine)
    same_weights(engine_weights(engine), policy_weights(policy), "weights after a refit")


_FALL: dict[str, Any] = {"warmup_steps": 2, "total_steps": 5, "min_lr_ratio": 0.25}


_SCHEDULES: dict[str, dict[str, Any]] = {
    "warmup": {"name": "constant", "warmup_steps": 3},
    "linear": {"name": "linear", **_FALL},
    "cosine": {"name": "cosine", **_FALL},
    "cosine_to_zero": {"name": "cosine", "total_steps": 8},
}


@check("P5", cases={name: {"schedule": schedule} for name, schedule in _SCHEDULES.items()})
def every_step_has_its_rate(ctx: Context, schedule: dict[str, Any]) -> None:
    """Seven steps have the schedule's rates, beyond its end too, and are as long as those rates."""
    policy, oracle = _pair(ctx, {"optimizer": _PLAIN, "scheduler": schedule})
    for seed in range(7):
        data = training_batch((6, 4), seed=seed)
        if seed == 3:  # only steps count
            policy.train(data, NegativeLogLikelihood(), eval_mode=True)
        _agrees(ctx, policy.train(data, NegativeLogLikelihood()), oracle.step(data))
    _moved_alike(ctx, policy, oracle)


@check("P5", cases={"in_the_call": {"configured": False}, "configured": {"configured": True}})
def every_global_batch_is_a_step_of_its_own(ctx: Context, configured: bool) -> None:
    """Each is normalised by its own counts, one without any is no step, and all are in the result.

    Rows of 1 to 20 tokens in batches of 2, of which one is masked and one ends in a masked row.
    """
    schedule = {"scheduler": {"name": "linear", "total_steps": 8}}
    size: dict[str, Any] = {"train_global_batch_size": 2} if configured else {}
    policy, oracle = _pair(ctx, {"optimizer": _BLUNT, **schedule, **size})
    data = training_batch((20, 2, 7, 9, 1, 12, 5, 3))
    data["sample_mask"][[2, 3, 7]] = 0
    gbs = None if configured else 2
    result = policy.train(data, NegativeLogLikelihood(), gbs=gbs, mbs=1)
    steps, counts = [], []
    for start in range(0, 8, 2):
        batch = data.slice(start, start + 2)
        steps.append(oracle.step(batch))
        counts.append(float((batch["token_mask"] * batch["sample_mask"][:, None]).sum()))
    history = result.get("step_metrics", {})
    parts = result.get("all_mb_metrics", {})
    for key in ("loss", "grad_norm"):
        total = sum(float(value) for value in parts.get(key, []))
        mean = sum(float(value) for value in history.get(key, [])) / 4
        ctx.measure_near(f"{key}, added up", total, mean, 1e-6 + 1e-5 * abs(mean))
    for position, (step, count) in enumerate(zip(steps, counts, strict=True)):
        values = {key: history.get(key, [])[position : position + 1] for key in _HISTORY}
        want = f"a value of {', '.join(_HISTORY)} for step {position}"
        require(all(values.values()), "step_metrics", want, history)
        one = {key: value[0] for key, value in values.items()}
        _agrees(ctx, one, step)
        same(float(one["global_valid_toks"]), count, f"global_valid_toks of step {position}")
    _agrees(ctx, result, steps[-1])
    same(float(result["global_valid_toks"]), counts[-1], "global_valid_toks, of the last step")
    _moved_alike(ctx, policy, oracle)


_HISTORY = ("loss", "grad_norm", "lr", "global_valid_toks", "global_valid_seqs")


@check("P5")
def policies_share_nothing(ctx: Context) -> None:
    """Two that train in turns, with different settings, train as each does alone."""
    one: dict[str, Any] = {
        "optimizer": _PLAIN,
        "scheduler": {"name": "linear", "total_steps": 4},
        "max_grad_norm": 1.0,
    }
    two: dict[str, Any] = {"optimizer": _BLUNT, "max_grad_norm": 1e3, "temperature": 0.5}
    (first, expected), (second, other) = _pair(ctx, one), _pair(ctx, two)
    third = ctx.fresh_policy()
    for seed in range(3):
        data = training_batch(_OTHER_LENGTHS, seed=seed)
        _agrees(ctx, first.train(data, NegativeLogLikelihood()), expected.step(data))
        third.shutdown()
        data = training_batch((5, 4), seed=seed)
        _agrees(ctx, second.train(data, NegativeLogLikelihood()), other.step(data))
    _moved_alike(ctx, first, expected)
    _moved_alike(ctx, second, other)


@check("P5")
def dropout_is_drawn_anew_and_from_the_seed(ctx: Context) -> None:
    """A seed gives the same losses again and another seed others; no two steps draw the same."""
    path = str(ctx.model("qwen2", attention_dropout=0.5))
    data = training_batch((12, 9, 17))
    losses = {}
    still = training_config()["optimizer"] | {"lr": 0.0}
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        torch.manual_seed(7 if name == "again" else 5)
        policy = ctx.fresh_policy(model_name=path, seed=seed, optimizer=still)
        policy.prepare_for_training()
        # Rows do not change and weights do not move: what differs is what was dropped.
        losses[name] = [float(policy.train(data, NegativeLogLikelihood())["loss"]) for _ in "123"]
        plain = policy.train(data, NegativeLogLikelihood(), eval_mode=True)["loss"]
        four = [*losses[name], float(plain)]
        require(len({*four}) == 4, "losses of 3 steps and of eval_mode", "all different", four)
        policy.shutdown()
    same(losses["again"], losses["first"], "losses of a second policy with seed 3")
    differ = losses["other"] != losses["first"]
    require(differ, "losses of seeds 3 and 4", "different", losses)


_THRIFT: dict[str, dict[str, Any]] = {
    "gradient_checkpointing": {"key": "gradient_checkpointing", "value": True},
    "recomputed_attention": {"key": "activation_recompute", "value": "selective"},
    "recomputed_layers": {"key": "activation_recompute", "value": "full"},
    "a_second_model_as_reference": {"key": "reference", "value": "copy"},
}


@check("P5", cases=_THRIFT)
def what_saves_memory_changes_no_step(ctx: Context, key: str, value: Any) -> None:
    """A key that a backend has for its use of memory gives the same steps, with dropout, too."""
    if key not in ctx.target.config_keys["policy"]:
        ctx.not_run(f"the backend has no {key}", excused=True)
    path = dropping_model(ctx)
    policy, _ = _pair(ctx, {"optimizer": _BLUNT}, path)
    thrifty, start = _pair(ctx, {"optimizer": _BLUNT, key: value}, path)
    for seed in range(2):
        data = training_batch(_OTHER_LENGTHS, seed=seed)
        one, two = (p.train(data, NegativeLogLikelihood(), mbs=3) for p in (policy, thrifty))
        _agrees(ctx, two, Step(**{each: float(one[each]) for each in ("loss", "grad_norm", "lr")}))
    error, name = update_error(policy_weights(thrifty), policy_weights(policy), start.start)
    ctx.measure(f"update_relative_error of {name}", error, _OF_AN_UPDATE)


@check("P5", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def ranks_drop_different_units(ctx: Context) -> None:
    """Of one row on each of two ranks, dropout alone makes the log-probs differ."""
    if not ctx.target.installed:
        ctx.not_run("the backend is not installed under a name", excused=True)
    data = training_batch((12,)).repeat_interleave(2)
    data["row"] = torch.arange(2)
    config = training_config() | {"model_name": str(dropping_model(ctx))}
    policy: Any = ctx.closing(policy_on(ctx, 2, config, "float32"))
    policy.prepare_for_training()
    for eval_mode in (True, False):
        result = policy.train(data, RowsLoss(data), eval_mode)
        processes = {result[f"process_of_row_{row}_max"] for row in range(2)}
        same(len(processes), 2, "processes that have one of the two rows each")
        likelihoods = [float(result[f"likelihood_of_row_{row}"]) for row in range(2)]
        apart = abs(likelihoods[0] - likelihoods[1]) > 1e-3
        same(apart, not eval_mode, f"whether dropout differs between ranks, {eval_mode=}")


#: Options that every policy has, and some that a few have; where a value is None, there is no key.
_PAIRED: dict[str, Sequence[Any]] = {
    "batching": (
        {"train_micro_batch_size": 1},
        {"train_micro_batch_size": 3, "logprob_batch_size": 2},
        {"dynamic_batching": {"enabled": True}},
        {
            "dynamic_batching": {
                "enabled": True,
                "train_mb_tokens": 40,
                "logprob_mb_tokens": 24,
                "sequence_length_round": 4,
            }
        },
        *(
            {
                "sequence_packing": {
                    "enabled": True,
                    "train_mb_tokens": 40,
                    "algorithm": algorithm,
                    "sequence_length_pad_multiple": multiple,
                }
            }
            for multiple, algorithm in enumerate(
                (
                    "first_fit_decreasing",
                    "modified_first_fit_decreasing",
                    "first_fit_shuffle",
                    "concatenative",
                ),
                1,
            )
        ),
    ),
    "family": ("qwen2", "llama", "qwen3"),
    "loss": (NegativeLogLikelihood(), LogitLikelihood()),
    "optimizer": (_PLAIN, _PLAIN | {"betas": (0.5, 0.8), "weight_decay": 5.0}, _BLUNT),
    "scheduler": (
        None,
        {"name": "linear", "warmup_steps": 2, "total_steps": 5, "min_lr_ratio": 0.25},
        {"name": "cosine", "total_steps": 8},
    ),
    "max_grad_norm": (None, 3.0),
    "temperature": (None, 0.6),
    "non_finite": ("raise", "skip"),
    "train_global_batch_size": (None, 3),
    "gradient_checkpointing": (False, True),
    "activation_recompute": ("none", "selective", "full"),
    "reference": ("swap", "copy", "none"),
    "refit_experts": ("stacked", "separate"),
    "attn_implementation": ("sdpa", "eager"),
    "dtensor_cfg": (None, {"enabled": True}),
}


@check("P5", timeout_s=300.0)
def any_two_options_go_together(ctx: Context) -> None:
    """With every pair of values, steps, log-probs and the reference are those of the oracle."""
    types = get_type_hints(load_object(ctx.manifest.configs["policy"]))
    types |= dict.fromkeys(("batching", "family", "loss"))
    legal = {key: get_args(kind) for key, kind in types.items() if get_origin(kind) is Literal}
    paired = OrderedDict(
        (key, [value for value in values if value in legal.get(key, values)])
        for key, values in _PAIRED.items()
        if key in types
    )
    data = training_batch((9, 3, 12, 1, 6, 17))
    data["marked"] = data["sample_mask"].clone()
    data["sample_mask"][1] = 0
    for row in AllPairs(paired):
        chosen = row._asdict()
        with within(f"with {chosen}"):
            path, loss_fn = ctx.model(chosen.pop("family")), chosen.pop("loss")
            config = chosen.pop("batching")
            config = config | {key: value for key, value in chosen.items() if value is not None}
            _steps_with(ctx, data, loss_fn, path, config)


def _steps_with(
    ctx: Context,
    data: BatchedDataDict[Any],
    loss_fn: LossFunction,
    path: Path,
    config: dict[str, Any],
) -> None:
    policy, oracle = _pair(ctx, config, path)
    with nullcontext() if config["non_finite"] == "skip" else raises(TrainingError):
        policy.train(data, NanInARow())
    size = config.get("train_global_batch_size", data.size)
    for _ in range(2):
        result = policy.train(data, loss_fn)
        for start in range(0, data.size, size):
            step = oracle.step(data.slice(start, start + size))
        _agrees(ctx, result, step)
    _moved_alike(ctx, policy, oracle)
    heat = config.get("temperature", 1.0)
    rows = data["input_ids"], data["input_lengths"], heat
    oracle.oracle.model.load_state_dict(policy_weights(policy))
    expected = oracle.oracle.batch_logprobs(*rows)
    ctx.measure_error(scores_after(policy, data), expected, scale=2 / heat)
    if config.get("reference") == "none":
        with raises(CapabilityError):
            policy.get_reference_policy_logprobs(data)
    else:
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        expected = ctx.oracle(path).batch_logprobs(*rows)
        ctx.measure_error(reference, expected, scale=2 / heat)
    policy.shutdown()


_MORE_LENGTHS = (12, 3, 30, 1, 17, 8, 2)


_TOKENS = {"enabled": True, "train_mb_tokens": 40}


_OTHER_SPLITS: dict[str, dict[str, Any]] = {
    "mbs_1": {"mbs": 1, "config": {}},
    "mbs_3": {"mbs": 3, "config": {}},
    "dynamic": {
        "mbs": None,
        "config": {"dynamic_batching": {**_TOKENS, "sequence_length_round": 4}},
    },
    "packed": {"mbs": None, "config": {"sequence_packing": _TOKENS}},
    "configured": {"mbs": None, "config": {"train_micro_batch_size": 2}},
}


@check("P5", cases=_OTHER_SPLITS)
def a_loss_sees_the_same_data_whatever_the_split(
    ctx: Context, mbs: int | None, config: dict[str, Any]
) -> None:
    """Every row once, with its own columns, and the counts of the whole batch; metrics add up."""
    data = training_batch(_MORE_LENGTHS)
    data["sample_mask"][[0, 4]] = 0
    data["token_mask"][2, 5:9] = 0
    data["token_mask"][:, 0] = 1  # what nothing comes before does not count
    data["echo"] = data["input_ids"].clone()
    _with_columns(data)
    before = {key: value.clone() for key, value in data.items()}
    tokens = float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
    expected = {
        "seen_rows": 5.0,
        "seen_row_numbers": 1.0 + 2 + 3 + 5 + 6,
        "seen_tokens": tokens,
        "seen_all_tokens_min": tokens,
        "seen_all_tokens_max": tokens,
        "seen_all_rows_min": 5.0,
        "seen_all_rows_max": 5.0,
        "seen_shortest_min": 1.0,
        "seen_longest_max": 30.0,
        "seen_strangers_max": 0.0,
        "seen_unscored_max": 0.0,
        "seen_widths_max": 0.0,
        "global_valid_toks": tokens,
        "global_valid_seqs": 5.0,
    }
    policy = trained_policy(ctx, **config)
    for eval_mode in (True, False):
        result = policy.train(data, ReportingLoss(), eval_mode, mbs=mbs)
        got = {key: float(result.get(key, "nan")) for key in expected}
        off = {key: got[key] for key in got if abs(got[key] - expected[key]) > 1e-4}
        wanted = {key: expected[key] for key in off}
        same(off, wanted, f"metrics of train with eval_mode={eval_mode}, within 1e-4")
        loss = float(result["loss"])
        ctx.measure_near("metric_error", result["seen_likelihood"], -loss, 1e-4)
    _given_as_passed(policy.train(data, RowsLoss(data), mbs=mbs))
    for key, value in before.items():
        same_tensor(data[key], value, f"column {key} of the batch after train")


def _with_columns(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Adds columns of the shapes and dtypes that losses read, with values that use all bits."""
    noise = torch.randn(data["input_ids"].shape, generator=torch.Generator().manual_seed(3))
    data["row"] = torch.arange(data.size)
    data.update(advantages=noise, prev_logprobs=-noise.abs(), chosen=noise > 0)
    data.update(weight=noise[:, 0].double() / 3, identity=data["row"] + 2**60)
    return data


def _given_as_passed(result: dict[str, Any]) -> None:
    changes = {key: float(value) for key, value in result.items() if key.startswith("changes_of_")}
    same(changes, {}, "rows of which a RowsLoss got a column with other values than were passed")


_LOSSES = {
    "by_sequence": {"loss_fn": SequenceLikelihood(), "temperature": 1.0},
    "of_pairs": {"loss_fn": PairLoss(), "temperature": 1.0},
    "of_logits": {"loss_fn": LogitLikelihood(), "temperature": 1.0},
    "of_logits_with_a_temperature": {"loss_fn": LogitLikelihood(), "temperature": 0.6},
    "of_logprobs_with_a_temperature": {"loss_fn": NegativeLogLikelihood(), "temperature": 0.6},
}


@check("P5", cases=_LOSSES)
def every_kind_of_loss_is_split(ctx: Context, loss_fn: LossFunction, temperature: float) -> None:
    """Of sequences, of pairs that stay together, of logits: the loss is the whole batch's."""
    data = training_batch((12, 3, 30, 1, 17, 8, 2, 9))
    data["sample_mask"][[2, 3]] = 0
    ids, lengths = data["input_ids"], data["input_lengths"]
    scores = ctx.oracle().batch_logprobs(ids, lengths, temperature)
    counts = {
        "global_valid_seqs": data["sample_mask"].sum(),
        "global_valid_toks": (data["token_mask"] * data["sample_mask"][:, None]).sum(),
    }
    logits = isinstance(loss_fn, LogitLikelihood)
    expected = float((NegativeLogLikelihood() if logits else loss_fn)(scores, data, **counts)[0])
    allowed = ctx.tolerance[1] / temperature if isinstance(loss_fn, PairLoss) else None
    for split in ("mbs_1", "mbs_3", "packed"):
        config, mbs = _OTHER_SPLITS[split]["config"], _OTHER_SPLITS[split]["mbs"]
        policy = trained_policy(ctx, temperature=temperature, **config)
        result = policy.train(data, loss_fn, mbs=mbs)
        most = allowed or ctx.tolerance[0] / temperature
        ctx.measure_near("loss_error", result["loss"], expected, most)
