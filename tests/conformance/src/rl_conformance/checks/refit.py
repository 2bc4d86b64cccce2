"""R1 to R7, R10 to R14: refits that go well, and what they promise."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rl_conformance.doubles import (
    SeveralEngines,
    TensorEngine,
    TensorPolicy,
    broken_tensor,
    failing_write,
    sink_class,
)
from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.leftovers import Leftovers
from rl_conformance.peers import RemoteGeneration
from rl_conformance.refits import (
    DEADLINE_S,
    agree,
    equal,
    greedy,
    odd_tensors,
    run_refit,
    unequal_pair,
)
from rl_conformance.registry import check, refusal
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import checkpoint_weights, same_weights
from rl_core.errors import CapabilityError, ManifestMismatchError, RLError
from rl_core.interfaces import TensorSpec
from rl_core.refit import WeightManifest

if TYPE_CHECKING:
    from rl_conformance.context import Context


@check("R1", cases={level: {"verify": level} for level in ("none", "wire", "installed")})
def the_engine_equals_the_policy(ctx: Context, verify: str) -> None:
    """After a refit tensors are equal bit for bit and log-probs within tolerance."""
    policy, generation = unequal_pair(ctx)
    run_refit(policy, generation, verify=verify)
    equal(policy, generation)
    agree(ctx, policy, generation)


@check("R1")
def a_trained_policy_arrives(ctx: Context) -> None:
    """Train, refit, train, refit: the engine equals the policy each time."""
    policy, generation = unequal_pair(ctx)
    for _ in range(2):
        policy.prepare_for_training()
        policy.train(training_batch((9, 14, 6)), NegativeLogLikelihood())
        policy.offload_before_refit()
        run_refit(policy, generation)
        policy.offload_after_refit()
        equal(policy, generation)
        agree(ctx, policy, generation)


@check("R2")
def the_manifest_describes_the_checkpoint(ctx: Context) -> None:
    """Every tensor of the checkpoint's files is there with its shape, dtype and role."""
    policy = ctx.fresh_policy()
    info: Any = policy.prepare_refit_info()
    described = {item["name"]: item for item in info["tensors"]}
    saved = checkpoint_weights(ctx.model())
    require(saved.keys() <= described.keys(), f"missing: {saved.keys() - described.keys()}")
    for name, tensor in saved.items():
        item = described[name]
        require(tuple(item["shape"]) == tuple(tensor.shape), f"{name}: shape {item['shape']}")
        require(item["dtype"] == ctx.settings.dtype, f"{name}: dtype {item['dtype']}")
        require(item["role"] in ("parameter", "buffer"), f"{name}: role {item['role']}")


@check("R2")
def tied_tensors_are_declared(ctx: Context) -> None:
    """The tied output head is in one alias group with the embeddings."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    info: Any = policy.prepare_refit_info()
    aliases = [item for item in info["tensors"] if item["alias_of"]]
    require(len(aliases) == 1, f"aliases: {[item['name'] for item in aliases]}")
    groups = {item["alias_group"] for item in info["tensors"] if item["alias_group"]}
    require(len(groups) == 1, f"alias groups: {groups}")


def _without_one(specs: list[TensorSpec]) -> tuple[list[TensorSpec], str]:
    gone = next(s for s in specs if s.name.endswith("layers.1.mlp.up_proj.weight"))
    return [s for s in specs if s is not gone], gone.name


def _with_one_more(specs: list[TensorSpec]) -> tuple[list[TensorSpec], str]:
    return [*specs, TensorSpec("stranger.weight", (2, 3), "float32")], "stranger.weight"


def _misshaped(specs: list[TensorSpec]) -> tuple[list[TensorSpec], str]:
    first = specs[1]
    return [specs[0], dataclasses.replace(first, shape=(*first.shape, 2)), *specs[2:]], first.name


def _mistyped(specs: list[TensorSpec]) -> tuple[list[TensorSpec], str]:
    first = specs[1]
    return [specs[0], dataclasses.replace(first, dtype="int8"), *specs[2:]], first.name


_MISMATCHES: dict[str, dict[str, Any]] = {
    "missing": {"kind": "missing", "change": _without_one},
    "unexpected": {"kind": "unexpected", "change": _with_one_more},
    "misshaped": {"kind": "misshaped", "change": _misshaped},
    "mistyped": {"kind": "mistyped", "change": _mistyped},
}


def _spec(item: dict[str, Any]) -> TensorSpec:
    fields = {field.name for field in dataclasses.fields(TensorSpec)}
    known = {key: value for key, value in item.items() if key in fields}
    return TensorSpec(**known | {"shape": tuple(item["shape"])})


@check("R2", cases=_MISMATCHES)
def a_mismatch_is_named_and_nothing_is_touched(ctx: Context, kind: str, change: Any) -> None:
    """ManifestMismatchError lists the name; the engine serves the old version."""
    policy, generation = unequal_pair(ctx)
    before = greedy(ctx, generation)
    info: Any = policy.prepare_refit_info()
    fields = {field.name for field in dataclasses.fields(TensorSpec)}
    specs = [
        TensorSpec(
            **{k: v for k, v in item.items() if k in fields} | {"shape": tuple(item["shape"])}
        )
        for item in info["tensors"]
    ]
    changed, name = change(specs)
    manifest = WeightManifest.of(changed)
    tampered = info | {"tensors": manifest.to_info(), "digest": manifest.digest}
    with raises(ManifestMismatchError, name) as caught:
        generation.prepare_refit_info(tampered)
    require(caught.error.details[kind] == [name], f"details[{kind!r}] is not [{name!r}]")
    require(generation.weights_version == 0, f"the version is {generation.weights_version}")
    same_tensor(greedy(ctx, generation)["logprobs"], before["logprobs"], "logprobs")


@check("R3", timeout_s=180.0)
def a_refit_crosses_processes(ctx: Context) -> None:
    """An engine in a process of its own gives the policy's log-probs, twice."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    with RemoteGeneration(ctx, model_name=str(ctx.model("qwen2", seed=0))) as generation:
        for version in (1, 2):
            run_refit(policy, generation)
            require(generation.weights_version == version, f"version {generation.weights_version}")
            agree(ctx, policy, generation)  # type: ignore[arg-type]
            policy.prepare_for_training()
            policy.train(training_batch((9, 14, 6)), NegativeLogLikelihood())


@check("R4", cases={"engine": {}}, needs=("generation",))
@check("R4", cases={"trainer": {}}, needs=("policy",))
def the_collective_transport_is_exact(ctx: Context) -> None:
    """Not yet part of the suite: a backend that declares it is not proven."""
    ctx.not_run("this version of the suite does not check the collective transport")


@refusal("generation", "collective")
def joining_a_group_is_refused(ctx: Context) -> None:
    """init_collective and the update raise CapabilityError; the engine serves as before."""
    generation = ctx.generation()
    before = greedy(ctx, generation)
    with raises(CapabilityError):
        generation.init_collective("127.0.0.1", 1, 2)
    with raises(CapabilityError):
        generation.update_weights_from_collective()
    same_tensor(greedy(ctx, generation)["logprobs"], before["logprobs"], "logprobs")


@check("R5")
def the_older_handles_are_exact(ctx: Context) -> None:
    """Group by group through prepare, handles and update_weights; the last one commits."""
    policy, generation = unequal_pair(ctx)
    generation.prepare_refit_info(policy.prepare_refit_info() or {})
    groups = policy.prepare_weights_for_ipc()
    for group in groups:
        require(generation.weights_version == 0, "the version moved before the last group")
        require(generation.update_weights(policy.get_weights_ipc_handles(group)) is True, "no True")
    require(generation.weights_version == 1, f"the version is {generation.weights_version}")
    equal(policy, generation)
    agree(ctx, policy, generation)


_REFITS = 100


@check("R6", timeout_s=300.0)
def refit_after_refit_stays_exact(ctx: Context) -> None:
    """A hundred refits of changing weights: each exact, and nothing grows."""
    policy, generation = unequal_pair(ctx)
    data, loss = training_batch((9, 14, 6)), NegativeLogLikelihood()
    before, memory = Leftovers.now(), 0
    for count in range(_REFITS):
        policy.prepare_for_training()
        policy.train(data, loss)
        run_refit(policy, generation)
        equal(policy, generation)
        if count == 4:  # buffers and caches are warm
            before, memory = Leftovers.now(), psutil.Process().memory_info().rss
    require(generation.weights_version == _REFITS, f"version {generation.weights_version}")
    grown = before.wait_until_back()
    require(not grown, f"{_REFITS - 5} refits left behind: {grown}")
    growth = psutil.Process().memory_info().rss - memory
    ctx.measure("memory_growth", growth, 16 << 20, "bytes")


@check("R7", cases={f"buckets_of_{n}": {"bucket_bytes": n} for n in (1024, 65536)})
def small_buckets_split_large_tensors(ctx: Context, bucket_bytes: int) -> None:
    """A bucket smaller than the largest tensor changes nothing."""
    policy, generation = unequal_pair(ctx)
    report = run_refit(policy, generation, bucket_bytes=bucket_bytes)
    require(report.buckets > 1, f"{report.buckets} bucket; the tensors were not split")
    equal(policy, generation)
    agree(ctx, policy, generation)


@check("R7", cases={family: {"family": family} for family in ("llama", "qwen3")})
def every_family_arrives(ctx: Context, family: str) -> None:
    """Tied and untied architectures."""
    policy = ctx.fresh_policy(model_name=str(ctx.model(family, seed=1)))
    generation = ctx.fresh_generation(model_name=str(ctx.model(family)))
    generation.prepare_for_generation()
    run_refit(policy, generation)
    equal(policy, generation)


@check("R7", cases={f"buckets_of_{n}": {"bucket_bytes": n} for n in (64, 4096, 1 << 20)})
def odd_tensors_arrive(ctx: Context, bucket_bytes: int) -> None:
    """Tied, strided, transposed, 0-d, empty, and ten dtypes and sizes, bit for bit."""
    policy = ctx.closing(TensorPolicy(odd_tensors(1)))
    engine = ctx.closing(TensorEngine(odd_tensors(2)))
    run_refit(policy, engine, bucket_bytes=bucket_bytes, verify="installed")
    same_weights(engine.tensors, policy.tensors, "engine")


@check("R10")
def the_version_moves_on_commit(ctx: Context) -> None:
    """Before the refit 0, after it 1, and every row says so."""
    policy, generation = unequal_pair(ctx)
    require(generation.weights_version == 0, f"at first it is {generation.weights_version}")
    report = run_refit(policy, generation)
    require(report.version == generation.weights_version == 1, f"after it: {report.version}")
    versions = greedy(ctx, generation)["weights_version"]
    same_tensor(versions, torch.ones(3, dtype=torch.int64), "weights_version")


@check("R10")
def a_given_version_is_used(ctx: Context) -> None:
    """version=7 commits as 7, and the next one as 8."""
    policy, generation = unequal_pair(ctx)
    run_refit(policy, generation, version=7)
    require(generation.weights_version == 7, f"the version is {generation.weights_version}")
    run_refit(policy, generation)
    require(generation.weights_version == 8, f"the next version is {generation.weights_version}")


@check("R10")
def a_failed_refit_does_not_move_the_version(ctx: Context) -> None:
    """A loader that raises leaves the old version number."""
    policy, generation = unequal_pair(ctx)
    with failing_write(sink_class(generation), after=3), raises(Exception):
        run_refit(policy, generation)
    require(generation.weights_version == 0, f"the version is {generation.weights_version}")


@check("R10")
def caches_do_not_outlive_the_version(ctx: Context) -> None:
    """The same prompts after a refit give what a fresh engine with those weights gives."""
    policy, generation = unequal_pair(ctx)
    old = greedy(ctx, generation)
    run_refit(policy, generation)
    fresh = ctx.fresh_generation(model_name=str(ctx.model("qwen2", seed=1)))
    fresh.prepare_for_generation()
    new, expected = greedy(ctx, generation), greedy(ctx, fresh)
    same_tensor(new["output_ids"], expected["output_ids"], "output_ids")
    ctx.measure_error(new["logprobs"], expected["logprobs"])
    require(not torch.equal(old["output_ids"], new["output_ids"]), "the refit changed nothing")


@check("R11")
def a_failed_staged_refit_keeps_the_old_version(ctx: Context) -> None:
    """With isolation="staged" a loader that raises leaves the engine serving."""
    policy, generation = unequal_pair(ctx)
    before = greedy(ctx, generation)
    with failing_write(sink_class(generation), after=3), raises(RLError):
        run_refit(policy, generation, isolation="staged")
    after = greedy(ctx, generation)
    same_tensor(after["logprobs"], before["logprobs"], "logprobs")
    run_refit(policy, generation, isolation="staged")
    equal(policy, generation)


@refusal("generation", "staged")
def staged_isolation_is_refused(ctx: Context) -> None:
    """isolation="staged" raises CapabilityError and the engine serves as before."""
    policy, generation = unequal_pair(ctx)
    before = greedy(ctx, generation)
    with raises(CapabilityError):
        run_refit(policy, generation, isolation="staged")
    require(generation.weights_version == 0, f"the version is {generation.weights_version}")
    same_tensor(greedy(ctx, generation)["logprobs"], before["logprobs"], "logprobs")


@check("R12", cases={f"buckets_of_{n >> 10}_KiB": {"bucket_bytes": n} for n in (64 << 10, 1 << 20)})
def extra_memory_stays_bounded(ctx: Context, bucket_bytes: int) -> None:
    """Buffers and resident memory stay within two buckets plus the declared constant."""
    policy, generation = unequal_pair(ctx)
    run_refit(policy, generation, bucket_bytes=1024)  # sockets, threads and code are warm
    before = psutil.Process().memory_info().rss
    report = run_refit(policy, generation, bucket_bytes=bucket_bytes)
    grown = psutil.Process().memory_info().rss - before
    ctx.measure("buffers", report.extra_memory_bytes, 2 * bucket_bytes, "bytes")
    constant = ctx.manifest.refit_constant_bytes
    ctx.measure("resident_growth", grown, 2 * bucket_bytes + constant, "bytes")


@check("R13")
def all_receivers_advance(ctx: Context) -> None:
    """Two engines take one refit and both serve it."""
    policy, first = unequal_pair(ctx)
    second = ctx.fresh_generation()
    second.prepare_for_generation()
    report = run_refit(policy, SeveralEngines(first, second))
    require(report.receivers == 2, f"{report.receivers} receivers took part")
    for engine in (first, second):
        require(engine.weights_version == 1, f"an engine is at {engine.weights_version}")
        equal(policy, engine)


@check("R13")
def no_receiver_advances_alone(ctx: Context) -> None:
    """If one engine fails, it is named and no engine advances; the next refit brings all on."""
    policy = ctx.closing(TensorPolicy(odd_tensors(1)))
    engines = [ctx.closing(TensorEngine(odd_tensors(n), f"engine-{n}")) for n in (2, 3)]
    both = SeveralEngines(*engines)
    with broken_tensor(engines[1], "large"):
        both.prepare_refit_info(policy.prepare_refit_info())
        options: dict[str, Any] = {"deadline_s": DEADLINE_S}
        (sending,) = policy.stream_weights_via_ipc_zmq(receivers=2, **options)
        receiving = both.update_weights_via_ipc_zmq(**options)
        error = sending.exception(DEADLINE_S + 10)
        concurrent.futures.wait(receiving, DEADLINE_S)
    require("engine-3" in str(error), f"the failed engine is not named: {error!r}")
    versions = [engine.weights_version for engine in engines]
    require(versions == [0, 0], f"after a failure the versions are {versions}")
    run_refit(policy, both)
    for engine in engines:
        same_weights(engine.tensors, policy.tensors, "engine")


@check("R14")
def scales_travel_with_the_weights(ctx: Context) -> None:
    """Not yet part of the suite: a backend that declares it is not proven."""
    ctx.not_run("this version of the suite does not check FP8 scales")


@refusal("generation", "kv_scales")
def no_scales_are_asked_for(ctx: Context) -> None:
    """Without kv_scales the engine says that it needs none."""
    generation = ctx.generation()
    require(generation.requires_kv_scale_sync is False, "requires_kv_scale_sync is not False")
