"""P7 and P14: weights that a step left half of one state are not trained, saved or refitted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rl_conformance.expect import raises, require
from rl_conformance.losses import FailsInTheStep
from rl_conformance.registry import check
from rl_conformance.several_ranks import layouts_of, policy_on, settings_of
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.errors import LifecycleError

if TYPE_CHECKING:
    from rl_conformance.context import Context

_LENGTHS = (12, 3, 30, 17)


@check("P7")
def what_fails_midway_is_refused_until_a_load(ctx: Context) -> None:
    """The optimizer raises once it has written: nothing is done with the weights until a load."""
    _refuses_until_a_load(ctx, ctx.fresh_policy(dtype="float32"))


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def what_fails_midway_on_one_rank_is_refused_by_all(ctx: Context) -> None:
    """Some ranks have taken the step, one has half of it: all refuse at once until all load."""
    layout = layouts_of(ctx)[0]
    _, config = settings_of(ctx, "untied")
    policy = policy_on(ctx, layout.ranks, {**config, **layout.config}, "float32")
    _refuses_until_a_load(ctx, ctx.closing(policy))


def _refuses_until_a_load(ctx: Context, policy: Any) -> None:
    data, saved = training_batch(_LENGTHS), str(ctx.directory() / "saved")
    train = partial(policy.train, data, NegativeLogLikelihood())
    policy.prepare_for_training()
    train()
    policy.save_checkpoint(saved)
    expected = float(train()["loss"])
    try:
        policy.train(data, FailsInTheStep(ctx.directory() / "claim"))
    except Exception:
        pass
    else:
        ctx.not_run("the policy takes no steps of torch's optimizers", excused=True)
    for call in (
        train,
        lambda: policy.get_logprobs(data),
        lambda: policy.save_checkpoint(str(ctx.directory() / "torn")),
        policy.prepare_refit_info,
    ):
        with raises(LifecycleError):
            call()
    if hasattr(policy, "load_checkpoint"):
        policy.load_checkpoint(saved)
        policy.prepare_for_training()
        again = float(train()["loss"])
        mean, _ = ctx.tolerance_of("float32")
        require(abs(again - expected) <= mean, f"the loss after a load is {again}, not {expected}")
