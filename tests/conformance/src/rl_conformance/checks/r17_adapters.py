"""R17: refits that send only adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.adapters import (
    adapted_layers,
    adapter_trainer,
    change_adapters,
    new_engine_for_adapters,
    serving_adapters,
    with_adapters,
)
from rl_conformance.batches import generated_mask
from rl_conformance.doubles import Engines
from rl_conformance.expect import raised, raises, same
from rl_conformance.faults import dropping, failing_finish, failing_write, in_the_engine
from rl_conformance.refits import attempt, run_refit, unequal_engine
from rl_conformance.registry import check, refusal
from rl_conformance.served import certain_prompts, greedy, made_by, same_output
from rl_conformance.weights import engine_weights, same_weights
from rl_core.errors import ManifestMismatchError, RLError

if TYPE_CHECKING:
    from rl_conformance.context import Context

_TENSOR = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
_WAYS: list[dict[str, Any]] = [
    {"verify": "installed"},
    {"delta": True},
    {"isolation": "staged", "verify": "installed"},
    {"mode": "packed", "bucket_bytes": 1024},
]


def _serves(ctx: Context, trainer: Any, generation: Any, version: int) -> None:
    """Fails unless the engine computes with the trainer's adapters, and holds them."""
    data = certain_prompts(ctx, seed=0)
    output = generation.generate(data, greedy=True)
    made_by(output, version, trainer.sender.origin if version else 0)
    oracle = with_adapters(
        ctx.oracle(ctx.model("qwen2", seed=0)), trainer.tensors, ctx.settings.dtype
    )
    inside = generated_mask(data, output)
    expected = oracle.batch_logprobs(output["output_ids"], output["unpadded_sequence_lengths"])
    ctx.measure_error(output["logprobs"][inside], expected[inside], rounding=2.5)
    dtype = getattr(torch, ctx.settings.dtype)
    sent = {name: tensor.to(dtype) for name, tensor in trainer.tensors.items()}
    same_weights(engine_weights(generation), sent, "the adapter read from the engine")


@check("R17", needs=("generation",))
def adapters_arrive_beside_the_base(ctx: Context) -> None:
    """The base serves, then the adapters of the last refit, on whatever way they came."""
    trainer, generation = adapter_trainer(ctx), new_engine_for_adapters(ctx)
    _serves(ctx, trainer, generation, 0)  # they are all 0
    for version, options in enumerate(_WAYS, 1):
        change_adapters(trainer, seed=version)
        run_refit(trainer, generation, **options)
        _serves(ctx, trainer, generation, version)


@check("R17", needs=("generation",))
def each_layer_has_its_own_adapter(ctx: Context) -> None:
    """An adapter of one layer alone changes what that layer computes, and no other."""
    trainer, generation = adapter_trainer(ctx), serving_adapters(ctx)
    layers = adapted_layers(ctx.oracle(ctx.model("qwen2", seed=0)).model)
    for version, name in enumerate(layers, 1):
        change_adapters(trainer, seed=version, only=f"{name}.")
        run_refit(trainer, generation, delta=bool(version % 2))
        _serves(ctx, trainer, generation, version)


_FAULTS: dict[str, dict[str, Any]] = {
    "at_a_write": {"fault": failing_write, "how": {"after": 3}},
    "at_the_finish": {"fault": failing_finish, "how": {}},
    "at_the_read_back": {"fault": dropping, "how": {"tensor": _TENSOR}},
}


@check("R17", needs=("generation",), cases=_FAULTS)
def a_failed_refit_leaves_the_old_adapter(ctx: Context, fault: Any, how: dict[str, Any]) -> None:
    """Staged or not, in one of two engines: both serve the old adapter, and take the next one."""
    trainer, generation = adapter_trainer(ctx), serving_adapters(ctx)
    other = serving_adapters(ctx, seed=2)
    both = Engines(generation, other)
    change_adapters(trainer, seed=0)
    run_refit(trainer, both)
    before = greedy(ctx, generation, seed=0)
    for isolation in ("quiesced", "staged"):
        weights = engine_weights(generation)
        change_adapters(trainer, seed=1)
        with in_the_engine(generation, fault, **how):
            error = attempt(trainer, both, isolation=isolation, verify="installed")
        raised(error, RLError)
        for engine in (generation, other):
            same(engine.weights_version, 1, "weights_version after the failed refit")
            same_weights(engine_weights(engine), weights, "after the failure")
            same_output(ctx, greedy(ctx, engine, seed=0), before)
        change_adapters(trainer, seed=0)
        run_refit(trainer, both, version=1)
    change_adapters(trainer, seed=2)
    run_refit(trainer, both)
    for engine in (generation, other):
        _serves(ctx, trainer, engine, engine.weights_version)


@check("R17", needs=("generation",))
def the_old_adapter_serves_meanwhile(ctx: Context) -> None:
    """While a staged one arrives the engine generates, with the old one."""
    trainer, generation, seen = adapter_trainer(ctx), serving_adapters(ctx), []
    change_adapters(trainer, seed=0)
    run_refit(trainer, generation)
    before = greedy(ctx, generation, seed=0)
    change_adapters(trainer, seed=1)
    trainer.on[_TENSOR] = lambda: seen.append(greedy(ctx, generation, seed=0))
    run_refit(trainer, generation, isolation="staged", bucket_bytes=1024)
    [during] = seen
    same_output(ctx, during, before)
    same(sorted({*during["weights_version"].tolist()}), [1], "versions of the rows meanwhile")
    trainer.on.clear()
    _serves(ctx, trainer, generation, 2)


@check("R17", needs=("generation",))
def other_adapters_are_refused_by_name(ctx: Context) -> None:
    """Another rank, or other modules: the error has the names, and nothing changes."""
    trainer, generation = adapter_trainer(ctx), serving_adapters(ctx)
    change_adapters(trainer, seed=0)
    run_refit(trainer, generation)
    before = greedy(ctx, generation, seed=0)
    wider, fewer = adapter_trainer(ctx, rank=8), adapter_trainer(ctx)
    del fewer.tensors[_TENSOR]
    for other, name in ((wider, "layers.0.self_attn.q_proj.lora_A.weight"), (fewer, _TENSOR)):
        raised(attempt(other, generation), ManifestMismatchError, name)
        same(generation.weights_version, 1, "weights_version after the refused refit")
        same_output(ctx, greedy(ctx, generation, seed=0), before)


@refusal("generation", "adapters")
def adapters_are_refused(ctx: Context) -> None:
    """A refit of adapters does not match the engine's tensors, and changes nothing."""
    trainer, generation = adapter_trainer(ctx), unequal_engine(ctx)
    before = greedy(ctx, generation, seed=0)
    with raises(ManifestMismatchError):
        run_refit(trainer, generation)
    same(generation.weights_version, ctx.first_version, "weights_version after the refused refit")
    same_output(ctx, greedy(ctx, generation, seed=0), before)
