"""P14: what a copy on several ranks hands to an engine, and what it saves, is what it is on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_conformance.expect import fail, require, same_tensor
from rl_conformance.reference import make_reference
from rl_conformance.refits import run_refit
from rl_conformance.registry import check, refusal
from rl_conformance.several_ranks import (
    OF_AN_UPDATE,
    beside,
    layouts_of,
    named_layouts,
    offered,
    policy_on,
    same_step,
    scores_fit,
    settings_of,
)
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.training_oracle import update_error
from rl_conformance.weights import checkpoint_weights, engine_weights, policy_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from rl_conformance.context import Context
    from rl_conformance.several_ranks import Layout

#: As many rows as no two copies share evenly; one of a single token.
_LENGTHS = (12, 3, 30, 1, 17, 8, 21)


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def refits_are_exact(ctx: Context) -> None:
    """R1, before and after a step: the engine has what the policy exports, and computes with it."""
    ways: list[dict[str, Any]] = [{}]
    if offered(ctx, "collective"):
        ways.append({"transport": "collective", "address": "127.0.0.1"})
    for layout in layouts_of(ctx):
        with beside(ctx, layout) as pair:
            config = {"model_name": str(pair.path), "torch_dtype": ctx.settings.dtype}
            heat, prompts = pair.config["temperature"], ctx.prompts(5, 9, 3)
            sampling = {"max_new_tokens": 3, "temperature": heat}
            engine = ctx.closing(make_reference("generation", config | sampling))
            engine.prepare_for_generation()
            for way in ways:
                pair.train(training_batch(_LENGTHS, seed=5), NegativeLogLikelihood())
                run_refit(pair.many, engine, **way)
                exported = _exported(ctx, pair.many)
                installed = engine_weights(engine)
                for name, tensor in exported.items():
                    same_tensor(installed[name], tensor.to(installed[name].dtype), name)
            output = engine.generate(prompts)
            scores_fit(ctx, pair.many, prompts, output, scale=1 / heat)


def _exported(ctx: Context, policy: Any, path: Path | None = None) -> dict[str, torch.Tensor]:
    path = path or ctx.directory() / "checkpoint"
    policy.save_checkpoint(str(path))
    return checkpoint_weights(next(file.parent for file in sorted(path.rglob("config.json"))))


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=400.0)
def another_number_of_ranks_goes_on(ctx: Context) -> None:
    """A checkpoint goes from one rank to those of each layout and back: no step shows it.

    With dropout where there is one copy; more than one drop in other rows.
    """
    layouts = layouts_of(ctx)
    with_dropout = [layout for layout in layouts if _copies(ctx, layout) == 1]
    _goes_round(ctx, with_dropout, "dropping")
    _goes_round(ctx, [layout for layout in layouts if layout not in with_dropout], "untied")


def _copies(ctx: Context, layout: Layout) -> int:
    with beside(ctx, layout) as pair:
        copies: int = pair.many.data_parallel_size
        return copies


def _goes_round(ctx: Context, layouts: Sequence[Layout], kind: str) -> None:
    """Saved by one rank, continued on each of the layouts, one after the other, then by one."""
    if not layouts:
        return
    _, config = settings_of(ctx, kind)
    alone = ctx.fresh_policy(dtype="float32", **config)
    data = training_batch((9, 3, 12, 5))
    alone.prepare_for_training()
    alone.train(data, NegativeLogLikelihood())
    saved = ctx.directory() / "one"
    alone.save_checkpoint(str(saved))
    for layout in [*layouts, None]:
        resumed = config | {"resume_from": str(saved)}
        if layout is None:
            policy: Any = ctx.fresh_policy(dtype="float32", **resumed)
        else:
            policy = policy_on(ctx, layout.ranks, {**resumed, **layout.config}, "float32")
        try:
            before = policy_weights(alone)
            for seed in (1, 2):
                data = training_batch((9, 3, 12, 5), seed=seed)
                for each in (alone, policy):
                    each.prepare_for_training()
                same_step(
                    ctx,
                    alone.train(data, NegativeLogLikelihood(), mbs=3),
                    policy.train(data, NegativeLogLikelihood(), mbs=3),
                )
            saved = ctx.directory() / (layout.name if layout else "back")
            exported = _exported(ctx, policy, saved)
            weights = policy_weights(alone)
            error, name = update_error(exported, {n: weights[n] for n in exported}, before)
            ctx.measure(f"update_relative_error of {name}", error, OF_AN_UPDATE)
        except AssertionError as failure:
            fail(f"{layout.name if layout else 'one rank again'}: {failure}")
        finally:
            if layout is not None:
                policy.shutdown()


@refusal("policy", "sharded")
def every_rank_has_a_whole_copy(ctx: Context) -> None:
    """Without sharded there is nothing to refuse: two ranks are two copies with rows of their own.

    Settings for the suite that name layouts all the same contradict the manifest.
    """
    require(not named_layouts(ctx), "the manifest declares no sharded, and layouts are named")
    if not ctx.target.installed:
        ctx.not_run("the backend is not installed under a name", excused=True)

    def copies_of_two_ranks() -> int:
        policy: Any = policy_on(ctx, 2, {"model_name": str(ctx.model())}, ctx.settings.dtype)
        try:
            return int(policy.data_parallel_size)
        finally:
            policy.shutdown()

    copies = ctx.workshop.once("copies of the model on two ranks", copies_of_two_ranks)
    require(copies == 2, f"two ranks share {copies} copies, though sharded is not declared")
