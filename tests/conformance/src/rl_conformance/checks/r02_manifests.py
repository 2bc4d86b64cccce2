"""R2: manifests, and what is refused by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_conformance.checks.common import change_nothing
from rl_conformance.expect import raises, require, same
from rl_conformance.refits import run_refit, take_step, unequal_pair
from rl_conformance.registry import check
from rl_conformance.served import greedy, same_output
from rl_conformance.ways import settable_trainer, shuffle
from rl_conformance.weights import checkpoint_weights, policy_weights, same_weights
from rl_core.errors import ManifestMismatchError
from rl_core.interfaces import TensorSpec
from rl_core.weights import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context


@check("R2")
def the_manifest_describes_the_checkpoint(ctx: Context) -> None:
    """Every tensor of the checkpoint's files is there with its shape, dtype and role."""
    policy = ctx.fresh_policy()
    info: Any = policy.prepare_refit_info()
    described = {item["name"]: item for item in info["tensors"]}
    saved = checkpoint_weights(ctx.model())
    same(sorted(saved.keys() - described.keys()), [], "tensors missing in prepare_refit_info")
    for name, tensor in saved.items():
        item = described[name]
        same(tuple(item["shape"]), tuple(tensor.shape), f"shape of {name}")
        same(item["dtype"], ctx.settings.dtype, f"dtype of {name}")
        known = item["role"] in ("parameter", "buffer")
        require(known, f"role of {name}", "parameter or buffer", item["role"])


@check("R2")
def tied_tensors_are_declared(ctx: Context) -> None:
    """The tied output head is in one alias group with the embeddings."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    info: Any = policy.prepare_refit_info()
    aliases = [item for item in info["tensors"] if item["alias_of"]]
    require(len(aliases) == 1, "tensors with alias_of", "the output head", aliases)
    groups = {item["alias_group"] for item in info["tensors"] if item["alias_group"]}
    require(len(groups) == 1, "alias groups", "one", groups)


def _without_one(specs: list[TensorSpec]) -> tuple[list[TensorSpec], str]:
    left_out = next(s for s in specs if s.name.endswith("layers.1.mlp.up_proj.weight"))
    return [s for s in specs if s is not left_out], left_out.name


def _changed(specs: list[TensorSpec], **how: Any) -> tuple[list[TensorSpec], str]:
    return [specs[0], msgspec.structs.replace(specs[1], **how), *specs[2:]], specs[1].name


_STRANGER = TensorSpec("stranger.weight", (2, 3), "float32")
_MISMATCHES: dict[str, dict[str, Any]] = {
    "missing": {"kind": "missing", "change": _without_one},
    "unexpected": {
        "kind": "unexpected",
        "change": lambda specs: ([*specs, _STRANGER], _STRANGER.name),
    },
    "misshaped": {
        "kind": "misshaped",
        "change": lambda specs: _changed(specs, shape=(*specs[1].shape, 2)),
    },
    "mistyped": {"kind": "mistyped", "change": lambda specs: _changed(specs, dtype="int8")},
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
    same(caught.error.details[kind], [name], f"details[{kind!r}] of the error")
    same(generation.weights_version, ctx.first_version, "weights_version after the refused call")
    same_output(ctx, greedy(ctx, generation, seed=0), before)


@check("R2", needs=("policy",))
def the_source_matches_its_description(ctx: Context) -> None:
    """Its description stays, and it gives the requested tensors in that order and as described."""
    policy: Any = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    make = getattr(policy, "refit_source", None)
    if make is None:
        ctx.not_run(
            "the policy has no weight_source in this process (of PolicyBackend)", excused=True
        )
    described = policy.prepare_refit_info()
    for _ in range(2):
        again = policy.prepare_refit_info()
        same(again["tensors"], described["tensors"], "tensors of a second prepare_refit_info")
        same(again["digest"], described["digest"], "digest of a second prepare_refit_info")
        source = make()
        specs = {spec.name: spec for spec in source.specs() if spec.alias_of is None}
        before = policy_weights(policy)
        names = sorted(specs, reverse=True)
        for chosen in (names, names[::3], []):
            given = [
                (name, tensor.detach().cpu().clone()) for name, tensor in source.tensors(chosen)
            ]
            same([n for n, _ in given], chosen, "names that the source's tensors(names) gives")
            for name, tensor in given:
                wanted = specs[name]
                got = tuple(tensor.shape), tensor.dtype
                same(got, (wanted.shape, wanted.torch_dtype), f"shape and dtype of {name}")
            same_weights(
                dict(given), {name: before[name] for name in chosen}, "tensors(names) of some names"
            )
        pieces = source.pieces()
        if pieces is not None:
            missing = specs.keys() - {piece.name for piece in pieces}
            same(sorted(missing), [], "names missing in the source's pieces()")
            same_weights(
                {str(p[:2]): p.tensor.detach().cpu() for p in pieces},
                {
                    str(p[:2]): before[p.name][tuple(slice(*ends) for ends in p.box)].clone()
                    for p in pieces
                },
                "pieces()",
            )
        take_step(policy)
        policy.offload_before_refit()
        policy.offload_after_refit()


@check("R2", needs=("generation",))
def the_sink_matches_its_description(ctx: Context) -> None:
    """Its description stays, and it reads the requested tensors in that order and as described."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    make: Any = getattr(engine, "weight_sink", None)
    if make is None:
        ctx.not_run(
            "the engine has no weight_sink in this process (of GenerationBackend)", excused=True
        )
    first = {spec.name: spec for spec in make().specs()}
    for seed in range(2):
        shuffle(policy, seed)
        run_refit(policy, engine)
        sink = make()
        again = {spec.name: spec for spec in sink.specs()}
        require(again == first, "specs of the sink after a refit", first, again)
        names, ours = sorted(first, reverse=True), policy_weights(policy)
        for chosen in (names, names[::3], []):
            given = [(name, tensor.detach().cpu().clone()) for name, tensor in sink.read(chosen)]
            same([n for n, _ in given], chosen, "names that the sink's read(names) gives")
            expected = {n: ours[n].to(getattr(torch, first[n].dtype)) for n in chosen}
            same_weights(dict(given), expected, "read back")


@check("R2", needs=("generation",))
def refused_descriptions_change_nothing(ctx: Context) -> None:
    """Manifests that do not match, forged or malformed ones: whatever served serves on."""

    def refused(policy: Any, engine: Any) -> dict[str, Callable[[], object]]:
        info = policy.prepare_refit_info()
        specs = list(msgspec.convert(info["tensors"], tuple[TensorSpec, ...]))
        owner, tied = specs[0], next(spec for spec in specs if spec.alias_of)

        def of(changed: list[TensorSpec]) -> dict[str, Any]:
            manifest = WeightManifest.of(changed)
            changes: dict[str, Any] = {"tensors": manifest.info, "digest": manifest.digest}
            return {**info, **changes}

        def other(spec: TensorSpec, **changes: Any) -> list[TensorSpec]:
            changed = msgspec.structs.replace(spec, **changes)
            return [changed if one is spec else one for one in specs]

        turned = next(s for s in specs if len(s.shape) == 2 and s.shape[0] != s.shape[1])
        wrong = {
            "without the first": lambda: of(
                [s for s in specs if owner.name not in (s.name, s.alias_of)]
            ),
            "without the last": lambda: of(specs[:-1]),
            "one more": lambda: of([*specs, TensorSpec("stranger.weight", (2, 3), "float32")]),
            "turned": lambda: of(other(turned, shape=turned.shape[::-1])),
            "flat": lambda: of(other(turned, shape=(turned.shape[0] * turned.shape[1],))),
            "of integers": lambda: of(other(specs[1], dtype="int32")),
            "renamed": lambda: of(other(specs[1], name=specs[1].name + "x")),
            "tied otherwise": lambda: of(
                other(specs[2], alias_of=specs[1].name, shape=specs[1].shape)
            ),
            "twice the same": lambda: info | {"tensors": [*info["tensors"], info["tensors"][0]]},
            "another digest": lambda: info | {"digest": "0" * len(info["digest"])},
            "another protocol": lambda: info | {"protocol": 0},
            "no tensors": lambda: of([]),
            "nothing": dict,
        }
        require(tied.name != owner.name, "the suite's own tied tensor", "two names", tied.name)
        return {
            name: lambda make=make: engine.prepare_refit_info(make())  # type: ignore[misc]
            for name, make in wrong.items()
        }

    change_nothing(ctx, refused)
