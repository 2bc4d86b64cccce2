"""R1, R2, R7, R9: every element of every tensor, as it is and where the model computes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.expect import require
from rl_conformance.faults import at_the_first_bucket
from rl_conformance.reference import make_reference
from rl_conformance.refits import agree, attempt, equal, run_refit, supports, unequal_pair
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.ways import engine_for, exact, settable_trainer, shuffle, ways_of
from rl_conformance.weights import checkpoint_weights, engine_weights, policy_weights, same_weights
from rl_core.errors import LifecycleError, RefitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context


@check("R1", needs=("generation",))
def every_pattern_of_bits_arrives(ctx: Context) -> None:
    """All finite numbers below 2: signs of zeros, denormals, every mantissa."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    generator = torch.Generator().manual_seed(0)
    sound = {name: value.clone() for name, value in policy.model.state_dict().items()}
    for way in ways_of(ctx, policy, "engine", "direct", "packed", "delta", "staged").values():
        with torch.no_grad():
            for parameter in policy.model.parameters():
                width = parameter.element_size()
                bits = torch.randint(256, (parameter.numel(), width), generator=generator)
                bits[:, -1] &= 0b10111111  # the exponent's first bit: below 2
                bits[0] = torch.tensor([0] * (width - 1) + [128])  # a negative zero
                values = bits.to(torch.uint8).view(parameter.dtype)
                parameter.copy_(values.view_as(parameter))
        way(policy, engine)
        same_weights(engine_weights(engine), policy_weights(policy), "engine")
    policy.model.load_state_dict(sound)
    run_refit(policy, engine)
    exact(ctx, policy, engine, "finite weights after those", engine.weights_version)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[-1:]


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, -1:] if tensor.dim() > 1 else tensor[-1:]


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    half = len(tensor) // 2
    return tensor[half : half + 1]


def _vectors(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor[:0]


def _matrices(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() > 1 else tensor[:0]


_PARTS: dict[str, dict[str, Any]] = {
    "last_rows": {"part": _rows},
    "last_columns": {"part": _columns},
    "rows_in_the_middle": {"part": _inner},
    "vectors": {"part": _vectors},
    "matrices": {"part": _matrices},
}


@check("R1", cases=_PARTS, needs=("generation",))
def no_part_is_left_behind(ctx: Context, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What changed in a small part of one tensor shows in the engine's log-probs.

    They tell what the engine computes with, whatever it says that it has.
    """
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    last = ctx.oracle(ctx.model("qwen2", seed=1)).vocab_size - 1
    data = ctx.batch([[last, 17, 200, last, 5], [40, last // 2, 7, last], [9]])
    for seed, (_, parameter) in enumerate(policy.model.named_parameters()):
        some = part(parameter.data)
        if not some.numel():
            continue
        kept = parameter.data.clone()
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(some.shape, generator=generator)
        some.copy_((parameter.data.float().std() * 8 * noise + some.float().mean()).to(some.dtype))
        run_refit(policy, engine, delta=bool(seed % 2))
        agree(ctx, policy, engine, data, rounding=2.5)
        # Not more than one is so large, or else rounding hides what is looked for.
        parameter.data.copy_(kept)
    run_refit(policy, engine)
    equal(policy, engine)


@check("R1", needs=("policy",))
def what_arrives_is_what_is_saved(ctx: Context) -> None:
    """After training an engine holds the tensors that save_checkpoint writes, bit for bit."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    engine = engine_for(ctx, "trainer")
    run_refit(policy, engine)
    for step, way in enumerate(ways_of(ctx, policy, "trainer", "direct", "packed").values()):
        policy.prepare_for_training()
        policy.train(training_batch((9, 14, 6), seed=step), NegativeLogLikelihood())
        way(policy, engine)
        path = ctx.directory() / f"saved-{step}"
        policy.save_checkpoint(str(path))
        installed = engine_weights(engine)
        saved = {k: v.to(installed[k].dtype) for k, v in checkpoint_weights(path).items()}
        same_weights({name: installed[name] for name in saved}, saved, "engine")


@check("R2", needs=("policy",))
def the_source_keeps_its_word(ctx: Context) -> None:
    """Its description stays, and it gives what it is asked for in that order and as described."""
    policy: Any = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    make = getattr(policy, "refit_source", None)
    if make is None:
        ctx.not_run("the policy does not run in this process as a PolicyBackend", excused=True)
    described = policy.prepare_refit_info()
    for _ in range(2):
        again = policy.prepare_refit_info()
        require(again["tensors"] == described["tensors"], "the description changed")
        require(again["digest"] == described["digest"], "the digest changed")
        source = make()
        specs = {spec.name: spec for spec in source.specs() if spec.alias_of is None}
        before = policy_weights(policy)
        names = sorted(specs, reverse=True)
        for chosen in (names, names[::3], []):
            given = [
                (name, tensor.detach().cpu().clone()) for name, tensor in source.tensors(chosen)
            ]
            require([n for n, _ in given] == chosen, "other tensors than those asked for, or order")
            for name, tensor in given:
                wanted = specs[name]
                as_described = (tuple(tensor.shape), tensor.dtype) == (
                    wanted.shape,
                    wanted.torch_dtype,
                )
                require(as_described, name)
            same_weights(dict(given), {name: before[name] for name in chosen}, "asked for some")
        kept = source.persistent()
        if kept is not None:
            require(specs.keys() <= kept.keys(), "persistent() lacks names")
            same_weights(
                {n: kept[n].detach().cpu() for n in specs},
                {n: before[n] for n in specs},
                "persistent()",
            )
        policy.prepare_for_training()
        policy.train(training_batch((9, 14, 6)), NegativeLogLikelihood())
        policy.offload_before_refit()
        policy.offload_after_refit()


@check("R2", needs=("generation",))
def the_sink_keeps_its_word(ctx: Context) -> None:
    """Its description stays, and it reads what it is asked for in that order and as described."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    make: Any = getattr(engine, "weight_sink", None)
    if make is None:
        ctx.not_run("the engine does not run in this process as a GenerationBackend", excused=True)
    first = {spec.name: spec for spec in make().specs()}
    for seed in range(2):
        shuffle(policy, seed)
        run_refit(policy, engine)
        sink = make()
        require({spec.name: spec for spec in sink.specs()} == first, "the description changed")
        names, ours = sorted(first, reverse=True), policy_weights(policy)
        for chosen in (names, names[::3], []):
            given = [(name, tensor.detach().cpu().clone()) for name, tensor in sink.read(chosen)]
            require([n for n, _ in given] == chosen, "other tensors than those asked for, or order")
            expected = {n: ours[n].to(getattr(torch, first[n].dtype)) for n in chosen}
            same_weights(dict(given), expected, "read back")


@check("R7", needs=("generation",), cases={f: {"family": f} for f in ("llama", "qwen3")})
def every_family_serves_what_arrived(ctx: Context, family: str) -> None:
    """Tied and untied architectures, again and again: their log-probs are the policy's."""
    config = {"model_name": str(ctx.model(family, seed=1)), "torch_dtype": ctx.settings.dtype}
    policy = ctx.closing(make_reference("policy", config))
    engine = ctx.fresh_generation(model_name=str(ctx.model(family, seed=0)))
    engine.prepare_for_generation()
    for version in (1, 2, 3):
        run_refit(policy, engine, delta=version == 3)
        exact(ctx, policy, engine, f"refit {version} of {family}", version)
        shuffle(policy, version, ["model.norm.weight", "lm_head.weight"] if version > 1 else None)


@check("R9")
def the_reference_may_be_asked_meanwhile(ctx: Context) -> None:
    """Scoring the reference policy amid a refit either ends it or does not show in it."""
    policy, generation = unequal_pair(ctx)
    supports(ctx, policy, "packed")
    policy.prepare_for_training()
    policy.train(training_batch((9, 14, 6)), NegativeLogLikelihood())

    def score() -> None:
        policy.get_reference_policy_logprobs(training_batch((9, 14)))

    with at_the_first_bucket(score):
        error = attempt(policy, generation, mode="packed", bucket_bytes=4096)
    require(error is None or isinstance(error, LifecycleError | RefitError), f"{error!r}")
    if error is None:
        equal(policy, generation)
    else:
        require(generation.weights_version == 0, f"version {generation.weights_version}")
    run_refit(policy, generation)
    equal(policy, generation)
