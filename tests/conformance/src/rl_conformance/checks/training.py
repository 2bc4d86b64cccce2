"""P5 to P8 and P10: what a training step does, and what it must not do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.continuing import repeatable
from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.registry import check, refusal
from rl_conformance.training import (
    AdvantageLoss,
    InfiniteGradientLoss,
    NanLoss,
    NegativeLogLikelihood,
    training_batch,
    training_config,
)
from rl_conformance.weights import policy_weights, same_weights
from rl_core.errors import TrainingError

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import ColocatablePolicyInterface, LossFunction

_LENGTHS = (12, 3, 30, 2, 17, 8, 21, 5)
_REQUIRED = {"loss", "grad_norm", "global_valid_toks", "global_valid_seqs", "lr"}


def _trained(ctx: Context, **config: Any) -> ColocatablePolicyInterface:
    """A policy that is ready to train."""
    policy = ctx.fresh_policy(**config)
    policy.prepare_for_training()
    return policy


def _scores(policy: ColocatablePolicyInterface, data: BatchedDataDict[Any]) -> torch.Tensor:
    policy.prepare_for_lp_inference()
    scores: torch.Tensor = policy.get_logprobs(data)["logprobs"]
    return scores


@check("P5")
def train_returns_the_declared_keys(ctx: Context) -> None:
    """loss, grad_norm, counts, lr and the loss function's own metrics."""
    data = training_batch(_LENGTHS)
    data["sample_mask"][1] = 0
    result = _trained(ctx).train(data, NegativeLogLikelihood())
    require(result.keys() >= _REQUIRED, f"missing: {sorted(_REQUIRED - result.keys())}")
    tokens = float((data["token_mask"] * data["sample_mask"][:, None]).sum())
    require(float(result["global_valid_toks"]) == tokens, f"not {tokens} valid tokens: {result}")
    require(float(result["global_valid_seqs"]) == 7, f"not 7 valid sequences: {result}")
    require(abs(float(result["lr"]) - 1e-3) < 1e-9, f"lr is {result['lr']}, configured was 0.001")
    got = float(result.get("conformance_tokens", "nan"))
    require(got == tokens, f"the loss function's metric is {got}, not {tokens}")


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
    result = _trained(ctx, **config).train(data, NegativeLogLikelihood(), mbs=mbs)
    loss, norm = ctx.oracle().nll(data["input_ids"], data["input_lengths"], data["token_mask"])
    ctx.measure("loss_error", abs(float(result["loss"]) - loss), ctx.tolerance[0])
    error = abs(float(result["grad_norm"]) / norm - 1)
    ctx.measure("grad_norm_relative_error", error, _of_a_norm(ctx))


def _of_a_norm(ctx: Context) -> float:
    """A gradient's norm depends on the order of sums, however exact the log-probs are declared."""
    return max(ctx.tolerance[0], 1e-4)


@check("P5", cases={name: case for name, case in _SPLITS.items() if name != "mbs_8"})
def updated_weights_do_not_depend_on_the_split(
    ctx: Context, mbs: int | None, config: dict[str, Any]
) -> None:
    """After two steps the log-probs are those of unsplit training."""
    data, probe = training_batch(_LENGTHS), training_batch((11, 6, 19), seed=9)
    whole, split = _trained(ctx), _trained(ctx, **config)
    for policy, size in ((whole, 8), (split, mbs)):
        for _ in range(2):
            policy.train(data, NegativeLogLikelihood(), mbs=size)
    ctx.measure_error(_scores(split, probe), _scores(whole, probe))


@check("P5")
def one_step_for_each_global_batch(ctx: Context) -> None:
    """Eight rows with gbs=4 are two steps of four rows."""
    data, probe = training_batch(_LENGTHS), training_batch((11, 6, 19), seed=9)
    at_once, in_turn = _trained(ctx), _trained(ctx)
    at_once.train(data, NegativeLogLikelihood(), gbs=4, mbs=2)
    for start in (0, 4):
        in_turn.train(data.slice(start, start + 4), NegativeLogLikelihood(), mbs=2)
    ctx.measure_error(_scores(at_once, probe), _scores(in_turn, probe))


@check("P5", modules=("rl_ray",), gpus=2, timeout_s=300.0)
def two_ranks_train_as_one(ctx: Context) -> None:
    """Each of two workers has half of the global batch: loss, norm and log-probs are one's."""
    from rl_core.create import create_policy
    from rl_ray import RayVirtualCluster

    if not ctx.target.installed:
        ctx.not_run("the backend is not installed under a name", excused=True)
    # The ranks' counts of tokens are far apart: a mean over ranks is not the mean over tokens.
    data = training_batch(sorted(_LENGTHS, reverse=True))
    probe = training_batch((11, 6, 19, 4), seed=9)
    alone = _trained(ctx)
    base = ctx.target.base_config("policy", ctx.settings)
    config = base | training_config() | {"model_name": str(ctx.model())}
    with RayVirtualCluster([2], use_gpus=ctx.settings.device == "cuda") as cluster:
        ranks = create_policy(config, cluster)
        try:
            ranks.prepare_for_training()
            for step in range(3):
                if step == 2:  # nothing of what the second rank has counts
                    data["sample_mask"][4:] = 0
                one, two = (p.train(data, NegativeLogLikelihood()) for p in (alone, ranks))
                ctx.measure("loss_error", _apart(one, two, "loss"), ctx.tolerance[0])
                norm = _apart(one, two, "grad_norm") / float(one["grad_norm"])
                ctx.measure("grad_norm_relative_error", norm, _of_a_norm(ctx))
                for key in ("global_valid_toks", "global_valid_seqs", "conformance_tokens", "lr"):
                    require(_apart(one, two, key) == 0, f"{key}: {one}, {two}")
            ctx.measure_error(_scores(ranks, probe), _scores(alone, probe))
        finally:
            ranks.shutdown()


def _apart(one: dict[str, Any], two: dict[str, Any], key: str) -> float:
    return abs(float(one[key]) - float(two[key]))


@check("P6")
def eval_mode_leaves_weights_and_rng(ctx: Context) -> None:
    """Weights and the global random state are bit for bit as before."""
    policy, data = _trained(ctx), training_batch(_LENGTHS)
    weights, state = policy_weights(policy), torch.get_rng_state()
    policy.train(data, NegativeLogLikelihood(), eval_mode=True)
    same_weights(policy_weights(policy), weights, "weights")
    same_tensor(torch.get_rng_state(), state, "the global random state")


@check("P6")
def eval_mode_leaves_the_optimizer(ctx: Context) -> None:
    """The step after an evaluation is the step that came without one."""
    data = training_batch(_LENGTHS)
    evaluated, plain = _trained(ctx), _trained(ctx)
    with repeatable(ctx):
        for policy in (evaluated, plain):
            policy.train(data, NegativeLogLikelihood())
        evaluated.train(training_batch((9, 9), seed=3), NegativeLogLikelihood(), eval_mode=True)
        for policy in (evaluated, plain):
            policy.prepare_for_training()
            policy.train(data, NegativeLogLikelihood())
    same_weights(policy_weights(evaluated), policy_weights(plain), "weights")


@check("P6")
def eval_mode_returns_the_loss(ctx: Context) -> None:
    """The loss is the reference's."""
    data = training_batch(_LENGTHS)
    result = _trained(ctx).train(data, NegativeLogLikelihood(), eval_mode=True)
    loss, _ = ctx.oracle().nll(data["input_ids"], data["input_lengths"], data["token_mask"])
    ctx.measure("loss_error", abs(float(result["loss"]) - loss), ctx.tolerance[0])


@check(
    "P7",
    cases={"nan_loss": {"loss": NanLoss}, "infinite_gradient": {"loss": InfiniteGradientLoss}},
)
def what_is_not_finite_raises(ctx: Context, loss: type[LossFunction]) -> None:
    """TrainingError, the weights untouched, and the next good step is a good step."""
    data = training_batch(_LENGTHS)
    hurt, plain = _trained(ctx), _trained(ctx)
    before = policy_weights(hurt)
    with raises(TrainingError):
        hurt.train(data, loss())
    same_weights(policy_weights(hurt), before, "weights")
    with repeatable(ctx):
        for policy in (hurt, plain):
            policy.prepare_for_training()
            policy.train(data, NegativeLogLikelihood())
    same_weights(policy_weights(hurt), policy_weights(plain), "weights of the next step")


@check("P7")
def masked_rows_have_no_influence(ctx: Context) -> None:
    """What stands in a row with sample_mask 0 changes neither loss nor weights."""
    lengths, other = (9, 14, 6), (9, 5, 6)
    data, changed = training_batch(lengths), training_batch(lengths)
    changed["input_ids"][1] = training_batch(lengths, seed=7)["input_ids"][1]
    changed["input_lengths"] = torch.tensor(other)
    changed["input_ids"][1, 5:] = ctx.oracle().pad_token_id
    _compare_masked(ctx, data, changed, rows=[1])


@check("P7")
def masked_tokens_have_no_influence(ctx: Context) -> None:
    """The last tokens of a row with token_mask 0 change neither loss nor weights."""
    data, changed = training_batch((9, 14, 6)), training_batch((9, 14, 6))
    for batch in (data, changed):
        batch["token_mask"][1, 10:] = 0
    changed["input_ids"][1, 10:14] = training_batch((9, 14, 6), seed=7)["input_ids"][1, 10:14]
    _compare_masked(ctx, data, changed)


def _compare_masked(
    ctx: Context, data: BatchedDataDict[Any], changed: BatchedDataDict[Any], rows: Any = ()
) -> None:
    probe, results, scores = training_batch((11, 6, 19), seed=9), [], []
    for batch in (data, changed):
        batch["sample_mask"][list(rows)] = 0
        policy = _trained(ctx)
        results.append(policy.train(batch, NegativeLogLikelihood(), mbs=3))
        scores.append(_scores(policy, probe))
    for key in ("loss", "grad_norm"):
        first, second = float(results[0][key]), float(results[1][key])
        difference, allowed = abs(second / first - 1), max(ctx.tolerance[0] / 10, 1e-5)
        ctx.measure(f"{key}_relative_difference", difference, allowed)
    ctx.measure_error(scores[1], scores[0])


@check("P7")
def a_fully_masked_batch_changes_nothing(ctx: Context) -> None:
    """Without one valid token the loss is 0 and the log-probs stay."""
    data, policy = (
        training_batch((9, 6)),
        _trained(ctx, optimizer={"lr": 1e-3, "weight_decay": 0.0}),
    )
    before = _scores(policy, data)
    data["sample_mask"][:] = 0
    policy.prepare_for_training()
    result = policy.train(data, NegativeLogLikelihood())
    require(float(result["loss"]) == 0, f"the loss is {result['loss']}")
    same_tensor(_scores(policy, data), before, "logprobs")


@check("P8")
def nll_falls_on_one_batch(ctx: Context) -> None:
    """Ten steps on one batch lower its loss each time they are looked at."""
    data, policy = training_batch(_LENGTHS), _trained(ctx)
    losses = [float(policy.train(data, NegativeLogLikelihood())["loss"]) for _ in range(10)]
    require(losses[9] < losses[4] < losses[0], f"the losses are {losses}")


@check("P8")
def advantages_show_the_way(ctx: Context) -> None:
    """Rows with a positive advantage become likelier, the others less likely."""
    data = training_batch((9, 9, 9, 9), advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))
    policy = _trained(ctx)
    before = _scores(policy, data).sum(1)
    policy.prepare_for_training()
    for _ in range(3):
        policy.train(data, AdvantageLoss())
    moved = (_scores(policy, data).sum(1) - before) * data["advantages"]
    require((moved > 0).all(), f"movement along the advantage: {moved.tolist()}")


_CALLS = (
    "prepare_for_training",
    "finish_training",
    "prepare_for_lp_inference",
    "offload_before_refit",
    "offload_after_refit",
)


@check("P10", cases={name: {"name": name} for name in _CALLS})
def lifecycle_calls_are_idempotent(ctx: Context, name: str) -> None:
    """Called twice in a row, it changes no result."""
    data, policy = training_batch(_LENGTHS), ctx.fresh_policy()
    before = _scores(policy, data)
    for _ in range(2):
        getattr(policy, name)()
    same_tensor(_scores(policy, data), before, "logprobs")


@check("P10")
def lifecycle_calls_leave_training_alone(ctx: Context) -> None:
    """A loop with every call in it trains as one without."""
    data = training_batch(_LENGTHS)
    plain, busy = _trained(ctx), ctx.fresh_policy()
    with repeatable(ctx):
        for _ in range(2):
            plain.train(data, NegativeLogLikelihood())
            for name in ("offload_before_refit", "offload_after_refit", "prepare_for_lp_inference"):
                getattr(busy, name)()
            busy.get_logprobs(data)
            busy.prepare_for_training()
            busy.train(data, NegativeLogLikelihood())
            busy.finish_training()
    same_weights(policy_weights(busy), policy_weights(plain), "weights")


@check("P10", capability="offload", device="cuda")
def offloading_releases_device_memory(ctx: Context) -> None:
    """The declared fraction of weights and optimizer is free after offload_after_refit."""
    policy = ctx.fresh_policy(model_name=str(ctx.large_model(512 << 20)))
    policy.prepare_for_training()
    policy.train(training_batch((9, 6)), NegativeLogLikelihood())
    before = torch.cuda.memory_allocated()
    policy.offload_before_refit()
    policy.offload_after_refit()
    kept = torch.cuda.memory_allocated() / before
    ctx.measure("kept_fraction", kept, 1 - ctx.manifest.released_fraction)


@refusal("policy", "offload")
def without_offload_the_calls_still_hold(ctx: Context) -> None:
    """Without offload there is nothing to refuse: the calls change nothing."""
    policy = ctx.fresh_policy()
    before = policy_weights(policy)
    policy.offload_before_refit()
    policy.offload_after_refit()
    same_weights(policy_weights(policy), before, "weights")
