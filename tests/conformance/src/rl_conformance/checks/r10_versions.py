"""R10: versions and caches."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.checks.common import change_nothing
from rl_conformance.expect import raised, raises, require, same
from rl_conformance.faults import failing_write, in_the_engine
from rl_conformance.refits import attempt, equal, fresh_engine, run_refit, take_step, unequal_pair
from rl_conformance.registry import check
from rl_conformance.served import greedy, made_by, same_output
from rl_conformance.ways import engine_for, exact, settable_trainer, shuffle
from rl_conformance.weights import engine_weights, same_weights
from rl_core.errors import LoopWarning, RLError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context


@check("R10")
def the_version_moves_on_commit(ctx: Context) -> None:
    """It is the new one after the refit, and every row has it, with the number of the trainer."""
    policy, generation = unequal_pair(ctx)
    same(generation.weights_version, ctx.first_version, "weights_version before the refit")
    report = run_refit(policy, generation)
    same((report.version, generation.weights_version), (1, 1), "versions of report and engine")
    made_by(greedy(ctx, generation, seed=0), 1, report.origin)


@check("R10")
def versions_of_two_trainers_are_distinguished(ctx: Context) -> None:
    """Two trainers commit one version: rows name the trainer, and the loop gets a warning."""
    one, two = (ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=n))) for n in (1, 2))
    generation = fresh_engine(ctx)  # an engine gives the warning once
    if ctx.settings.url is not None:
        ctx.not_run(
            "an earlier check refitted the server, and this one needs an engine before any refit",
            excused=True,
        )
    origins: list[int] = []
    for policy in (one, two, one):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            report = run_refit(policy, generation, version=5)
        made_by(greedy(ctx, generation, seed=0), 5, report.origin)
        same(generation.weights_origin, report.origin, "weights_origin, as in the report")
        before = [(engine["version"], engine["origin"]) for engine in report.taken_over]
        expected = [(5, origin) for origin in origins[-1:]]
        same(before, expected, "version and origin of the engines that the report takes over")
        count = sum(issubclass(warning.category, LoopWarning) for warning in seen)
        same(count, int(policy is two), "LoopWarnings of another trainer")
        origins.append(report.origin)
    differ = origins[0] == origins[2] != origins[1]
    require(differ, "origins of trainers 1, 2 and 1", "one number for each trainer", origins)


@check("R10")
def a_given_version_is_used(ctx: Context) -> None:
    """version=7 commits as 7, and the next one as 8."""
    policy, generation = unequal_pair(ctx)
    run_refit(policy, generation, version=7)
    same(generation.weights_version, 7, "weights_version")
    run_refit(policy, generation)
    same(generation.weights_version, 8, "weights_version after the next refit")


@check("R10")
def a_failed_refit_does_not_move_the_version(ctx: Context) -> None:
    """A loader that raises leaves the old version number."""
    policy, generation = unequal_pair(ctx)
    with in_the_engine(generation, failing_write, after=3):
        raised(attempt(policy, generation), Exception)
    same(generation.weights_version, ctx.first_version, "weights_version after the failed refit")


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
    changed = not torch.equal(old["output_ids"], new["output_ids"])
    require(changed, "output_ids after the refit", "others than before", "the same")
    first = torch.arange(3), long["input_lengths"]
    scores = [e.generate(long, greedy=True)["logprobs"][first] for e in (generation, fresh)]
    ctx.measure_error(*scores, scale=2, rounding=2)


@check("R10", needs=("generation",))
def a_version_may_go_back_with_its_weights(ctx: Context) -> None:
    """Old weights under their old number, then the new ones again: outputs follow the weights."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    kept = {name: value.clone() for name, value in policy.model.state_dict().items()}
    for seed, version in enumerate((3, 4, 3, 4, 9)):
        if version == 3:
            policy.model.load_state_dict(kept)
        else:
            shuffle(policy, seed)
        run_refit(policy, engine, version=version)
        exact(ctx, policy, engine, f"refit {seed + 1}", version)
        rows = engine.generate(ctx.prompts(5, 150, 3), greedy=True)["weights_version"].tolist()
        same(rows, [version] * 3, "weights_version of the rows")


@check("R10")
def training_shows_only_after_the_next_refit(ctx: Context) -> None:
    """Training does not change the engine before a refit, not even if it sleeps in between."""
    policy, generation = unequal_pair(ctx)
    run_refit(policy, generation, mode="auto")
    before, weights = greedy(ctx, generation, seed=0), engine_weights(generation)
    take_step(policy)
    generation.prepare_refit_info(policy.prepare_refit_info() or {})
    generation.finish_generation()
    generation.prepare_for_generation()
    same_weights(engine_weights(generation), weights, "before the next refit")
    same_output(ctx, greedy(ctx, generation, seed=0), before)
    run_refit(policy, generation)
    equal(policy, generation)


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

    change_nothing(ctx, refused)


@check("R10", needs=("policy",))
def refused_options_do_not_use_up_a_version(ctx: Context) -> None:
    """A refit with an unknown option does not count, and the next one is exact."""
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
