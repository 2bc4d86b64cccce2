"""R14: scales of an FP8 cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.expect import raises, require, same
from rl_conformance.refits import equal, run_refit, unequal_pair
from rl_conformance.registry import check, refusal
from rl_conformance.served import greedy, same_output
from rl_conformance.ways import settable_trainer
from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from rl_conformance.context import Context


def _scaled_pair(ctx: Context) -> tuple[Any, Any, dict[str, Any]]:
    """An engine with an FP8 cache, if that is configured, the suite's policy, and its scales."""
    known = "kv_cache_dtype" in ctx.target.config_keys.get("generation", ())
    usual = {"kv_cache_dtype": "fp8"} if known else {}
    own = ctx.target.tiny.get(ctx.settings.device, {}).get("kv_scales")
    generation = ctx.refit_generation(**(usual if own is None else own))
    policy = settable_trainer(ctx)
    same(generation.requires_kv_scale_sync, True, "requires_kv_scale_sync with an FP8 cache")
    return policy, generation, policy.calibrate_qkv_fp8_scales(ctx.prompts(5, 9, 3))


def _times(factor: float, calibrated: dict[str, Any]) -> dict[str, float]:
    """The scales by name, coarser or finer."""
    layers = calibrated["layers"].items()
    return {f"{layer}.{kind}": s * factor for layer, kinds in layers for kind, s in kinds.items()}


@check("R14", needs=("generation",))
def scales_travel_with_the_weights(ctx: Context) -> None:
    """The engine generates with the scales of the refit: coarse ones show, fine ones hardly."""
    policy, generation, scales = _scaled_pair(ctx)
    output = {}
    given = {"fine": _times(1, scales), "coarse": _times(1e5, scales), "as calibrated": scales}
    for name, kv_scales in given.items():
        run_refit(policy, generation, kv_scales=kv_scales)
        equal(policy, generation)
        output[name] = greedy(ctx, generation, seed=1)
    same_output(ctx, output["as calibrated"], output["fine"])
    coarse, fine = (output[name]["logprobs"] for name in ("coarse", "fine"))
    require(
        not torch.equal(coarse, fine),
        "logprobs with coarse scales",
        "others than with fine ones",
        "the same",
    )


@check("R14", needs=("generation",))
def scales_do_not_outrun_the_weights(ctx: Context) -> None:
    """Scales of a refit that fails before anything was written are not applied."""
    policy, generation, scales = _scaled_pair(ctx)
    run_refit(policy, generation, kv_scales=scales)
    before = greedy(ctx, generation, seed=1)
    coarse = _times(1e5, scales)
    with raises(CapabilityError):  # they cannot be taken back
        run_refit(policy, generation, kv_scales=coarse, isolation="staged")
    same_output(ctx, greedy(ctx, generation, seed=1), before)


@refusal("generation", "kv_scales")
def no_scales_are_asked_for(ctx: Context) -> None:
    """The engine needs no scales: a refit with scales is refused and changes nothing."""
    policy, generation = unequal_pair(ctx)
    same(generation.requires_kv_scale_sync, False, "requires_kv_scale_sync")
    before = greedy(ctx, generation, seed=0)
    with raises(CapabilityError):
        run_refit(policy, generation, kv_scales={"layer_0.k_scale": 0.5})
    same(generation.weights_version, ctx.first_version, "weights_version after the refused refit")
    same_output(ctx, greedy(ctx, generation, seed=0), before)
