"""R1 to R3, R5 to R7, R10, R12: refits that go well, and what they promise."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_conformance.doubles import SeveralEngines, TensorEngine, TensorPolicy
from rl_conformance.expect import raises, require
from rl_conformance.faults import failing_write, in_the_engine
from rl_conformance.figures import Timeline
from rl_conformance.leftovers import Leftovers
from rl_conformance.memory import MemoryPeak
from rl_conformance.peers import RemoteGeneration
from rl_conformance.refits import (
    MODES,
    agree,
    attempt,
    equal,
    fresh_engine,
    modes_of,
    odd_tensors,
    run_refit,
    supports,
    unequal_pair,
    whole_tensors,
)
from rl_conformance.registry import check
from rl_conformance.served import greedy, made_by, same_output
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.ways import ticket_for
from rl_conformance.weights import (
    checkpoint_weights,
    digests,
    engine_weights,
    policy_weights,
    same_weights,
)
from rl_core.errors import LoopWarning, ManifestMismatchError
from rl_core.interfaces import TensorSpec
from rl_core.weights import WeightManifest

if TYPE_CHECKING:
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
    require(report.mode == mode, f"the mode was {report.mode}")
    ctx.record(Timeline.of("Phases of a refit", f"{mode}, verify={verify}", report.phases))
    equal(policy, generation)
    agree(ctx, policy, generation)


@check("R1")
def a_delta_is_exact(ctx: Context) -> None:
    """A refit that sends only what changed leaves the engine equal; nothing changed, none sent."""
    policy, generation = unequal_pair(ctx)
    report = run_refit(policy, generation, delta=True)
    require(report.skipped == 0, f"{report.skipped} tensors were left out of the first refit")
    report = run_refit(policy, generation, delta=True)
    require(report.tensors == 0, f"{report.tensors} tensors were sent, none had changed")
    _train(policy)
    report = run_refit(policy, generation, delta=True)
    require(report.tensors > 0, "training changed nothing")
    equal(policy, generation)
    agree(ctx, policy, generation)


@check("R1")
def a_trained_policy_arrives(ctx: Context) -> None:
    """Train, refit, train, refit: the engine equals the policy each time."""
    policy, generation = unequal_pair(ctx)
    for _ in range(2):
        for _ in range(5):  # so that what was learned is more than rounding
            _train(policy)
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
    _train(policy)
    same_weights(engine_weights(generation), before, "the engine after training")
    other = fresh_engine(ctx)
    run_refit(policy, other, mode=mode)
    same_weights(engine_weights(generation), before, "the engine after another's refit")


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
    changed = msgspec.structs.replace(first, shape=(*first.shape, 2))
    return [specs[0], changed, *specs[2:]], first.name


def _mistyped(specs: list[TensorSpec]) -> tuple[list[TensorSpec], str]:
    first = specs[1]
    changed = msgspec.structs.replace(first, dtype="int8")
    return [specs[0], changed, *specs[2:]], first.name


_MISMATCHES: dict[str, dict[str, Any]] = {
    "missing": {"kind": "missing", "change": _without_one},
    "unexpected": {"kind": "unexpected", "change": _with_one_more},
    "misshaped": {"kind": "misshaped", "change": _misshaped},
    "mistyped": {"kind": "mistyped", "change": _mistyped},
}


@check("R2", cases=_MISMATCHES)
def a_mismatch_is_named_and_nothing_is_touched(ctx: Context, kind: str, change: Any) -> None:
    """ManifestMismatchError lists the name; the engine serves the old version."""
    policy, generation = unequal_pair(ctx)
    before = greedy(ctx, generation, seed=0)
    info: Any = policy.prepare_refit_info()
    specs = list(msgspec.convert(info["tensors"], tuple[TensorSpec, ...]))
    changed, name = change(specs)
    manifest = WeightManifest.of(changed)
    tampered = info | {"tensors": manifest.info, "digest": manifest.digest}
    with raises(ManifestMismatchError, name) as caught:
        generation.prepare_refit_info(tampered)
    require(caught.error.details[kind] == [name], f"details[{kind!r}] is not [{name!r}]")
    require(generation.weights_version == 0, f"the version is {generation.weights_version}")
    same_output(ctx, greedy(ctx, generation, seed=0), before)


@check("R3", timeout_s=240.0)
def a_refit_crosses_processes(ctx: Context) -> None:
    """An engine in a process of its own: every mode and way to verify, and a delta."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    ways = [(mode, verify) for mode in modes_of(policy) for verify in _LEVELS]
    with RemoteGeneration(ctx, model_name=str(ctx.model("qwen2", seed=0))) as generation:
        for number, (mode, verify) in enumerate(ways, 1):
            run_refit(policy, generation, mode=mode, verify=verify)
            require(generation.weights_version == number, f"version {generation.weights_version}")
            _equal_there(policy, generation)
            _train(policy)
        for mode in modes_of(policy):
            report = run_refit(policy, generation, mode=mode, delta=True)
            require(report.tensors > 0, "training changed nothing")
            report = run_refit(policy, generation, mode=mode, delta=True)
            require(report.tensors == 0, f"{report.tensors} tensors were sent, none had changed")
            _equal_there(policy, generation)
            agree(ctx, policy, generation)  # type: ignore[arg-type]
            _train(policy)


def _train(policy: Any) -> None:
    """A step, so that there is something to send."""
    policy.prepare_for_training()
    policy.train(training_batch((9, 14, 6)), NegativeLogLikelihood())


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
    require(not wrong, f"the engine differs in {len(wrong)} tensors: {', '.join(wrong[:3])}")


@check("R5")
def the_older_methods_are_exact(ctx: Context) -> None:
    """One group, one ticket, one update_weights, which commits."""
    policy, generation = unequal_pair(ctx)
    ticket = ticket_for(policy, generation)
    require(generation.weights_version == 0, "the version moved before the ticket was taken")
    require(generation.update_weights(ticket) is True, "no True")
    require(generation.weights_version == 1, f"the version is {generation.weights_version}")
    equal(policy, generation)
    agree(ctx, policy, generation)


_REFITS = 100
#: After which of them buffers and caches are warm.
_WARM = 4
#: Memory is watched for the last so many. What grows is watched again: an allocator settles.
_WATCHED, _LOOKS = 50, 6
#: 40 KiB for each of them.
_MOST_GROWTH = 2 << 20


@check("R6", cases=MODES, timeout_s=300.0)
def refit_after_refit_stays_exact(ctx: Context, mode: str) -> None:
    """A hundred refits of changing weights: each exact, and nothing grows."""
    policy, generation = unequal_pair(ctx)
    supports(ctx, policy, mode)
    _repeat(ctx, policy, generation, mode=mode)


@check("R6", capability="staged", timeout_s=300.0)
def staged_refits_stay_exact(ctx: Context) -> None:
    """The same with a second copy of the weights, which is taken and given back each time."""
    policy, generation = unequal_pair(ctx)
    _repeat(ctx, policy, generation, isolation="staged")


def _repeat(ctx: Context, policy: Any, generation: Any, **options: Any) -> None:
    data, loss = training_batch((9, 14, 6)), NegativeLogLikelihood()

    def refit(times: int) -> None:
        for _ in range(times):
            policy.prepare_for_training()
            policy.train(data, loss)
            run_refit(policy, generation, **options)
            equal(policy, generation)

    refit(_WARM)
    before = Leftovers.now()
    refit(_REFITS - _WARM - _WATCHED)
    for look in range(_LOOKS):  # noqa: B007 - how often is asked below
        peak = MemoryPeak()
        refit(_WATCHED)
        if (growth := peak.resident()) <= _MOST_GROWTH:
            break
    refits = _REFITS + _WATCHED * look
    require(generation.weights_version == refits, f"version {generation.weights_version}")
    grown = before.wait_until_back()
    require(not grown, f"{refits - _WARM} refits left behind: {grown}")
    ctx.measure("memory_growth", growth, _MOST_GROWTH, "bytes")


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
    generation = ctx.fresh_generation(model_name=str(ctx.model(family, seed=0)))
    generation.prepare_for_generation()
    run_refit(policy, generation)
    equal(policy, generation)


_BUCKETS = (64, 4096, 1 << 20)


@check("R7", cases={f"buckets_of_{n}": {"bucket_bytes": n} for n in _BUCKETS})
def odd_tensors_arrive(ctx: Context, bucket_bytes: int) -> None:
    """Tied, strided, transposed, 0-d, empty, and many dtypes and sizes, bit for bit."""
    policy = ctx.closing(TensorPolicy(odd_tensors(1, ctx.settings.device)))
    engine = ctx.closing(TensorEngine(odd_tensors(2, ctx.settings.device)))
    report = run_refit(policy, engine, bucket_bytes=bucket_bytes, verify="installed")
    require(report.mode == "packed", f"strided tensors were sent {report.mode}")
    same_weights(engine.tensors, policy.tensors, "engine")


@check("R7", cases={f"buckets_of_{n}": {"bucket_bytes": n} for n in _BUCKETS})
def odd_tensors_are_read_in_place(ctx: Context, bucket_bytes: int) -> None:
    """The same where the engine reads the trainer's own memory, into strided tensors or not."""
    policy = ctx.closing(TensorPolicy(whole_tensors(1, ctx.settings.device)))
    engines = [
        ctx.closing(TensorEngine(make(2, ctx.settings.device)))
        for make in (odd_tensors, whole_tensors)
    ]
    options: dict[str, Any] = {"mode": "direct", "bucket_bytes": bucket_bytes}
    run_refit(policy, SeveralEngines(*engines), verify="installed", **options)
    for engine in engines:
        same_weights(engine.tensors, policy.tensors, "engine")


@check("R10")
def the_version_moves_on_commit(ctx: Context) -> None:
    """Before the refit 0, after it 1, and every row says so, and whose version it is."""
    policy, generation = unequal_pair(ctx)
    require(generation.weights_version == 0, f"at first it is {generation.weights_version}")
    report = run_refit(policy, generation)
    require(report.version == generation.weights_version == 1, f"after it: {report.version}")
    made_by(greedy(ctx, generation, seed=0), 1, report.origin)


@check("R10")
def versions_of_two_trainers_are_told_apart(ctx: Context) -> None:
    """Two trainers commit one version: rows say whose it is, and the loop is told."""
    one, generation = unequal_pair(ctx)
    two = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=2)))
    origins: list[int] = []
    for policy in (one, two, one):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            report = run_refit(policy, generation, version=5)
        made_by(greedy(ctx, generation, seed=0), 5, report.origin)
        require(generation.weights_origin == report.origin, f"{report.origin} is not the engine's")
        before = [(engine["version"], engine["origin"]) for engine in report.taken_over]
        expected = [(5, origin) for origin in origins[-1:]]
        require(before == expected, f"it reports that {before} served before, not {expected}")
        told = sum(issubclass(warning.category, LoopWarning) for warning in said)
        require(told == (policy is two), f"{told} warnings of another trainer")
        origins.append(report.origin)
    require(origins[0] == origins[2] != origins[1], f"origins of two trainers: {origins}")


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
    with in_the_engine(generation, failing_write, after=3):
        require(attempt(policy, generation) is not None, "a refit that failed is reported as done")
    require(generation.weights_version == 0, f"the version is {generation.weights_version}")


@check("R10")
def caches_do_not_outlive_the_version(ctx: Context) -> None:
    """The same prompts after a refit give what a fresh engine with those weights gives."""
    policy, generation = unequal_pair(ctx)
    old = greedy(ctx, generation, seed=1)
    long = ctx.prompts(20, 70, 150)  # whole blocks of a cache, and several
    generation.generate(long, greedy=True)
    run_refit(policy, generation)
    fresh = ctx.fresh_generation(model_name=str(ctx.model("qwen2", seed=1)))
    fresh.prepare_for_generation()
    new, expected = (greedy(ctx, engine, seed=1) for engine in (generation, fresh))
    same_output(ctx, new, expected)
    require(not torch.equal(old["output_ids"], new["output_ids"]), "the refit changed nothing")
    first = torch.arange(3), long["input_lengths"]
    scores = [e.generate(long, greedy=True)["logprobs"][first] for e in (generation, fresh)]
    ctx.measure_error(*scores, scale=2, rounding=2)


_BUCKETS_OF = {f"buckets_of_{n >> 10}_KiB": {"bucket_bytes": n} for n in (64 << 10, 1 << 20)}


@check("R12", cases=_BUCKETS_OF)
def extra_memory_stays_bounded(ctx: Context, bucket_bytes: int) -> None:
    """At no moment more than two buckets and the declared constant, and never a second copy."""
    _bounded(ctx, 2 * bucket_bytes, bucket_bytes=bucket_bytes, mode="packed")


@check("R12")
def a_direct_refit_takes_no_buffers(ctx: Context) -> None:
    """Once the tensors lie where engines read them, a refit takes no more than the constant."""
    _bounded(ctx, 0, mode="direct")


def _bounded(ctx: Context, buffers: int, **options: Any) -> None:
    """Measures a first refit, or a direct one once the tensors are where they are to be."""
    constant = ctx.manifest.refit_constant_bytes
    path = str(ctx.large_model(constant + constant // 2))
    policy, generation = ctx.fresh_policy(model_name=path), ctx.fresh_generation(model_name=path)
    generation.prepare_for_generation()
    generation.generate(ctx.prompts(5), greedy=True)  # checkpoints that are mapped are read by now
    policy.get_logprobs(training_batch((5,)))
    if options["mode"] == "direct":
        supports(ctx, policy, "direct")
        run_refit(policy, generation, **options)
    peak = MemoryPeak(trim=True)
    report = run_refit(policy, generation, **options)
    ctx.measure("buffers", report.extra_memory_bytes, buffers, "bytes")
    resident = "resident_peak" if peak.exact else "resident_kept"
    ctx.measure(resident, peak.resident(), buffers + constant, "bytes")
    ctx.measure("device_peak", peak.device(), buffers + constant, "bytes")
