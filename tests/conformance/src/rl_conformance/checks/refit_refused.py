"""R2, R5, R10: calls that are refused change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rl_conformance.expect import fail, raises, require
from rl_conformance.refits import run_refit
from rl_conformance.registry import check
from rl_conformance.ways import engine_for, exact, settable_trainer, shuffle, ticket_for
from rl_conformance.weights import engine_weights, same_weights
from rl_core.errors import RLError
from rl_core.interfaces import TensorSpec
from rl_core.weights import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context

_OPTIONS: tuple[dict[str, Any], ...] = (
    {"mode": "sideways"},
    {"verify": "perhaps"},
    {"isolation": "none"},
    {"transport": "pigeon"},
    {"bucket_bytes": 0},
    {"receivers": 0},
    {"deadline_s": -1.0},
    {"version": 0},
    {"version": "seven"},
    {"delta": True, "verify": "none"},
    {"colour": "red"},
)


@check("R10", needs=("generation",))
def refused_options_change_nothing(ctx: Context) -> None:
    """An option that is not legal ends the call before anything moves, on either side."""

    def refused(policy: Any, engine: Any) -> dict[str, Callable[[], object]]:
        return {
            f"refit({options})": lambda options=options: run_refit(policy, engine, **options)  # type: ignore[misc]
            for options in _OPTIONS
        }

    _change_nothing(ctx, refused)


@check("R10", needs=("policy",))
def refused_options_use_no_version_up(ctx: Context) -> None:
    """A trainer that is asked for what there is not counts nothing, and sends the next exactly."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    engine = engine_for(ctx, "trainer")
    for version in (1, 2):
        for options in _OPTIONS:
            with raises(RLError):
                policy.send_weights(**options)
        with raises(RLError):
            policy.get_weights_ipc_handles(["no.such.tensor"])
        run_refit(policy, engine, delta=version == 2)
        exact(ctx, policy, engine, "after refused options", version)


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
        require(tied.name != owner.name, "a tied tensor is its own owner")
        return {
            name: lambda make=make: engine.prepare_refit_info(make())  # type: ignore[misc]
            for name, make in wrong.items()
        }

    _change_nothing(ctx, refused)


@check("R5", needs=("generation",))
def refused_tickets_change_nothing(ctx: Context) -> None:
    """What is no ticket, and one for other keys or options, is not begun with."""

    def refused(policy: Any, engine: Any) -> dict[str, Callable[[], object]]:
        [keys] = policy.prepare_weights_for_ipc()
        sound = ticket_for(policy, engine)
        wrong: dict[str, Any] = {
            "empty": {},
            "no tensors": {key: value for key, value in sound.items() if key != "tensors"},
            "another protocol": sound | {"protocol": 0},
            "changed": sound | {"digest": "0" * len(sound["digest"])},
            "text": "ticket",
        }
        calls: dict[str, Callable[[], object]] = {
            name: lambda ticket=ticket: engine.update_weights(ticket)  # type: ignore[misc]
            for name, ticket in wrong.items()
        }
        calls["an unknown key"] = lambda: policy.get_weights_ipc_handles([*keys, "no.such.tensor"])
        calls["a part of the keys"] = lambda: policy.get_weights_ipc_handles(keys[1:])
        return calls

    _change_nothing(ctx, refused)


def _change_nothing(
    ctx: Context, refused: Callable[[Any, Any], dict[str, Callable[[], object]]]
) -> None:
    """After each refused call weights and version are as before; a delta afterwards is exact."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    before, data = engine_weights(engine), ctx.prompts(5, 9)
    expected = engine.generate(data, greedy=True)
    for what, call in refused(policy, engine).items():
        try:
            call()
        except RLError:
            pass
        else:
            fail(f"{what}: it was not refused")
        require(engine.weights_version == 1, f"{what}: the version is {engine.weights_version}")
        same_weights(engine_weights(engine), before, what)
        output = engine.generate(data, greedy=True)
        require(output["weights_version"].tolist() == [1, 1], f"{what}: rows of another version")
        ctx.measure_error(output["logprobs"], expected["logprobs"])
    report = run_refit(policy, engine, delta=True)
    require(report.version == 2, f"refused refits were counted: version {report.version}")
    require(report.tensors == 0, f"{report.tensors} tensors were sent, none had changed")
    shuffle(policy, 5, ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
    run_refit(policy, engine, delta=True)
    exact(ctx, policy, engine, "a delta after refused calls", 3)
