"""G1, G6 to G9, G12 to G15: what a call, a row or another engine leaves: nothing."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, pad_rows
from rl_conformance.continuations import find_row, is_text
from rl_conformance.draws import same_draws
from rl_conformance.expect import NotRun, raises, require, same_tensor
from rl_conformance.registry import check
from rl_conformance.served import made_by
from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError, LifecycleError, RLError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context
    from rl_conformance.continuations import Continuation
    from rl_core.interfaces import GenerationInterface

#: Of the engine that the calls of this module go to. Nothing ends a row by chance.
_CONFIG: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.5, "eos_token_id": []}


def text_row(ctx: Context) -> tuple[Continuation, str]:
    """A row and the text of its second token, which it has there for the first time."""

    def accept(_: list[int], words: list[str]) -> bool:
        return is_text(words[1:2]) and words[1] not in words[0]

    row = find_row(ctx.oracle(), 5, steps=4, lead=ctx.lead, accept=accept)
    return row, ctx.oracle().tokenizer.decode(row.tokens[1:2])


class Witness:
    """Calls of every kind, and what they gave at first."""

    def __init__(self, ctx: Context, generation: GenerationInterface) -> None:
        self._ctx, self._generation = ctx, generation
        self._row, self._word = text_row(ctx)
        self._rows = ctx.certain(3, 9, 5)
        self._unseeded: list[tuple[int, ...]] = []
        self._drawn = self._draw()
        self._calls = [self._greedy_rows, self._seeded_rows, self._unseeded_rows]

    def testify(self, after: str) -> None:
        """Fails unless each call gives what it gave at first, and an unseeded one never that.

        Each time another of them is the first.
        """
        for call in self._calls:
            call(after)
        self._calls.append(self._calls.pop(0))

    def _greedy_rows(self, after: str) -> None:
        ctx, row = self._ctx, self._row
        rows = [*self._rows, row, row]
        stops = [None, None, None, [self._word], None]
        data = ctx.batch([each.prompt for each in rows], stop_strings=stops)
        got = generated(data, self._generation.generate(data, greedy=True))
        expected = [each.tokens for each in rows]
        expected[3] = row.tokens[:2]
        require(got == expected, f"after {after}: got {got}, expected {expected}")

    def _seeded_rows(self, after: str) -> None:
        del after
        same_draws(self._ctx, self._draw(), self._drawn)

    def _unseeded_rows(self, after: str) -> None:
        data = self._ctx.batch([self._row.prompt] * 4)
        drawn = generated(data, self._generation.generate(data))
        self._unseeded += [tuple(tokens) for tokens in drawn]
        again = len(self._unseeded) - len(set(self._unseeded))  # one may be chance
        require(again <= 1, f"after {after}: {again} unseeded rows are drawn a second time")

    def _draw(self) -> list[list[int]]:
        data = self._ctx.prompts(6, 4, 9, 5, seed=3).repeat_interleave(4)
        data["seed"] = torch.arange(16) * 1000
        rows = generated(data, self._generation.generate(data))
        alike = {n for n in range(16) if rows[n] in rows[n - n % 4 : n]}
        require(not alike, f"seeded rows {alike} draw what another of their prompt drew")
        return rows


# -- calls in between ------------------------------------------------------------------------------


def _greedy(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(5, 8), greedy=True)


def _seeded(ctx: Context, generation: GenerationInterface) -> None:
    data = ctx.prompts(5, 8)
    data["seed"] = torch.tensor([1000, 0])
    generation.generate(data)


def _unseeded(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(5, 8))


def _stop_strings(ctx: Context, generation: GenerationInterface) -> None:
    _, word = text_row(ctx)
    generation.generate(ctx.prompts(5, 8, stop_strings=[[word], [word, "e"]]), greedy=True)


def _longer(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(70, 90, 61), greedy=True)


def _without_room(ctx: Context, generation: GenerationInterface) -> None:
    limit = ctx.oracle().context
    if limit > 512:
        raise NotRun("the model's context is a long one", excused=True)
    generation.generate(ctx.prompts(limit, limit - 1, limit - 2), greedy=True)


def _more_rows(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(*[4, 6, 3, 5] * 8), greedy=True)


def _one_row(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(1), greedy=True)


def _no_rows(ctx: Context, generation: GenerationInterface) -> None:
    del ctx
    generation.generate(pad_rows([]), greedy=True)


_CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "G6": {"rows_without_room": {"call": _without_room}},
    "G7": {"stop_strings": {"call": _stop_strings}},
    "G8": {"a_greedy_call": {"call": _greedy}, "a_longer_call": {"call": _longer}},
    "G9": {"a_seeded_call": {"call": _seeded}, "an_unseeded_call": {"call": _unseeded}},
    "G12": {
        "more_rows": {"call": _more_rows},
        "one_row": {"call": _one_row},
        "no_rows": {"call": _no_rows},
    },
}


def nothing_is_left_of(ctx: Context, call: Callable[[Context, GenerationInterface], None]) -> None:
    """After a call of another kind, greedy, seeded and stopped rows are what they were."""
    generation = ctx.generation(**_CONFIG)
    witness = Witness(ctx, generation)
    for _ in range(3):
        call(ctx, generation)
        witness.testify(call.__name__.strip("_"))


for _clause, _cases in _CALLS.items():
    check(_clause, cases=_cases, timeout_s=240.0)(nothing_is_left_of)


def _refused(ctx: Context) -> dict[str, BatchedDataDict[Any]]:
    """Batches whose last row alone is wrong."""
    left, empty, foreign, long = (ctx.prompts(6, 4, 6) for _ in range(4))
    left["input_ids"][2] = left["input_ids"][2].roll(3)
    left["input_lengths"][2] = 3
    empty["input_lengths"][2] = 0
    foreign["input_ids"][2, 0] = ctx.oracle().vocab_size
    long["input_lengths"][2] = 7
    return {"left_padded": left, "empty": empty, "foreign": foreign, "beyond_its_width": long}


@check("G1", timeout_s=240.0)
def a_refused_batch_changes_nothing(ctx: Context) -> None:
    """After a batch with one wrong row, again and again, every call gives what it gave before."""
    generation = ctx.generation(**_CONFIG)
    witness = Witness(ctx, generation)
    for what, data in _refused(ctx).items():
        for greedy in (True, False):
            with raises(ValueError, "row 2"):
                generation.generate(data, greedy=greedy)
        witness.testify(f"a refused batch ({what})")
    column = ctx.prompts(6, 4)
    column["stop_strings"] = [["e"], [""]]  # an empty string is in every text
    with raises((RLError, ValueError, TypeError)):
        generation.generate(column, greedy=True)
    with raises(ConfigError):
        other = ctx.fresh_generation(max_model_len=ctx.oracle().context + 1)
        other.prepare_for_generation()
        other.generate(ctx.prompts(5), greedy=True)  # a policy may look at its keys only here
    witness.testify("a refused column and a refused configuration")


@check("G12")
def every_column_is_left_alone(ctx: Context) -> None:
    """generate writes into no column of its input, adds none and shares none of its output."""
    generation = ctx.generation(**_CONFIG)
    data = ctx.prompts(3, 9, 5, stop_strings=[["e"], None, []], label=["a", "b", "c"])
    data["attention_mask"] = (torch.arange(9) < data["input_lengths"][:, None]).long()
    data["seed"], data["score"] = torch.arange(3), torch.rand(3, 2)
    before = copy.deepcopy(dict(data))
    for greedy in (True, False):
        output = generation.generate(data, greedy=greedy)
        for key in ("output_ids", "logprobs", "generation_lengths", "unpadded_sequence_lengths"):
            output[key].fill_(3)
        require(set(data) == set(before), f"the columns are {sorted(data)} now")
        for key, value in before.items():
            if isinstance(value, torch.Tensor):
                same_tensor(data[key], value, key)
            else:
                require(data[key] == value, f"{key} became {data[key]}")


@check("G12")
def an_output_stays_what_it_was(ctx: Context) -> None:
    """Later calls write into no earlier output."""
    generation = ctx.generation(**_CONFIG)
    first = generation.generate(ctx.prompts(3, 9, 5), greedy=True)
    kept = copy.deepcopy(dict(first))
    for seed in (1, 2, 3):
        generation.generate(ctx.prompts(9, 5, 3, seed=seed), greedy=bool(seed % 2))
    for key, value in kept.items():
        if isinstance(value, torch.Tensor):
            same_tensor(first[key], value, key)


@check("G12")
def an_output_is_a_batch_of_prompts(ctx: Context) -> None:
    """Columns of an earlier turn that come along make room for those of this one."""
    row = ctx.certain(5)[0]
    generation = ctx.generation(**_CONFIG)
    first = generation.generate(ctx.batch([row.prompt[:3]] * 2), greedy=True)
    again = BatchedDataDict[Any]({**first, **ctx.batch([row.prompt] * 2)})
    output = generation.generate(again, greedy=True)
    require(generated(again, output) == [row.tokens] * 2, f"got {generated(again, output)}")
    alone = generation.generate(ctx.batch([row.prompt] * 2), greedy=True)
    for key in ("logprobs", "truncated", "generation_lengths", "weights_version", "weights_origin"):
        require(output[key].shape == alone[key].shape, f"{key} is that of the turn before")
    ctx.measure_error(output["logprobs"], alone["logprobs"])


@check("G7")
def configured_lists_are_left_alone(ctx: Context) -> None:
    """Stop strings of rows do not find their way into the configured ones."""
    row, word = text_row(ctx)
    strings, ids = ["no text has this in it"], [ctx.oracle().eos_token_id]
    generation = ctx.fresh_generation(max_new_tokens=4, stop_strings=strings, stop_token_ids=ids)
    generation.prepare_for_generation()
    for stops, length in (([word], 2), (None, 4), ([], 4), ([word], 2), (None, 4)):
        data = ctx.batch([row.prompt], stop_strings=[stops])
        got = generated(data, generation.generate(data, greedy=True))[0]
        require(got == row.tokens[:length], f"with {stops}: got {got}, expected {length} tokens")
    same = strings == ["no text has this in it"] and ids == [ctx.oracle().eos_token_id]
    require(same, f"the configuration's lists are now {strings} and {ids}")


# -- other engines of the process ------------------------------------------------------------------


def _two_engines(ctx: Context) -> tuple[Callable[..., None], list[GenerationInterface]]:
    """Two engines that have nothing in common, and what they must give, whenever asked."""
    row, word = text_row(ctx)
    other_path = ctx.model("qwen2", seed=1)
    other = ctx.certain(5, 7, path=other_path)
    one = ctx.fresh_generation(max_new_tokens=3, stop_strings=[word], seed=7, temperature=1.5)
    two = ctx.fresh_generation(max_new_tokens=4, seed=8, model_name=str(other_path))
    plans = [(one, [row.prompt], [row.tokens[:2]])]
    plans.append((two, [each.prompt for each in other], [each.tokens for each in other]))

    def ask(when: str, engines: tuple[int, ...] = (0, 1)) -> None:
        for index in engines:
            engine, prompts, expected = plans[index]
            data = ctx.batch(prompts)
            got = generated(data, engine.generate(data, greedy=True))
            require(got == expected, f"{when}: engine {index} gave {got}, expected {expected}")

    return ask, [one, two]


@check("G8")
def two_engines_do_not_mix(ctx: Context) -> None:
    """Engines with other models, limits and stop strings keep to their own, call by call."""
    ask, engines = _two_engines(ctx)
    for engine in engines:
        engine.prepare_for_generation()
    for when in ("at first", "then", "again"):
        ask(when)


@check("G9")
def seeds_of_two_engines_do_not_mix(ctx: Context) -> None:
    """An engine draws from its own seed, also when one with another seed was made after it."""
    data = ctx.prompts(*[5, 7] * 8)
    drawn = []
    for beside in (False, True):
        engine = ctx.fresh_generation(seed=7, temperature=1.5, max_new_tokens=4)
        engine.prepare_for_generation()
        if beside:
            other = ctx.fresh_generation(seed=8, temperature=0.9, max_new_tokens=4)
            other.prepare_for_generation()
            other.generate(data)
        drawn.append([generated(data, engine.generate(data)) for _ in range(2)])
    for alone, mixed in zip(*drawn, strict=True):
        same_draws(ctx, mixed, alone)


@check("G13")
def one_sleeps_while_another_serves(ctx: Context) -> None:
    """Sleep is an engine's own affair."""
    ask, (one, two) = _two_engines(ctx)
    one.prepare_for_generation()
    with raises(LifecycleError):
        two.generate(ctx.prompts(5), greedy=True)
    two.prepare_for_generation()
    one.finish_generation()
    ask("while the other sleeps", (1,))
    with raises(LifecycleError):
        one.generate(ctx.prompts(5), greedy=True)
    one.prepare_for_generation()
    ask("after both woke")


@check("G14")
def one_is_shut_down_while_another_serves(ctx: Context) -> None:
    """Shutdown is an engine's own affair."""
    ask, (one, two) = _two_engines(ctx)
    for engine in (one, two):
        engine.prepare_for_generation()
    ask("at first")
    one.shutdown()
    ask("after the other was shut down", (1,))


# -- the wrong state -------------------------------------------------------------------------------


@check("G14")
def a_refused_call_wakes_nobody(ctx: Context) -> None:
    """Asleep, awake in part or not yet awake: each call is refused, and then all is as before."""
    generation = ctx.fresh_generation(**_CONFIG)
    data = ctx.prompts(5, 3)
    _refused_twice(generation, data)
    generation.prepare_for_generation()
    witness = Witness(ctx, generation)
    for _ in range(2):
        generation.finish_generation()
        _refused_twice(generation, data)
        generation.prepare_for_generation()
        witness.testify("calls that were refused in its sleep")
    generation.shutdown()
    for _ in range(2):
        with raises(RLError):
            generation.generate(data, greedy=True)
    with raises(RLError):
        generation.prepare_for_generation()


def _refused_twice(generation: GenerationInterface, data: BatchedDataDict[Any]) -> None:
    for greedy in (True, False):
        with raises(LifecycleError):
            generation.generate(data, greedy=greedy)
    generation.prepare_for_generation(tags=["weights"])
    with raises(LifecycleError):
        generation.generate(data, greedy=True)
    generation.finish_generation()


@check("G15")
def all_rows_carry_the_version(ctx: Context) -> None:
    """Many rows, rows without room, samples: each has the version, and an empty batch none."""
    generation = ctx.generation(max_model_len=16, max_new_tokens=4)
    for data in (ctx.prompts(16, 5, 15, 3, 16, 9), ctx.prompts(16), pad_rows([])):
        output = generation.generate(data, greedy=True)
        made_by(output, generation.weights_version, generation.weights_origin)


@check("G15", needs=("generation", "pair"))
def a_refit_of_one_engine_is_not_the_other_s(ctx: Context) -> None:
    """Versions and weights move in the engine that was refitted, and in no other."""
    from rl_conformance.refits import fresh_engine, run_refit, unequal_pair
    from rl_conformance.served import greedy, same_output

    policy, one = unequal_pair(ctx)
    two = fresh_engine(ctx)
    before = greedy(ctx, two, seed=0)
    for version in (1, 2):
        origin = run_refit(policy, one).origin
        after = greedy(ctx, two, seed=0)
        same_output(ctx, after, before)
        made_by(after, 0, 0, "the other")
        moved = one.generate(ctx.prompts(3, 9, 5, 2), greedy=True)
        made_by(moved, version, origin, "its own")
