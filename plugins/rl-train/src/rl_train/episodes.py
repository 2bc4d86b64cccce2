"""Episodes of several turns: the model acts, an environment answers, until one of them ends it.

What the model generated is kept token by token, and what the environment answers is appended as
tokens: a turn is never decoded and encoded again, so that the log-probs are those of the tokens
that were sampled. Only the model's tokens are trained on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rl_core import BatchedDataDict
from rl_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_core import GenerationInterface

__all__ = ["Environment", "Episode", "Turn", "TurnEncoder", "play", "training_rows"]


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
        prompt_length: Tokens of the prompt.
        mask: For each token, 1 if the model generated it.
        logprobs: For each token, the engine's log-prob; 0 where it did not generate it.
        turns: Turns that the model took.
        reward: What the environment gave.
        truncated: It ended because a turn was cut, or there was no room for another.
        version: Of the weights that generated it.
        origin: Of these weights.
        text: What the model wrote, turn by turn.
    """

    ids: list[int]
    prompt_length: int
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    truncated: bool = False
    version: int = 0
    origin: int = 0
    text: list[str] = field(default_factory=list)


class TurnEncoder:
    """Turns an environment's answer into the tokens between two turns of the model.

    With a chat template, these are what the template puts between a turn that the model ended and
    the next one that it begins: a short conversation with the answer is rendered, and what follows
    the model's turn in it is encoded.

    Args:
        tokenizer: The model's.
        chat: Whether prompts are conversations.
        template: Keywords of ``apply_chat_template``.

    Raises:
        ConfigError: The environment answers with messages, and there is no template; or the
            template does not show the model's turn.
    """

    _TURN = "what the model wrote"

    def __init__(self, tokenizer: Any, *, chat: bool, template: Mapping[str, Any]) -> None:
        self._tokenizer, self._chat, self._template = tokenizer, chat, dict(template)

    def __call__(self, messages: Sequence[Mapping[str, Any]] | str, last: int) -> list[int]:
        """The tokens to append.

        Args:
            messages: As :attr:`Turn.messages`.
            last: The token with which the model's turn ended.
        """
        text = messages
        if not isinstance(text, str):
            before = [
                {"role": "user", "content": "question"},
                {"role": "assistant", "content": self._TURN},
            ]
            rendered = ""
            if self._chat:
                rendered = self._tokenizer.apply_chat_template(
                    [*before, *messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._template,
                )
            _, found, text = rendered.rpartition(self._TURN)
            if not found:
                raise ConfigError(
                    "the environment returns messages, but there is no chat template to add them "
                    "after the model's turn",
                    fix="return a text, or set data.chat_template",
                    key="environment.function",
                )
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        # The model has generated the end of its turn already.
        return tokens[1:] if tokens and tokens[0] == last else tokens


def play(
    generation: GenerationInterface,
    prompts: Sequence[list[int]],
    rows: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    *,
    make: Callable[[], Environment],
    encode: TurnEncoder,
    decode: Callable[[list[int]], str],
    room: int,
    max_turns: int = 8,
    workers: int | None = None,
) -> list[Episode]:
    """Plays one episode for each prompt; all go on at the same time.

    Args:
        generation: The engine; turns of different episodes are decoded together where it can.
        prompts: Token ids of each.
        rows: The data's row of each.
        seeds: Of each episode; turn t draws from seed + t.
        make: Makes an environment.
        encode: See :class:`TurnEncoder`.
        decode: From tokens to the text that the environment sees.
        room: Tokens of an episode at most, the prompt's included.
        max_turns: Of the model.
        workers: Episodes at a time. Default: all.

    Raises:
        DataError: An environment returned something else than a :class:`Turn`.
    """

    def episode(number: int) -> Episode:
        found = Episode(list(prompts[number]), len(prompts[number]))
        found.mask, found.logprobs = [0] * found.prompt_length, [0.0] * found.prompt_length
        environment = make()
        while True:
            batch: BatchedDataDict[Any] = BatchedDataDict(
                {
                    "input_ids": torch.tensor([found.ids]),
                    "input_lengths": torch.tensor([len(found.ids)]),
                    "seed": torch.tensor([(seeds[number] + found.turns) % 2**62]),
                }
            )
            output = generation.generate(batch)
            start, end = len(found.ids), int(output["unpadded_sequence_lengths"][0])
            made = output["output_ids"][0, start:end].tolist()
            found.ids += made
            found.mask += [1] * len(made)
            found.logprobs += output["logprobs"][0, start:end].tolist()
            found.turns += 1
            found.version = int(output["weights_version"][0])
            found.origin = int(output["weights_origin"][0])
            found.text.append(decode(made))
            try:
                turn = environment.step(found.text[-1], rows[number])
            except Exception as error:
                raise DataError(
                    f"{type(environment).__name__}.step fails on {found.text[-1]!r:.100}: "
                    f"{type(error).__name__}: {error}",
                    fix="correct it; rl --debug train ... shows the traceback",
                ) from error
            if not isinstance(turn, Turn):
                raise DataError(
                    f"{type(environment).__name__}.step returned a {type(turn).__name__}, not a "
                    "Turn",
                    fix="return rl_train.Turn(messages=..., done=..., reward=...)",
                )
            found.reward += turn.reward
            if turn.done or found.turns == max_turns:
                return found
            answer = [] if bool(output["truncated"][0]) else encode(turn.messages, made[-1])
            if not answer or len(found.ids) + len(answer) >= room:
                found.truncated = True
                return found
            found.ids += answer
            found.mask += [0] * len(answer)
            found.logprobs += [0.0] * len(answer)

    with ThreadPoolExecutor(workers or max(len(prompts), 1), "episode") as pool:
        return list(pool.map(episode, range(len(prompts))))


def training_rows(episodes: Sequence[Episode], pad: int) -> BatchedDataDict[Any]:
    """The batch that a policy trains on: rewards and advantages are for the caller to add.

    Args:
        episodes: ``B`` of them; the longest has ``W`` tokens.
        pad: Fills rows on the right.

    Returns:
        ``input_ids`` ``[B, W]`` int64, ``input_lengths`` ``[B]`` int64, ``token_mask`` ``[B, W]``
        float32 with 1 on what the model generated, ``generation_logprobs`` ``[B, W]`` float32,
        ``sample_mask`` ``[B]`` float32, ``truncated`` ``[B]`` bool, ``weights_version`` and
        ``weights_origin`` ``[B]`` int64.
    """
    width = max(len(one.ids) for one in episodes)

    def rows(values: Callable[[Episode], Sequence[float]], fill: float) -> torch.Tensor:
        filled = [[*values(one), *[fill] * (width - len(one.ids))] for one in episodes]
        return torch.tensor(filled)

    return BatchedDataDict(
        {
            "input_ids": rows(lambda one: one.ids, pad),
            "input_lengths": torch.tensor([len(one.ids) for one in episodes]),
            "token_mask": rows(lambda one: one.mask, 0).float(),
            "generation_logprobs": rows(lambda one: one.logprobs, 0.0),
            "sample_mask": torch.ones(len(episodes)),
            "truncated": torch.tensor([one.truncated for one in episodes]),
            "weights_version": torch.tensor([one.version for one in episodes]),
            "weights_origin": torch.tensor([one.origin for one in episodes]),
        }
    )
