"""P14: one copy of a model on several ranks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated
from rl_conformance.checks.common import refuses_until_a_load
from rl_conformance.expect import raises, require, same, same_tensor, within
from rl_conformance.losses import (
    LogitLikelihood,
    NanInARow,
    NanInTheGradientOfARow,
    PairLoss,
    RaisesInARow,
    ReportingLoss,
    SequenceLikelihood,
)
from rl_conformance.registry import check, refusal
from rl_conformance.several_ranks import (
    OF_AN_UPDATE,
    beside,
    exported,
    layouts_of,
    moved_alike,
    named_layouts,
    offered,
    policy_on,
    same_step,
    scores_fit,
    settings_of,
)
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.training_oracle import TrainingOracle, update_error
from rl_conformance.weights import policy_weights
from rl_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_conformance.context import Context
    from rl_conformance.several_ranks import Layout
    from rl_conformance.training_oracle import Step
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import LossFunction


#: As many rows as no two copies share evenly; one of a single token.
_LENGTHS = (12, 3, 30, 1, 17, 8, 21)


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def a_copy_is_on_several_ranks(ctx: Context) -> None:
    """Every layout has ranks that share a copy: with the same rows, or each with its own."""
    for layout in layouts_of(ctx):
        with beside(ctx, layout) as pair:
            parts, ranks = pair.many.data_parallel_size, layout.ranks
            what = f"data_parallel_size of {ranks} ranks"
            if layout.own_rows:
                same(parts, ranks, f"{what} with own_rows")
            else:
                require(parts < ranks, what, f"< {ranks}", parts)


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def scores_are_those_of_one_rank(ctx: Context) -> None:
    """Log-probs, and those of the reference, are the oracle's, however rows are split."""
    data = ctx.prompts(*_LENGTHS)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, untrained=True) as pair:
            heat = pair.config["temperature"]
            oracle = ctx.oracle(pair.path)
            expected = oracle.batch_logprobs(data["input_ids"], data["input_lengths"], heat)
            one, many = pair.scores(data)
            ctx.measure_error(many, one, scale=2 / heat)
            for size in (None, 1, 3):
                scores = pair.many.get_logprobs(data, size)["logprobs"]
                ctx.measure_error(scores, expected, scale=1 / heat)
            reference = pair.many.get_reference_policy_logprobs(data, 2)["reference_logprobs"]
            ctx.measure_error(reference, expected, scale=1 / heat)


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def topk_is_that_of_one_rank(ctx: Context) -> None:
    """The k largest logits of all tokens, also where k is more than any rank has of them."""
    if not offered(ctx, "topk_logits"):
        ctx.not_run("the policy offers no topk_logits", excused=True)
    data = ctx.prompts(*_LENGTHS)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, untrained=True) as pair:
            oracle, heat = ctx.oracle(pair.path), pair.config["temperature"]
            pair.many.prepare_for_lp_inference()
            for k in (5, 200):
                got = pair.many.get_topk_logits(data, k)
                for row, length in enumerate(_LENGTHS):
                    ids = data["input_ids"][row, :length].tolist()
                    logits = oracle.logits(ids)[:-1] / heat
                    values = got["topk_logits"][row, : length - 1]
                    tokens = got["topk_indices"][row, : length - 1]
                    distinct = all(len(set(each)) == k for each in tokens.tolist())
                    require(distinct, f"topk_indices of row {row}", f"{k} different tokens", tokens)
                    if length > 1:
                        largest = logits.topk(k).values
                        ctx.measure_error(values, largest, scale=1 / heat, rounding=1.5)
                        looked_up = logits.gather(1, tokens)
                        ctx.measure_error(values, looked_up, scale=1 / heat, rounding=1.5)


#: Of the rows of a step; how many come together differs from one microbatch to the next.
_OTHER_LENGTHS = (12, 3, 30, 2, 17, 8, 21, 5)


def step_batch(seed: int, lengths: Sequence[int] = _OTHER_LENGTHS) -> BatchedDataDict[Any]:
    """Rows of which one is masked, and tokens in the middle of another."""
    data = training_batch(lengths, seed=seed)
    data["sample_mask"][seed % len(lengths)] = 0
    data["token_mask"][2, 4:9] = 0
    data["row"], data["echo"] = torch.arange(len(lengths)), data["input_ids"].clone()
    data["marked"] = torch.zeros(len(lengths))
    return data


_STEPS: tuple[tuple[LossFunction, int, int | None], ...] = (
    (ReportingLoss(), 7, 2),  # rows that copies do not share evenly
    (ReportingLoss(), 8, None),
    (SequenceLikelihood(), 7, 3),
    (LogitLikelihood(), 8, 1),
    (PairLoss(), 8, 2),
)


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def steps_are_those_of_one_rank(ctx: Context) -> None:
    """Losses of every kind, norms, metrics, log-probs, and how far each tensor moved.

    With clipping, decay and a schedule, and rows that lie end to end.
    """
    take_steps(ctx, "untied")


def take_steps(ctx: Context, kind: str) -> None:
    """See the checks; the kind is one of :class:`~rl_conformance.several_ranks.Beside`."""
    probe = training_batch((11, 6, 19), seed=9)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, kind, "float32", untrained=True) as pair:
            oracle = TrainingOracle(pair.path, pair.config) if kind == "untied" else None
            for seed, (loss_fn, rows, mbs) in enumerate(_STEPS):
                data = step_batch(seed, _OTHER_LENGTHS[:rows])
                one, many = pair.train(data, loss_fn, mbs=mbs)
                same_step(ctx, one, many)
                if oracle is not None and isinstance(loss_fn, ReportingLoss):
                    _as_written_out(ctx, many, oracle.step(data))
            same_step(ctx, *pair.train(step_batch(5), ReportingLoss(), gbs=4, mbs=3))
            moved_alike(ctx, pair)
            one_scores, scores = pair.scores(probe)
            ctx.measure_error(scores, one_scores, "float32")


def _as_written_out(ctx: Context, result: dict[str, Any], step: Step) -> None:
    mean, largest = ctx.tolerance_of("float32")
    ctx.measure_near("loss_error_from_oracle", result["loss"], step.loss, largest)
    norm, name = step.grad_norm, "grad_norm_relative_error_from_oracle"
    ctx.measure_near(name, result["grad_norm"], norm, max(mean, 1e-3), norm)
    require(abs(float(result["lr"]) / step.lr - 1) < 1e-5, "lr", step.lr, result["lr"])


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def the_reference_stays(ctx: Context) -> None:
    """A step leaves its log-probs bit for bit, and they leave the policy's."""
    data = training_batch(_OTHER_LENGTHS[:7], seed=8)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, dtype="float32") as pair:
            before = pair.many.get_reference_policy_logprobs(data)["reference_logprobs"]
            pair.train(step_batch(1), NegativeLogLikelihood())
            _, scores = pair.scores(data)
            moved = not torch.equal(scores, before)
            require(moved, "the policy's logprobs after a step", "others than before", "the same")
            after = pair.many.get_reference_policy_logprobs(data)["reference_logprobs"]
            same_tensor(after, before, "reference_logprobs")
            same_tensor(pair.scores(data)[1], scores, "logprobs")


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def what_is_refused_reaches_no_rank(ctx: Context) -> None:
    """A loss that raises or is not finite in one row leaves the weights and the next step."""
    data = step_batch(4)
    marked = step_batch(4)
    marked["marked"][-1] = 1
    for layout in layouts_of(ctx):
        with beside(ctx, layout, dtype="float32") as pair:
            _, scores = pair.scores(data)
            faults: dict[LossFunction, type[Exception]] = {
                NanInARow(): TrainingError,
                NanInTheGradientOfARow(): TrainingError,
                RaisesInARow(): Exception,
            }
            for loss_fn, expected in faults.items():
                pair.many.prepare_for_training()
                with raises(expected):
                    pair.many.train(marked, loss_fn, mbs=2)
                same_tensor(pair.scores(data)[1], scores, "logprobs")
            same_step(ctx, *pair.train(data, ReportingLoss(), mbs=2))


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def what_is_masked_reaches_no_rank(ctx: Context) -> None:
    """Rows of which none counts are no step; what stands in a masked row does not matter."""
    data, other, nothing = step_batch(6), step_batch(6), step_batch(7)
    other["input_ids"][6, :21] = training_batch(_OTHER_LENGTHS, seed=9)["input_ids"][6, :21]
    other["echo"] = other["input_ids"].clone()
    nothing["sample_mask"][:] = 0
    for layout in layouts_of(ctx):
        with beside(ctx, layout, dtype="float32") as pair:
            _, scores = pair.scores(data)
            pair.many.prepare_for_training()
            loss = float(pair.many.train(nothing, NegativeLogLikelihood(), mbs=2)["loss"])
            same(loss, 0.0, "loss of a batch in which no row counts")
            same_tensor(pair.scores(data)[1], scores, "logprobs")
            pair.steps += 1
            pair.one.prepare_for_training()
            pair.many.prepare_for_training()
            many = pair.many.train(other, ReportingLoss(), mbs=2)
            same_step(ctx, pair.one.train(data, ReportingLoss(), mbs=2), many)


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
        with ExitStack() as ending:
            if layout is not None:
                ending.callback(policy.shutdown)
            ending.enter_context(within(layout.name if layout else "one rank again"))
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
            weights, written = policy_weights(alone), exported(ctx, policy, saved)
            error, name = update_error(written, {n: weights[n] for n in written}, before)
            ctx.measure(f"update_relative_error of {name}", error, OF_AN_UPDATE)


@refusal("policy", "sharded")
def every_rank_has_a_whole_copy(ctx: Context) -> None:
    """Without sharded there is nothing to refuse: two ranks are two copies with rows of their own.

    Settings for the suite that name layouts all the same contradict the manifest.
    """
    named = named_layouts(ctx)
    require(not named, "a manifest without sharded", "no layouts are named", named)
    if not ctx.target.installed:
        ctx.not_run("the backend is not installed, or not under this name", excused=True)

    def copies_of_two_ranks() -> int:
        policy: Any = policy_on(ctx, 2, {"model_name": str(ctx.model())}, ctx.settings.dtype)
        try:
            return int(policy.data_parallel_size)
        finally:
            policy.shutdown()

    copies = ctx.workshop.once("copies of the model on two ranks", copies_of_two_ranks)
    same(copies, 2, "data_parallel_size of two ranks, though sharded is not declared")


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def dropout_is_that_of_one_rank(ctx: Context) -> None:
    """Steps that are not clipped, of a model that drops, with dynamic batching: as on one rank."""
    take_steps(ctx, "dropping")


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def evaluating_changes_nothing(ctx: Context) -> None:
    """Evaluated more often than on one rank, it has the same losses and drops the same."""
    data, other = step_batch(2), step_batch(3)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, "dropping", "float32") as pair:
            _, scores = pair.scores(data)
            for rows in (data, other):
                many = pair.many.train(rows, ReportingLoss(), eval_mode=True, mbs=2)
            same_step(ctx, pair.one.train(rows, ReportingLoss(), eval_mode=True), many)
            same_tensor(pair.scores(data)[1], scores, "logprobs")
            same_step(ctx, *pair.train(data, ReportingLoss(), mbs=3))


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def every_rank_draws_the_same(ctx: Context) -> None:
    """Rows with seeds are those of one rank; without seeds two calls differ, and all fits."""
    if not offered(ctx, "policy_generate"):
        ctx.not_run("the policy offers no policy_generate", excused=True)
    prompts, seeded = ctx.prompts(5, 2, 9, 1), ctx.prompts(5, 2, 9, 1)
    seeded["seed"] = torch.tensor([3, 4, 5, 6])
    for layout in layouts_of(ctx):
        with beside(ctx, layout, "dropping", "float32") as pair:
            one, many = (p.generate(seeded) for p in (pair.one, pair.many))
            rows, expected = generated(seeded, many), generated(seeded, one)
            same(rows, expected, "tokens of rows with seeds, as on one rank")
            outputs = [many, *(pair.many.generate(prompts) for _ in "12")]
            drawn = [generated(prompts, output) for output in outputs[1:]]
            differ = drawn[0] != drawn[1]
            require(differ, "tokens of two calls without a seed", "different", drawn[0])
            for output in outputs:
                scores_fit(ctx, pair.many, prompts, output, "float32")


_MORE_LENGTHS = (12, 3, 30, 17)


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def what_fails_midway_on_one_rank_is_refused_by_all(ctx: Context) -> None:
    """Some ranks have taken the step, one has half of it: all refuse at once until all load."""
    layout = layouts_of(ctx)[0]
    _, config = settings_of(ctx, "untied")
    policy = policy_on(ctx, layout.ranks, {**config, **layout.config}, "float32")
    refuses_until_a_load(ctx, ctx.closing(policy))
