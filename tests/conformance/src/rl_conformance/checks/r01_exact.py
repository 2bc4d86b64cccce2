"""R1, R3 and R7: what a refit brings, bit for bit."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated_mask
from rl_conformance.checks.common import (
    WAKINGS,
    adapted_policy,
    fresh_doubles,
    needs_adapters,
    renew_tensors,
    train_adapters,
)
from rl_conformance.doubles import Engine, Engines, Trainer
from rl_conformance.expect import NotRun, raised, raises, require, same, same_tensor
from rl_conformance.figures import Timeline
from rl_conformance.models import families_of
from rl_conformance.peers import RemoteGeneration
from rl_conformance.quiet import no_progress_bars
from rl_conformance.refits import (
    MODES,
    agree,
    attempt,
    equal,
    modes_of,
    odd_tensors,
    own_backend,
    run_refit,
    second_engine,
    supports,
    take_step,
    unequal_pair,
    whole_tensors,
)
from rl_conformance.registry import CORE, check
from rl_conformance.served import certain_prompts
from rl_conformance.ways import engine_for, exact, settable_trainer, shuffle, ways_of
from rl_conformance.weights import (
    checkpoint_weights,
    digests,
    engine_weights,
    policy_weights,
    same_weights,
)
from rl_core.errors import ConfigError, LifecycleError, RLError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context


_LEVELS = ("none", "wire", "installed")


@check(
    "R1",
    cases={f"{m}_{v}": {"mode": m, "verify": v} for m in MODES for v in _LEVELS},
)
def the_engine_equals_the_policy(ctx: Context, mode: str, verify: str) -> None:
    """After a refit tensors are equal bit for bit and log-probs within tolerance."""
    policy, generation = unequal_pair(ctx)
    supports(ctx, policy, mode)
    report = run_refit(policy, generation, mode=mode, verify=verify)
    same(report.mode, mode, "mode of the report")
    ctx.record(Timeline.of("Phases of a refit", f"{mode}, verify={verify}", report.phases))
    equal(policy, generation)
    agree(ctx, policy, generation)


@check("R1")
def a_delta_is_exact(ctx: Context) -> None:
    """A refit that sends only what changed leaves the engine equal; nothing changed, none sent."""
    policy, generation = unequal_pair(ctx)
    report = run_refit(policy, generation, delta=True)
    same(report.skipped, 0, "tensors skipped by the first refit of a delta")
    report = run_refit(policy, generation, delta=True)
    same(report.tensors, 0, "tensors sent by a delta after no change")
    take_step(policy)
    report = run_refit(policy, generation, delta=True)
    require(report.tensors > 0, "tensors sent by a delta after training", "> 0", report.tensors)
    equal(policy, generation)
    agree(ctx, policy, generation)


@check("R1")
def a_trained_policy_arrives(ctx: Context) -> None:
    """Train, refit, train, refit: the engine equals the policy each time."""
    policy, generation = unequal_pair(ctx)
    for _ in range(2):
        for _ in range(5):  # so that what was learned is more than rounding
            take_step(policy)
        policy.offload_before_refit()
        run_refit(policy, generation)
        policy.offload_after_refit()
        equal(policy, generation)
        agree(ctx, policy, generation, ctx.prompts(5, 9, 3))  # they begin what was trained on


@check("R1", cases=MODES)
def what_was_committed_stays(ctx: Context, mode: str) -> None:
    """Neither training nor a refit of another engine changes what an engine has."""
    policy, generation = unequal_pair(ctx)
    supports(ctx, policy, mode)
    run_refit(policy, generation, mode=mode)
    before = engine_weights(generation)
    take_step(policy)
    same_weights(engine_weights(generation), before, "the engine after training")
    run_refit(policy, second_engine(ctx), mode=mode)
    same_weights(engine_weights(generation), before, "the engine after another's refit")


@check("R3", timeout_s=240.0)
def a_refit_crosses_processes(ctx: Context) -> None:
    """An engine in another process: every mode and way to verify, and a delta."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    ways = [(mode, verify) for mode in modes_of(policy) for verify in _LEVELS]
    with RemoteGeneration(ctx, model_name=str(ctx.model("qwen2", seed=0))) as generation:
        for number, (mode, verify) in enumerate(ways, 1):
            run_refit(policy, generation, mode=mode, verify=verify)
            same(generation.weights_version, number, "weights_version")
            _equal_there(policy, generation)
            take_step(policy)
        for mode in modes_of(policy):
            report = run_refit(policy, generation, mode=mode, delta=True)
            require(
                report.tensors > 0, "tensors sent by a delta after training", "> 0", report.tensors
            )
            report = run_refit(policy, generation, mode=mode, delta=True)
            same(report.tensors, 0, "tensors sent by a delta after no change")
            _equal_there(policy, generation)
            agree(ctx, policy, generation)  # type: ignore[arg-type]
            take_step(policy)


def _equal_there(policy: Any, generation: RemoteGeneration) -> None:
    """Fails unless the engine in the other process holds the policy's tensors, bit for bit."""
    installed = generation.digests()
    dtypes = {name: dtype for name, (dtype, _) in installed.items()}
    expected = digests(policy_weights(policy), dtypes)
    wrong = sorted(
        name
        for name in expected.keys() | installed.keys()
        if expected.get(name) != installed.get(name)
    )
    same(wrong, [], "tensors in which the engine's process differs from the policy")


@check("R7", cases={f"buckets_of_{n}": {"bucket_bytes": n} for n in (1024, 65536)})
def small_buckets_split_large_tensors(ctx: Context, bucket_bytes: int) -> None:
    """A bucket smaller than the largest tensor changes nothing."""
    policy, generation = unequal_pair(ctx)
    report = run_refit(policy, generation, bucket_bytes=bucket_bytes)
    require(
        report.buckets > 1, "buckets of the refit", "> 1, as tensors are larger", report.buckets
    )
    equal(policy, generation)
    agree(ctx, policy, generation)


_FAMILIES = {family: {"family": family} for family in ("llama", "qwen3")}


@check("R7", needs=("policy",), cases=_FAMILIES)
def every_family_is_sent(ctx: Context, family: str) -> None:
    """Tied and untied architectures."""
    policy = ctx.fresh_policy(model_name=str(ctx.model(family, seed=1)))
    generation = ctx.closing(own_backend(ctx, "generation", family=family, seed=0))
    run_refit(policy, generation)
    equal(policy, generation)


_BUCKETS: dict[str, dict[str, Any]] = {
    f"buckets_of_{n}": {"bucket_bytes": n} for n in (256, 4096, 1 << 20)
}


@check("R7", cases=_BUCKETS, needs=(CORE,))
def odd_tensors_arrive(ctx: Context, bucket_bytes: int) -> None:
    """Tied, strided, transposed, 0-d, empty, and many dtypes and sizes, bit for bit."""
    policy = ctx.closing(Trainer(odd_tensors(1, ctx.settings.device)))
    engine = ctx.closing(Engine(odd_tensors(2, ctx.settings.device)))
    run_refit(policy, engine, mode="packed", bucket_bytes=bucket_bytes, verify="installed")
    same_weights(engine.tensors, policy.tensors, "the engine")


@check("R7", cases=_BUCKETS, needs=(CORE,))
def odd_tensors_are_read_in_place(ctx: Context, bucket_bytes: int) -> None:
    """The same where the engine reads the trainer's own memory, into strided tensors or not."""
    policy = ctx.closing(Trainer(odd_tensors(1, ctx.settings.device)))
    engines = [
        ctx.closing(Engine(make(2, ctx.settings.device))) for make in (odd_tensors, whole_tensors)
    ]
    options: dict[str, Any] = {"mode": "direct", "bucket_bytes": bucket_bytes}
    run_refit(policy, Engines(*engines), verify="installed", **options)
    for engine in engines:
        same_weights(engine.tensors, policy.tensors, "the engine")


@check("R1", needs=(CORE,))
def tensors_that_overlap_untied_are_refused(ctx: Context) -> None:
    """An engine with one memory for two tensors cannot have the weights of both."""
    policy = ctx.closing(Trainer({name: torch.arange(4.0) for name in ("a", "b")}))
    memory = torch.zeros(6)
    engine = ctx.closing(Engine({"a": memory[:4], "b": memory[2:]}))
    raised(attempt(policy, engine, verify="none"), RLError)
    same(engine.weights_version, 0, "weights_version after the refusal")


@check("R1", needs=(CORE,))
def a_delta_after_a_refit_without_hashes_is_whole(ctx: Context) -> None:
    """What was committed with verify="none" is not taken for what was hashed before."""
    policy, engine = fresh_doubles(ctx)
    for seed, options in ((1, {}), (3, {"verify": "none"}), (1, {"delta": True})):
        renew_tensors(policy, seed)
        run_refit(policy, engine, **options)
        same_weights(engine.tensors, policy.tensors, f"the engine, refit with {options}")


@check("R7", cases=MODES, needs=(CORE,))
def tied_tensors_reach_an_engine_that_has_both(ctx: Context, mode: str) -> None:
    """An engine of which the two names have memory of their own gets the weights twice."""
    policy, _ = fresh_doubles(ctx)
    engine = ctx.closing(Engine({name: t.clone() for name, t in whole_tensors(2).items()}))
    run_refit(policy, engine, mode=mode)
    same_weights(engine.tensors, policy.tensors, "the engine")


@check("R1", needs=("generation",))
def one_changed_tensor_is_enough(ctx: Context) -> None:
    """Delta after delta, each with another tensor that changed: it alone is sent, and it serves."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    for version, (name, _) in enumerate(policy.model.named_parameters(), 2):
        shuffle(policy, version, [name])
        report = run_refit(policy, engine, delta=True)
        same(report.tensors, 1, f"tensors sent by a delta after a change of {name}")
        exact(ctx, policy, engine, f"a delta with {name}", version)


#: What was called since all was awake, and the ways in which the rest is woken.
_ASLEEP: dict[str, list[dict[str, Any]]] = {
    "all": [],
    "all_but_the_weights": [{"tags": ["weights"]}],
    "all_but_the_cache": [{"tags": ["kv_cache"]}],
}


@check("R1", needs=("generation",), cases={name: {"woken": w} for name, w in _ASLEEP.items()})
def a_refit_during_sleep_serves_after_waking(ctx: Context, woken: list[dict[str, Any]]) -> None:
    """Asleep or half awake: what the last refit brought serves, however the rest is woken.

    Until then it is refused to generate, before the refit and after it.
    """
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    for version, waking in enumerate([*WAKINGS, *WAKINGS[:1]], 2):
        engine.finish_generation()
        for tags in woken:
            engine.prepare_for_generation(**tags)
        shuffle(policy, version)
        with raises(LifecycleError):
            engine.generate(ctx.prompts(5), greedy=True)
        run_refit(policy, engine, delta=version == 3)
        with raises(LifecycleError):
            engine.generate(ctx.prompts(5), greedy=True)
        if version == 2 + len(WAKINGS):  # it may fall asleep again before it serves
            engine.finish_generation()
        for tags in waking:
            engine.prepare_for_generation(**tags)
        exact(ctx, policy, engine, f"woken by {waking}", version)


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
        same_weights(engine_weights(engine), policy_weights(policy), "the engine")
    policy.model.load_state_dict(sound)
    run_refit(policy, engine)
    exact(ctx, policy, engine, "finite weights after those", engine.weights_version)


_PARTS: dict[str, dict[str, Any]] = {
    "last_rows": {"part": lambda tensor: tensor[-1:]},
    "last_columns": {"part": lambda tensor: tensor[:, -1:] if tensor.dim() > 1 else tensor[-1:]},
    "rows_in_the_middle": {"part": lambda tensor: tensor[len(tensor) // 2 :][:1]},
    "vectors": {"part": lambda tensor: tensor if tensor.dim() == 1 else tensor[:0]},
    "matrices": {"part": lambda tensor: tensor if tensor.dim() > 1 else tensor[:0]},
}


@check("R1", cases=_PARTS, needs=("generation",))
def every_part_of_every_tensor_is_updated(
    ctx: Context, part: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """What changed in a small part of one tensor shows in the engine's log-probs.

    They show what the engine computes with, whatever it reports.
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
        take_step(policy, step)
        way(policy, engine)
        path = ctx.directory() / f"saved-{step}"
        policy.save_checkpoint(str(path))
        installed = engine_weights(engine)
        saved = {k: v.to(installed[k].dtype) for k, v in checkpoint_weights(path).items()}
        same_weights({name: installed[name] for name in saved}, saved, "the engine")


@check("R7", needs=("generation",), cases=families_of("R7"))
def every_family_serves_what_arrived(ctx: Context, family: str) -> None:
    """Tied, untied and large tensors, again and again: their log-probs are the policy's."""
    policy = ctx.closing(own_backend(ctx, "policy", family=family, seed=1))
    with ctx.refusable(family):
        engine = ctx.fresh_generation(model_name=str(ctx.model(family, seed=0)))
    engine.prepare_for_generation()
    for version in (1, 2, 3):
        run_refit(policy, engine, delta=version == 3)
        exact(ctx, policy, engine, f"refit {version} of {family}", version)
        shuffle(policy, version, ["model.norm.weight", "lm_head.weight"] if version > 1 else None)


@check("R1", needs=("generation",))
def adapters_of_a_module_arrive_merged_once(ctx: Context) -> None:
    """An engine has what peft's own merge gives, refit after refit, and the module is as it was."""
    needs_adapters("peft", "rl_hf")
    import peft
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(ctx.model("qwen2", seed=1), dtype=torch.float32)
        settings = peft.LoraConfig(  # adapters that are more than rounding
            task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False
        )
        model: Any = peft.get_peft_model(base, settings)
    generation = ctx.refit_generation()
    data = certain_prompts(ctx, seed=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        run_refit(model, generation)
        for name, tensor in model.state_dict().items():
            same_tensor(tensor, before[name], name)
        path = ctx.directory()
        with no_progress_bars():
            copy.deepcopy(model).merge_and_unload().save_pretrained(path)
        output = generation.generate(data, greedy=True)
        inside = generated_mask(data, output)
        lengths = output["unpadded_sequence_lengths"]
        expected = ctx.oracle(path).batch_logprobs(output["output_ids"], lengths)
        ctx.measure_error(output["logprobs"][inside], expected[inside])
    arrived = engine_weights(generation)
    model.merge_adapter()
    run_refit(model, generation)
    for name, tensor in engine_weights(generation).items():
        ctx.measure_error(tensor, arrived[name])


@check("R1", needs=("policy",))
def adapters_of_a_policy_arrive_merged_once(ctx: Context) -> None:
    """Train, refit, train, refit: the engine computes what the policy does with its adapters."""
    policy, generation = adapted_policy(ctx), ctx.refit_generation()
    for _ in range(2):
        train_adapters(policy)
        run_refit(policy, generation)
        equal(policy, generation)
        agree(ctx, policy, generation, ctx.prompts(5, 9, 3))


@check("R1", needs=("policy",))
def adapters_of_a_policy_are_sent_alone(ctx: Context) -> None:
    """A and B of what is sent make the difference between the exported weights and the base."""
    try:
        policy = adapted_policy(ctx, refit="adapter")
    except ConfigError:
        raise NotRun(
            "the policy cannot send adapters alone: it refuses lora.refit", excused=True
        ) from None
    train_adapters(policy)
    sent = policy_weights(policy)
    engine = ctx.closing(Engine({name: torch.zeros_like(t) for name, t in sent.items()}))
    run_refit(policy, engine)
    path = ctx.directory() / "saved"
    policy.save_checkpoint(str(path))
    base = checkpoint_weights(ctx.model("qwen2", seed=1))
    saved = checkpoint_weights(path)
    changed = {n for n, tensor in base.items() if not torch.equal(saved[n], tensor.to(saved[n]))}
    layers = {f"base_model.model.{name.removesuffix('.weight')}": name for name in changed}
    names = {f"{layer}.lora_{kind}.weight" for layer in layers for kind in "AB"}
    same(sorted(engine.tensors), sorted(names), "the tensors that are sent")
    errors = []
    for layer, name in layers.items():
        first, second = (engine.tensors[f"{layer}.lora_{kind}.weight"] for kind in "AB")
        update = saved[name].float() - base[name].float()
        errors.append(float((second.float() @ first.float() - update).abs().max()))
    tolerance = 1e-5 if ctx.settings.dtype == "float32" else 2e-2
    ctx.measure("largest error of B A", max(errors), tolerance)


@check("R1", needs=("generation",))
def frozen_parameters_of_a_module_arrive(ctx: Context) -> None:
    """What is not trained, and differs, is sent by a full refit as by a delta."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    for step in range(3):
        run_refit(policy.model, engine, delta=step == 2)
        equal(policy, engine)
        agree(ctx, policy, engine)
        shuffle(policy, step, ["model.norm.weight"] if step else None)
