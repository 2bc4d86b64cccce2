"""Episodes of several turns: the model acts, an environment answers, until one of them ends it.

What the model generated is kept token by token, and what the environment answers is appended as
tokens: a turn is never decoded and encoded again, so that the log-probs are those of the tokens
that were sampled. Only the model's tokens are trained on.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch.nn.utils.rnn import pad_sequence

from rl_core import BatchedDataDict
from rl_train.rewards import RewardError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rl_core import GenerationInterface
    from rl_train.encoding import Encoder

__all__ = ["Environment", "Episode", "Turn", "play", "training_rows"]


@dataclass(frozen=True)
class Turn:
    """What an environment answers to one turn of the model.

    Attributes:
        messages: Appended to the conversation, such as ``[{"role": "tool", "content": "42"}]``;
            or a text, where there is no chat template.
        done: The episode is over; nothing is appended.
        reward: Added to the episode's reward.
    """

    messages: Sequence[Mapping[str, Any]] | str = ()
    done: bool = False
    reward: float = 0.0


class Environment(Protocol):
    """What answers the model in one episode: any class with this method.

    Each episode gets a new object, made with ``environment.options``, and runs in its own thread.
    """

    def step(self, completion: str, row: Mapping[str, Any]) -> Turn:
        """Answers what the model wrote in its turn.

        Args:
            completion: The text of the model's turn, without special tokens.
            row: The columns of the data's row.
        """


@dataclass
class Episode:
    """One row of a step, as it grows.

    Attributes:
        ids: All tokens, the prompt's first.
        mask: For each token, 1 if the model generated it.
        logprobs: For each token, the engine's log-prob; 0 where it did not generate it.
        reward: What the environment gave.
        truncated: It ended because a turn was cut, because there was no room for another, or
            because the environment did not answer in time.
        timed_out: The last of these.
        weights: Version and origin of the weights that generated it.
        text: What the model wrote, turn by turn.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    truncated: bool = False
    timed_out: bool = False
    weights: tuple[int, int] = (0, 0)
    text: list[str] = field(default_factory=list)

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Appends tokens; those of the model have log-probs."""
        self.ids += ids
        self.mask += [int(logprobs is not None)] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


def play(
    generation: GenerationInterface,
    prompts: Sequence[list[int]],
    rows: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    *,
    make: Callable[[], Environment],
    encoder: Encoder,
    room: float,
    greedy: bool = False,
    max_turns: int = 8,
    workers: int | None = None,
    deadline_s: float = 300.0,
) -> list[Episode]:
    """Plays one episode for each prompt; all go on at the same time, or as many as ``workers``.

    Turn t of an episode draws from its seed + t. ``room`` is how many tokens an episode may have,
    the prompt's included.

    Raises:
        RewardError: An environment failed, or returned something else than a :class:`Turn`.
    """
    ended = threading.Event()

    def episode(number: int) -> Episode:
        found, row = Episode(), rows[number]
        found.append(prompts[number])
        environment: Any = None

        def step() -> Turn:
            nonlocal environment
            if environment is None:
                environment = make()
            turn = environment.step(found.text[-1], row)
            if not isinstance(turn, Turn):
                raise TypeError(f"it returned {turn!r:.100}, not rl_train.Turn(messages=...)")
            if not math.isfinite(turn.reward):
                raise ValueError(f"it returned the reward {turn.reward}, which is not finite")
            return turn

        with _Thread() as thread:
            while not ended.is_set():
                seed = (seeds[number] + len(found.text)) % 2**62
                made, cut = _generate(generation, found, seed, greedy)
                found.text.append(encoder.tokenizer.decode(made, skip_special_tokens=True))
                try:
                    turn = thread.call(step, deadline_s)
                except Exception as error:
                    ended.set()
                    raise RewardError(
                        f"the environment failed in turn {len(found.text)} of an episode, after "
                        f"{found.text[-1]!r:.100}: {type(error).__name__}: {error}",
                        fix="correct its class; step returns an rl_train.Turn",
                        function="environment",
                        rows=[number],
                    ) from error
                if turn is None:
                    found.truncated = found.timed_out = True
                    break
                found.reward += turn.reward
                if turn.done or len(found.text) == max_turns:
                    break
                ends = cut or not made
                answer = [] if ends else encoder.between(turn.messages, made[-1], row)
                if not answer or len(found.ids) + len(answer) >= room:
                    found.truncated = True
                    break
                found.append(answer)
        return found

    pool = ThreadPoolExecutor(workers or max(len(prompts), 1), "episode")
    try:
        return list(pool.map(episode, range(len(prompts))))
    finally:
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _generate(
    generation: GenerationInterface, episode: Episode, seed: int, greedy: bool
) -> tuple[list[int], bool]:
    """Appends a turn of the model; returns its tokens, and whether it was cut."""
    start = len(episode.ids)
    prompt: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.tensor([episode.ids]),
            "input_lengths": torch.tensor([start]),
            "seed": torch.tensor([seed]),
        }
    )
    output = generation.generate(prompt, greedy)
    made = slice(start, int(output["unpadded_sequence_lengths"][0]))
    ids: list[int] = output["output_ids"][0, made].tolist()
    episode.append(ids, output["logprobs"][0, made].tolist())
    episode.weights = int(output["weights_version"][0]), int(output["weights_origin"][0])
    return ids, bool(output["truncated"][0])


class _Thread:
    """Makes all calls of one environment, which may need one thread, and can be left alone."""

    def __enter__(self) -> Self:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.put(None)

    def call(self, act: Callable[[], Any], deadline_s: float) -> Any:
        """What it returns; None if that takes too long."""
        future: Future[Any] = Future()
        self._calls.put((future, act))
        wait([future], deadline_s)
        return future.result() if future.done() else None

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, act = call
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)


def training_rows(episodes: Sequence[Episode], pad: int) -> BatchedDataDict[Any]:
    """The batch of :func:`rl_losses.training_batch`, with a row for each episode."""

    def rows(values: Iterable[Sequence[float]], fill: float = 0.0) -> torch.Tensor:
        tensors = [torch.tensor(one) for one in values]
        return pad_sequence(tensors, batch_first=True, padding_value=fill)

    return BatchedDataDict(
        {
            "input_ids": rows((one.ids for one in episodes), pad),
            "input_lengths": torch.tensor([len(one.ids) for one in episodes]),
            "token_mask": rows(one.mask for one in episodes).float(),
            "generation_logprobs": rows(one.logprobs for one in episodes),
            "sample_mask": torch.ones(len(episodes)),
            "truncated": torch.tensor([one.truncated for one in episodes]),
            "weights_version": torch.tensor([one.weights[0] for one in episodes]),
            "weights_origin": torch.tensor([one.weights[1] for one in episodes]),
        }
    )
