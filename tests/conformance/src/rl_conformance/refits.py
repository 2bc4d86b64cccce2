"""What the refit checks have in common."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated_mask
from rl_conformance.calls import noted
from rl_conformance.deadline import stretched
from rl_conformance.expect import require
from rl_conformance.reference import make_reference
from rl_conformance.served import certain_prompts
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import engine_weights, policy_weights, same_weights
from rl_core.batch import BatchedDataDict
from rl_core.weights import refit

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface
    from rl_core.weights import RefitReport

__all__ = [
    "DEADLINE_S",
    "MODES",
    "Watched",
    "agree",
    "attempt",
    "equal",
    "fresh_engine",
    "modes_of",
    "odd_tensors",
    "own_backend",
    "run_refit",
    "scores_of_both",
    "second_engine",
    "supports",
    "take_step",
    "unequal_engine",
    "unequal_pair",
    "whole_tensors",
]

#: Seconds that a refit of a tiny model may take on a quiet machine before a check calls it hung.
DEADLINE_S = 30.0
#: Cases of checks that hold however the tensors travel.
MODES: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in ("direct", "packed")}


def unequal_pair(ctx: Context) -> tuple[ColocatablePolicyInterface, GenerationInterface]:
    """A policy and the engine that refits share, awake, with different weights."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    return policy, unequal_engine(ctx)


def unequal_engine(ctx: Context) -> GenerationInterface:
    """The engine that refits share, awake.

    A refit gives it the weights that it began with, under ``ctx.first_version``.
    """
    generation = ctx.refit_generation()
    first = ctx.workshop.keep("first weights", "", lambda: own_backend(ctx, "policy", seed=0))
    run_refit(first, generation, version=ctx.first_version)
    return generation


def second_engine(ctx: Context) -> GenerationInterface:
    """Another engine that refits share, with the state that the check before left it in."""
    return ctx.refit_generation(seed=2)


def own_backend(ctx: Context, kind: str, *, seed: int, family: str = "qwen2", **config: Any) -> Any:
    """The suite's own policy or engine, with a tiny model of that family and seed."""
    config |= {"model_name": str(ctx.model(family, seed=seed)), "device": ctx.settings.device}
    return make_reference(kind, config | {"torch_dtype": ctx.settings.dtype})


def fresh_engine(ctx: Context) -> GenerationInterface:
    """A new engine, awake, that a policy of :func:`unequal_pair` can be sent to."""
    generation = ctx.fresh_generation(model_name=str(ctx.model("qwen2", seed=0)))
    generation.prepare_for_generation()
    return generation


def run_refit(policy: Any, generation: Any, **options: Any) -> RefitReport:
    """A refit with the checks' deadline."""
    with noted(generation, "refit", **options):
        return refit(policy, generation, **({"deadline_s": stretched(DEADLINE_S)} | options))


class Watched:
    """Lets a check wait for an engine's refits, also when the trainer's side ended first.

    Args:
        generation: The engine, or several.

    Attributes:
        futures: Of all refits since.
    """

    def __init__(self, generation: Any) -> None:
        self._generation = generation
        self.futures: list[concurrent.futures.Future[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    def receive_weights(self, **options: Any) -> list[concurrent.futures.Future[Any]]:
        """The engine's own."""
        futures = self._generation.receive_weights(**options)
        self.futures += futures
        return futures  # type: ignore[no-any-return]


def attempt(policy: Any, generation: Any, **options: Any) -> BaseException | None:
    """What a refit ends with, once every engine is done with it; None if it commits."""
    watched = Watched(generation)
    try:
        run_refit(policy, watched, **options)
    except Exception as error:
        return error
    finally:
        concurrent.futures.wait(watched.futures, DEADLINE_S)
    return None


def modes_of(policy: ColocatablePolicyInterface) -> list[str]:
    """The modes in which the policy's tensors can be sent."""
    source: Any = getattr(policy, "weight_source", None)
    given = source() if source is not None else None
    pieces = given.pieces() if given is not None else None
    # What shares its storage with tensors that the source does not name stays where it is.
    in_place = (
        given is not None
        and pieces is not None
        and (
            bool(given.memory_users())
            or all(
                piece.tensor.untyped_storage().nbytes() == piece.tensor.nbytes for piece in pieces
            )
        )
    )
    return [mode for mode in MODES if mode != "direct" or in_place]


def supports(ctx: Context, policy: ColocatablePolicyInterface, mode: str) -> None:
    """Ends the check unless the policy's tensors can be sent in that mode."""
    if mode not in modes_of(policy):
        ctx.not_run(
            "the policy computes its tensors when it sends them, so mode direct does not apply",
            excused=True,
        )


def take_step(policy: ColocatablePolicyInterface, seed: int = 0) -> None:
    """Trains a policy, so that there is something to send."""
    policy.prepare_for_training()
    policy.train(training_batch((9, 14, 6), seed=seed), NegativeLogLikelihood())


def equal(policy: ColocatablePolicyInterface, generation: GenerationInterface) -> None:
    """Fails unless what the engine holds is the policy's, bit for bit, in the engine's dtype."""
    theirs, ours = policy_weights(policy), engine_weights(generation)
    expected = {
        name: tensor.to(ours[name].dtype) if name in ours else tensor
        for name, tensor in theirs.items()
    }
    same_weights(ours, expected, "weights read from the engine")


def agree(
    ctx: Context,
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    data: BatchedDataDict[Any] | None = None,
    dtype: str | None = None,
    rounding: float = 1.0,
) -> None:
    """Fails unless the engine's greedy log-probs are the policy's, each within its tolerance.

    Args:
        ctx: Of the check.
        policy: Whose weights the engine should have.
        generation: The engine, awake.
        data: The prompts. Default: those of :func:`~rl_conformance.served.greedy` for the seed 0,
            so that what an engine keeps of earlier weights shows.
        dtype: Of the engine's weights, if not that of the run.
        rounding: As of :meth:`~rl_conformance.context.Context.measure_error`.
    """
    data = certain_prompts(ctx, seed=0) if data is None else data
    scores = scores_of_both(policy, generation, data)
    ctx.measure_error(*scores, dtype, scale=2.0, rounding=rounding)


def scores_of_both(
    policy: ColocatablePolicyInterface, generation: GenerationInterface, data: BatchedDataDict[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the engine's greedy tokens, as the engine has them and as the policy."""
    output = generation.generate(data, greedy=True)
    sequences = BatchedDataDict[Any](
        {
            "input_ids": output["output_ids"],
            "input_lengths": output["unpadded_sequence_lengths"],
        }
    )
    policy.prepare_for_lp_inference()
    inside = generated_mask(data, output)
    require(inside.any(), "the output of generate", "some tokens", "none")
    return output["logprobs"][inside], policy.get_logprobs(sequences)["logprobs"][inside]


def odd_tensors(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Every shape and dtype that makes a careless transfer stumble.

    Tied, strided, transposed, 0-d and empty tensors, ten dtypes, odd byte sizes.

    Args:
        seed: Of the values, which are the same on every device.
        device: Where the tensors are.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    tied = normal(33, 7)
    return {
        "large": normal(300, 301),
        "tied": tied,
        "tied.again": tied,
        "transposed": normal(13, 17).t(),
        "strided": normal(40, 6)[::3, 1::2],
        "scalar": normal(1)[0],
        "empty": torch.empty(0, 4, device=device),
        "half": normal(5, 3).half(),
        "bfloat16": normal(7).bfloat16(),
        "double": normal(3).double(),
        "float8": normal(3, 3).to(torch.float8_e4m3fn),
        "float8.wide": normal(5).to(torch.float8_e5m2),
        "counter": torch.tensor(seed + 2**40, device=device),
        "bytes": torch.arange(11, dtype=torch.uint8, device=device) + seed,
        "flags": normal(9) > 0,
        "last": normal(1, 1, 5),
    }


def whole_tensors(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The same values in tensors that engines can read where they are."""
    odd = odd_tensors(seed, device)
    owned = {name: tensor.clone().contiguous() for name, tensor in odd.items()}
    return owned | {"tied.again": owned["tied"]}
