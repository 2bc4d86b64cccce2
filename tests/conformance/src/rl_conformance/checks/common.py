"""What several chapters of checks use."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rl_conformance.batches import generated, generated_mask, pad_rows, random_prompts
from rl_conformance.continuations import Continuation, find_row, is_text
from rl_conformance.doubles import Engine, Trainer
from rl_conformance.draws import declared_logprobs, same_draws
from rl_conformance.expect import NotRun, fail, raises, require, same, same_tensor, within
from rl_conformance.losses import FailsInTheStep
from rl_conformance.models import make_reciting_model, make_tokenizer
from rl_conformance.refits import run_refit, take_step, whole_tensors
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.ways import engine_for, every_pair, exact, settable_trainer, shuffle, ways_of
from rl_conformance.weights import engine_weights, same_weights
from rl_core.batch import BatchedDataDict
from rl_core.config import config_keys
from rl_core.errors import CapabilityError, ConfigError, LifecycleError, RLError
from rl_core.plugins.discovery import load_object
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.transports.control import ControlClient, ControlServer

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface

__all__ = [
    "OUTPUT_KEYS",
    "SPLITS",
    "WAKINGS",
    "Recital",
    "Witness",
    "adapted_policy",
    "change_nothing",
    "change_tensors",
    "frames_of",
    "fresh_doubles",
    "greedy_rows",
    "is_truncated",
    "leaves_alone",
    "messages_of",
    "must_equal",
    "needs_adapters",
    "plain_rows",
    "plans_in",
    "random_batch",
    "read_stream",
    "refit_in_sequence",
    "refuses_until_a_load",
    "renew_tensors",
    "scores_after",
    "seeded_batch",
    "strange_token",
    "tensor_trainer",
    "text_row",
    "train_adapters",
    "trained_policy",
    "two_engines",
    "with_limit",
    "with_penalty",
]


_LENGTHS = (7, 3, 30, 12, 5, 5, 18, 22, 9, 1, 14, 6)


def seeded_batch() -> BatchedDataDict[Any]:
    """Twelve ragged rows that carry their number as a tensor and as a string."""
    numbers = torch.arange(len(_LENGTHS))
    return random_prompts(_LENGTHS, number=numbers, name=[f"row {n}" for n in numbers.tolist()])


Row = dict[str, Any]


_DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.float64)


def random_batch(rng: random.Random, rows: int, width: int | None = None) -> BatchedDataDict[Any]:
    """Ragged rows of several kinds of columns."""
    width = rng.randint(1, 30) if width is None else width
    lengths = torch.tensor([rng.randint(1, width) for _ in range(rows)], dtype=torch.int64)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    ids = torch.randint(1, 99, (rows, width), generator=generator)
    ids[torch.arange(width) >= lengths[:, None]] = 0
    dtype = rng.choice(_DTYPES)
    wide = torch.randn(rows, width, 3, generator=generator).to(dtype)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "number": torch.arange(rows),
            "wide": wide,
            "turned": torch.randn(5, rows, generator=generator).t(),  # of strides that few expect
            "text": [f"row {n}" for n in range(rows)],
            "things": [{"n": n, "list": [n]} if n % 2 else (n, None) for n in range(rows)],
        }
    )


def plain_rows(data: BatchedDataDict[Any]) -> list[Row]:
    """The rows as plain values; floats of any dtype as they print."""
    return [
        {
            key: (str(v[n].dtype), v[n].tolist()) if isinstance(v, torch.Tensor) else v[n]
            for key, v in data.items()
        }
        for n in range(data.size)
    ]


def must_equal(got: Sequence[Row], expected: Sequence[Row], what: str) -> None:
    same(len(got), len(expected), f"{what}: number of rows")
    for n, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        same(sorted(ours), sorted(theirs), f"{what}: columns of row {n}")
        for key, value in theirs.items():
            same(ours[key], value, f"{what}: {key} of row {n}")


def leaves_alone(data: BatchedDataDict[Any], act: Callable[[], Any], what: str) -> Any:
    """What an operation gives that must leave its batch, and the plans in it, alone."""
    before, plans = copy.deepcopy(plain_rows(data)), copy.deepcopy(plans_in(data))
    found = act()
    must_equal(plain_rows(data), before, f"the batch itself, after {what}")
    same(plans_in(data), plans, f"the plans of the batch, after {what}")
    return found


def plans_in(data: BatchedDataDict[Any]) -> list[Any]:
    return [data.micro_batch_indices, data.micro_batch_lengths, data.elem_counts_per_gb]


OUTPUT_KEYS = {
    "output_ids",
    "generation_lengths",
    "unpadded_sequence_lengths",
    "logprobs",
    "truncated",
    "weights_version",
    "weights_origin",
}


#: Characters of two, three and four bytes, each byte a token.
ACCENT, IDEOGRAPH, FACE = "\u00e9", "\u6f22", "\N{HUGGING FACE}"


#: Tokens of a prompt, and of what is generated.
_PROMPT, _STEPS = 6, 12


class Recital:
    """An engine with a model that repeats a sequence of tokens, and where its rows must end.

    Among them are bytes that are no character: one that begins none, and two that begin a
    character which does not go on.

    Args:
        ctx: Of the check.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._tokenizer = make_tokenizer()
        encode = self._tokenizer.encode
        self.tokens: list[int] = [
            *encode("\u00c0")[1:],
            *encode(f"st{FACE}"),
            *encode("\U00040000")[:1],
            *encode(f"x{ACCENT}op{IDEOGRAPH}"),
            *encode("\u1000")[:1],
            *encode(".y"),
        ]
        path = ctx.workshop.once(
            "recital", lambda: make_reciting_model(ctx.directory(), self.tokens)
        )
        self.engine: GenerationInterface = ctx.generation(
            model_name=str(path), max_new_tokens=_STEPS
        )

    def check(self, starts: Sequence[int], strings: Sequence[str]) -> None:
        """Fails unless rows from these places of the circle end at their stop strings.

        Args:
            starts: One for each row; the tokens before it are its prompt.
            strings: One for each row.
        """
        circle = self.tokens * 3
        places = [start % len(self.tokens) + len(self.tokens) for start in starts]
        data: Any = self._ctx.batch(
            [circle[place - _PROMPT : place] for place in places],
            stop_strings=[[string] for string in strings],
        )
        output = self.engine.generate(data, greedy=True)
        got, truncated = generated(data, output), output["truncated"].tolist()
        for row, (place, string) in enumerate(zip(places, strings, strict=True)):
            circling = circle[place : place + _STEPS]
            counts = range(1, _STEPS + 1)
            end = next((n for n in counts if string in self._tokenizer.decode(circling[:n])), None)
            what = f"row {row}, with stop string {string!r}: tokens, and truncated"
            same((got[row], truncated[row]), (circling[:end], end is None), what)


def greedy_rows(
    ctx: Context, rows: Sequence[Continuation], expected: Sequence[Sequence[int]], **config: Any
) -> BatchedDataDict[Any]:
    """Greedy output of rows, which must be what is expected, as long as it is, and as likely."""
    stop_strings = config.pop("row_stops", None)
    extra = {} if stop_strings is None else {"stop_strings": stop_strings}
    data = ctx.batch([row.prompt for row in rows], **extra)
    output = ctx.generation(**config).generate(data, greedy=True)
    got, wanted = generated(data, output), [list(tokens) for tokens in expected]
    same(got, wanted, "generated tokens")
    lengths = torch.tensor([len(tokens) for tokens in wanted])
    same_tensor(output["generation_lengths"], lengths, "generation_lengths")
    scored = declared_logprobs(ctx, data, output)
    ctx.measure_error(output["logprobs"][generated_mask(data, output)], scored, rounding=1.5)
    return output


def is_truncated(output: BatchedDataDict[Any], expected: list[bool]) -> None:
    got = output["truncated"].tolist()
    same(got, expected, "truncated")


def with_limit(ctx: Context) -> tuple[dict[str, Any], int]:
    """A context that is quickly filled: the model's, unless that is a large one."""
    context = ctx.oracle().context
    return ({}, context) if context <= 512 else ({"max_model_len": 256}, 256)


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
        same(got, expected, f"greedy tokens after {after}")

    def _seeded_rows(self, after: str) -> None:
        with within(f"seeded rows after {after}"):
            same_draws(self._ctx, self._draw(), self._drawn)

    def _unseeded_rows(self, after: str) -> None:
        data = self._ctx.batch([self._row.prompt] * 4)
        drawn = generated(data, self._generation.generate(data))
        self._unseeded += [tuple(tokens) for tokens in drawn]
        again = len(self._unseeded) - len(set(self._unseeded))  # one may be chance
        what = f"rows without a seed, after {after}"
        require(again <= 1, what, "no completion comes twice", f"{again} that came before")

    def _draw(self) -> list[list[int]]:
        data = self._ctx.prompts(6, 4, 9, 5, seed=3).repeat_interleave(4)
        data["seed"] = torch.arange(16) * 1000
        rows = generated(data, self._generation.generate(data))
        alike = {n for n in range(16) if rows[n] in rows[n - n % 4 : n]}
        require(
            not alike, "16 rows with different seeds", "different tokens", f"equal rows {alike}"
        )
        return rows


def two_engines(ctx: Context) -> tuple[Callable[..., None], list[GenerationInterface]]:
    """Two engines that have nothing in common, and what they must give at any time."""
    row, word = text_row(ctx)
    other_path = ctx.model("qwen2", seed=1)
    other = ctx.certain(5, 7, path=other_path)
    one = ctx.fresh_generation(max_new_tokens=3, stop_strings=[word], seed=7, temperature=1.5)
    two = ctx.fresh_generation(max_new_tokens=4, seed=8, model_name=str(other_path))
    plans = [(one, [row.prompt], [row.tokens[:2]])]
    plans.append((two, [each.prompt for each in other], [each.tokens for each in other]))

    def check_both(when: str, engines: tuple[int, ...] = (0, 1)) -> None:
        for index in engines:
            engine, prompts, expected = plans[index]
            data = pad_rows(prompts)  # the models may have other tokens for padding
            got = generated(data, engine.generate(data, greedy=True))
            same(got, expected, f"{when}: greedy tokens of engine {index}")

    return check_both, [one, two]


def with_penalty(ctx: Context, **config: Any) -> GenerationInterface:
    """An engine that takes a repetition penalty; one that refuses the key has none to check."""
    try:
        return ctx.generation(max_new_tokens=6, **config)
    except (ConfigError, CapabilityError) as error:
        if "repetition_penalty" not in str(error):
            raise
        raise NotRun("the backend refuses repetition_penalty", excused=True) from error


def read_stream(
    generation: GenerationInterface, data: BatchedDataDict[Any]
) -> list[tuple[int, BatchedDataDict[Any]]]:
    async def collect() -> list[tuple[int, BatchedDataDict[Any]]]:
        return [item async for item in generation.generate_async(data, greedy=True)]

    return asyncio.run(collect())


def trained_policy(ctx: Context, **config: Any) -> ColocatablePolicyInterface:
    """A policy that is ready to train."""
    policy = ctx.fresh_policy(**config)
    policy.prepare_for_training()
    return policy


def scores_after(policy: ColocatablePolicyInterface, data: BatchedDataDict[Any]) -> torch.Tensor:
    policy.prepare_for_lp_inference()
    scores: torch.Tensor = policy.get_logprobs(data)["logprobs"]
    return scores


def strange_token(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    data["input_ids"][-1, 2] = 10**6
    return data


_TOKENS = {"enabled": True, "train_mb_tokens": 40}


SPLITS: dict[str, dict[str, Any]] = {
    "of_5": {"config": {}, "size": 5},
    "of_more_than_there_are": {"config": {}, "size": 99},
    "configured": {"config": {"logprob_batch_size": 3, "train_micro_batch_size": 8}, "size": None},
    "dynamic": {
        "config": {"dynamic_batching": {**_TOKENS, "sequence_length_round": 4}},
        "size": None,
    },
    "packed": {"config": {"sequence_packing": _TOKENS}, "size": None},
    "packed_on_multiples": {
        "config": {
            "sequence_packing": {
                **_TOKENS,
                "algorithm": "first_fit_shuffle",
                "sequence_length_pad_multiple": 4,
                "logprob_mb_tokens": 60,
            }
        },
        "size": None,
    },
}


_OTHER_LENGTHS = (12, 3, 30, 17)


def refuses_until_a_load(
    ctx: Context, policy: Any, error: type[BaseException] = MemoryError
) -> None:
    data, saved = training_batch(_OTHER_LENGTHS), str(ctx.directory() / "saved")
    train = partial(policy.train, data, NegativeLogLikelihood())
    policy.prepare_for_training()
    train()
    policy.save_checkpoint(saved)
    expected = float(train()["loss"])
    try:
        policy.train(data, FailsInTheStep(ctx.directory() / "claim", error))
    except (Exception, KeyboardInterrupt):
        pass
    else:
        ctx.not_run(
            "the suite cannot make a step fail midway: the policy does not use torch's optimizers",
            excused=True,
        )
    for call in (
        train,
        lambda: policy.get_logprobs(data),
        lambda: policy.save_checkpoint(str(ctx.directory() / "torn")),
        policy.prepare_refit_info,
    ):
        with raises(LifecycleError):
            call()
    if hasattr(policy, "load_checkpoint"):
        policy.load_checkpoint(saved)
        policy.prepare_for_training()
        again = float(train()["loss"])
        mean, _ = ctx.tolerance_of("float32")
        near = abs(again - expected) <= mean
        require(near, "loss of the step after a load", f"{expected}, within {mean}", again)


def tensor_trainer(ctx: Context, side: str) -> Any:
    """The policy under test, or one whose weights can be set where an engine is."""
    if side == "engine":
        return settable_trainer(ctx)
    return ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))


def change_tensors(policy: Any, side: str, step: int, way: str) -> None:
    """New weights: one tensor's where only that is to be sent."""
    if side == "trainer":
        take_step(policy, step)
        return
    names = sorted(name for name, _ in policy.model.named_parameters())
    one = [names[5 * step % len(names)]] if way == "delta" else None
    shuffle(policy, step, one)


def refit_in_sequence(ctx: Context, side: str, *names: str) -> None:
    """Every way after every other one: each time exact, each time the next version."""
    policy, engine = tensor_trainer(ctx, side), engine_for(ctx, side)
    run_refit(policy, engine)
    exact(ctx, policy, engine, "the first refit", 1)
    ways, before = ways_of(ctx, policy, side, *names), "packed"
    for step, way in enumerate(every_pair(list(ways)), 2):
        change_tensors(policy, side, step, way)
        ways[way](policy, engine)
        exact(ctx, policy, engine, f"refit {step}, {way} after {before}", step)
        before = way


WAKINGS: tuple[list[dict[str, Any]], ...] = (
    [{}],
    [{"tags": ["weights"]}, {"tags": ["kv_cache"]}],
    [{"tags": ["kv_cache"]}, {"tags": ["weights"]}],
)


def change_nothing(
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
            fail(what, "an error of rl_core.errors", "no exception")
        same(engine.weights_version, 1, f"{what}: weights_version")
        same_weights(engine_weights(engine), before, what)
        output = engine.generate(data, greedy=True)
        same(output["weights_version"].tolist(), [1, 1], f"{what}: weights_version of the rows")
        ctx.measure_error(output["logprobs"], expected["logprobs"])
    report = run_refit(policy, engine, delta=True)
    same(report.version, 2, "version of the refit after refused ones")
    same(report.tensors, 0, "tensors sent by a delta after no change")
    shuffle(policy, 5, ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
    run_refit(policy, engine, delta=True)
    exact(ctx, policy, engine, "a delta after refused calls", 3)


def fresh_doubles(ctx: Context) -> tuple[Trainer, Engine]:
    return ctx.closing(Trainer(whole_tensors(1))), ctx.closing(Engine(whole_tensors(2)))


def renew_tensors(policy: Trainer, seed: int) -> None:
    for name, tensor in whole_tensors(seed).items():
        policy.tensors[name].copy_(tensor)


def frames_of(
    side: str, act: Callable[[], object], instead: dict[int, bytes] | None = None
) -> list[bytes]:
    """What one side sends, while other frames go in the place of some."""
    sent: list[bytes] = []
    with ExitStack() as patches:
        kind: Any = ControlServer if side == "sender" else ControlClient
        honest = kind.send

        def send(end: Any, *arguments: Any) -> Any:
            *key, frame = arguments
            if not frame:
                return honest(end, *arguments)
            sent.append(frame)
            return honest(end, *key, (instead or {}).get(len(sent) - 1, frame))

        patches.enter_context(mock.patch.object(kind, "send", send))
        act()
    return sent


def messages_of(act: Callable[[], object]) -> list[Any]:
    """The messages that both sides send."""
    sent: list[Any] = []
    encode = Channel.encode

    def keep(channel: Channel, message: object) -> bytes:
        sent.append(message)
        return encode(channel, message)

    with mock.patch.object(Channel, "encode", keep):
        act()
    return sent


def needs_adapters(*modules: str) -> None:
    if absent := [name for name in modules if not importlib.util.find_spec(name)]:
        raise NotRun(f"adapters need {absent[0]}, which is not installed", excused=True)


def adapted_policy(
    ctx: Context, refit: str | None = None, **config: Any
) -> ColocatablePolicyInterface:
    if "lora" not in config_keys(load_object(ctx.manifest.configs["policy"])):
        raise NotRun("the policy has no adapters: its configuration has no key lora", excused=True)
    needs_adapters("peft")
    lora = {"r": 4} if refit is None else {"r": 4, "refit": refit}
    return ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)), lora=lora, **config)


def train_adapters(policy: Any) -> None:
    policy.prepare_for_training()
    for _ in range(5):  # so that what was learned is more than rounding
        policy.train(training_batch((7, 4, 9)), NegativeLogLikelihood())
    policy.finish_training()
