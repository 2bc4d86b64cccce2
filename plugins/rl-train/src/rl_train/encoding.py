"""From rows to token ids: prompts, answers, pairs, and batches of these."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

from rl_core.config import Range, check_config
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.constraints import AlsoCalled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_core.batch import BatchedDataDict

__all__ = ["FOUND", "Answered", "DataConfig", "Encoder", "pad", "problem_of"]

#: Token ids, and 1 for each of them that is learned.
Answered: TypeAlias = tuple[list[int], list[int]]
#: Columns that are looked for where the configuration names none, in this order.
FOUND = {
    "prompt": ("prompt", "messages", "question", "problem", "instruction", "query", "input"),
    "completion": ("completion", "response", "output", "answer"),
    "answer": ("answer",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
}


class DataConfig(TypedDict, total=False):
    """Where rows come from, and how they become tokens.

    Attributes:
        path: A JSONL, JSON, Parquet or CSV file, a pattern such as ``data/*.jsonl`` or a list of
            these; a directory or the name of a dataset on the Hugging Face hub, as
            ``datasets.load_dataset`` takes it; or ``module:function`` or ``file.py:function`` that
            returns rows. Required.
        name: Configuration of the dataset on the hub. Default: the only one.
        split: Split of the dataset on the hub or in the directory. Default ``"train"``.
        options: Keyword arguments of the function in ``path``. Default none.
        prompt: Column of the prompt: a string or a list of messages. If a conversation ends with
            the assistant's turn and the row has no completion, that turn is the answer. Default:
            the first that exists of prompt, messages, question, problem, instruction, query and
            input.
        system: System message of conversations that have none; without a chat template, text
            before each prompt. Default none.
        tools: Tools for the chat template: the name of a column, a list of JSON schemas, or a JSON
            file of them. Default none.
        answer: Column of the reference answer, which reward functions get as ``answer``. Default
            ``"answer"`` if it is there.
        completion: Column that SFT learns: a string or a list of messages. Default: the first
            that exists of completion, response, output and answer.
        chosen: Column of the better answer of DPO, with or without the prompt. Default
            ``"chosen"``.
        rejected: Column of the worse answer. Default ``"rejected"``.
        chat: Whether prompts are rendered by the chat template, in which a string becomes the user
            message. Default: True if there is a template.
        chat_template: Jinja template, as text or as a file. Default: the tokenizer's.
        chat_template_kwargs: Variables of the template, such as ``enable_thinking``. Default none.
        max_prompt_tokens: Upper bound on the tokens of a prompt. Default: no limit.
        long_prompts: What happens to longer prompts, and to rows that are longer than the model's
            context: ``"drop"`` leaves the row out, ``"error"`` stops the run, ``"cut"`` removes
            tokens from the left. Default ``"drop"``.
        limit: How many rows are read, from the first one. Default: all.
        shuffle: Whether the rows are put into a new random order in each epoch. Default True.
    """

    path: Annotated[
        str | list[str], AlsoCalled("train_dataset dataset dataset_name train_files train_data")
    ]
    name: str | None
    split: str
    options: dict[str, Any]
    prompt: Annotated[str | None, AlsoCalled("prompt_key")]
    system: Annotated[str | None, AlsoCalled("system_prompt")]
    tools: str | list[dict[str, Any]] | None
    answer: str | None
    completion: str | None
    chosen: str | None
    rejected: str | None
    chat: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    max_prompt_tokens: Annotated[int | None, Range(ge=1), AlsoCalled("max_prompt_length")]
    long_prompts: Literal["drop", "error", "cut"]
    limit: Annotated[int | None, Range(ge=1)]
    shuffle: bool


def problem_of(value: Any) -> str | None:
    """What is wrong with a text or a conversation; None if nothing is."""
    if value is None:
        return "is missing"
    if not isinstance(value, str | list):
        return f"is {value!r} ({type(value).__name__}), neither a text nor a list of messages"
    if not value or (isinstance(value, str) and not value.strip()):
        return "is empty"
    for number, message in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"is not a conversation: entry {number} is {message!r:.80}, without a role"
    return None


class Encoder:
    """Turns rows into token ids.

    Args:
        tokenizer: As transformers has them.
        config: See :class:`DataConfig`.

    Attributes:
        chat: Whether prompts are rendered by a chat template.
        template: The chat template; None if there is none.

    Raises:
        ConfigError: There is no template, or a file of the configuration cannot be read.
    """

    def __init__(self, tokenizer: Any, config: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._config = config = check_config(DataConfig, config, what="data")
        template, self._tools = config.get("chat_template"), config.get("tools")
        try:
            if template and "{" not in template:
                template = Path(template).read_text(encoding="utf-8")
            if isinstance(self._tools, str) and self._tools.endswith(".json"):
                self._tools = json.loads(Path(self._tools).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            key = "tools" if template and "{" in template else "chat_template"
            text = f"data: a file of 'chat_template' or 'tools' cannot be read: {error}"
            raise ConfigError(text, fix="correct its path", key=key) from error
        self.template = template or getattr(tokenizer, "chat_template", None)
        chat = config.get("chat")
        self.chat = bool(self.template) if chat is None else chat
        if self.chat and not self.template:
            raise ConfigError(
                "data.chat is true, but the tokenizer has no chat template",
                fix="set data.chat_template, or set data.chat to false",
                key="chat",
            )

    def prompt(self, row: Mapping[str, Any]) -> list[int]:
        """The tokens that a completion continues.

        Raises:
            DataError: The row has no prompt, the template fails, or the prompt is too long.
        """
        value = self._value(row, "prompt")
        if isinstance(value, list) and value[-1:] and value[-1]["role"] == "assistant":
            value = value[:-1]
        ids = self._prompt_ids(value, row)
        if not ids:
            raise DataError(
                f"the prompt of a row has no tokens: {row!r:.200}",
                fix="give it a text that the tokenizer knows, or remove the row",
                key="prompt",
            )
        return self._fit(ids, len(ids))[0]

    def shown(self, row: Mapping[str, Any]) -> Any:
        """The prompt as reward functions and logs get it: a text or a conversation, as in the data.

        A completion then is a text, or a message that goes on with the conversation.
        """
        value = self._value(row, "prompt")
        return value if isinstance(value, str) else self._conversation(value)

    def answered(self, row: Mapping[str, Any]) -> Answered:
        """Tokens of prompt and answer, with a mask: 1 on the answer and its end token, else 0.

        In a conversation without a completion, the mask is 1 on every turn of the assistant.

        Raises:
            DataError: The row has no answer, or the template writes earlier turns differently when
                others follow, so that it is not clear which tokens are the assistant's.
        """
        prompt = self._value(row, "prompt", needed=False)
        talk = isinstance(prompt, list) and prompt[-1:] and prompt[-1]["role"] == "assistant"
        # Next to a whole conversation, "answer" is the reference of reward functions.
        completions = (self._config.get("completion") or "", *FOUND["completion"][:-1])
        given = any(row.get(column) is not None for column in completions)
        answer = self._value(row, "completion") if given or not talk else None
        return self._encode(prompt, answer, row)

    def pair(self, row: Mapping[str, Any]) -> tuple[Answered, Answered]:
        """The chosen and the rejected answer, as :meth:`answered` has them.

        If there is no prompt, or the answers begin with the user's turn, the prompt is what both
        have in common, as TRL's implicit prompts.
        """
        chosen, rejected = self._value(row, "chosen"), self._value(row, "rejected")
        prompt = self._value(row, "prompt", needed=False)
        if isinstance(chosen, list) != isinstance(rejected, list):
            raise DataError(
                f"'chosen' and 'rejected' are of different kinds in the row {row!r:.200}",
                fix="give two texts, or two lists of messages",
            )
        whole = isinstance(chosen, list) and chosen[0]["role"] in ("system", "user")
        if prompt is None or whole:
            both = zip(chosen, rejected, strict=False)
            common = next((i for i, (a, b) in enumerate(both) if a != b), None)
            if common is None:
                common = min(len(chosen), len(rejected)) - 1
            elif isinstance(chosen, str) and chosen[common - 1 : common] == " ":
                common -= 1  # the space belongs to the token that follows
            prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
        return self._encode(prompt, chosen, row), self._encode(prompt, rejected, row)

    def tokens(self, row: Mapping[str, Any], method: str) -> int:
        """Tokens that a method needs for a row at least; for GRPO the prompt and one more."""
        if method == "grpo":
            return len(self.prompt(row)) + 1
        both = self.pair(row) if method == "dpo" else (self.answered(row),)
        return max(len(ids) for ids, _ in both)

    def between(
        self, messages: Sequence[Mapping[str, Any]] | str, last: int, row: Mapping[str, Any]
    ) -> list[int]:
        """The tokens between a turn of the model, which ended with ``last``, and the next one.

        A text is taken as it is. Of messages these are what a chat template writes behind the
        model's turn in a short conversation with them, up to the begin of the next turn.

        Raises:
            ConfigError: No chat template writes messages behind the model's turn.
        """
        text, turn = messages, "what the model wrote"
        if not isinstance(text, str):
            before = [
                {"role": "user", "content": "question"},
                {"role": "assistant", "content": turn},
            ]
            rendered = ""
            if self.chat:
                rendered = self._render([*before, *messages], row, add_generation_prompt=True)
            _, found, text = rendered.rpartition(turn)
            if not found:
                raise ConfigError(
                    "the environment returns messages, but there is no chat template to add them "
                    "after the model's turn",
                    fix="return a text, or set data.chat_template",
                    key="environment.function",
                )
        tokens = self._ids(text)
        # The model has generated the end of its turn already.
        return tokens[1:] if tokens[:1] == [last] else tokens

    def _value(self, row: Mapping[str, Any], key: str, needed: bool = True) -> Any:
        named = self._config.get(key)
        names = (str(named),) if named else FOUND[key]
        value = next((row[name] for name in names if row.get(name) is not None), None)
        problem = problem_of(value)
        if problem and (needed or value is not None):
            raise DataError(
                f"the {key} of a row {problem}: {row!r:.200}",
                fix=f"set data.{key} to one of its columns: {', '.join(row)}",
                key=key,
            )
        return value

    def _messages(self, value: Any, role: str) -> list[dict[str, Any]]:
        """A conversation, of which a text is one turn; unset keys, as Arrow adds them, left out."""
        messages = value if isinstance(value, list) else [{"role": role, "content": value}]
        return [{"content": "", **_without_none(message)} for message in messages]

    def _conversation(self, prompt: Any) -> list[dict[str, Any]]:
        messages = self._messages(prompt, "user") if prompt else []
        system = self._config.get("system")
        if system and (not messages or messages[0]["role"] != "system"):
            return [{"role": "system", "content": system}, *messages]
        return messages

    def _prompt_ids(self, prompt: Any, row: Mapping[str, Any]) -> list[int]:
        if self.chat:
            text = self._render(self._conversation(prompt), row, add_generation_prompt=True)
            return self._ids(text)
        if isinstance(prompt, list):
            raise DataError(
                f"the prompt {prompt!r:.200} is a list of messages, but there is no chat template",
                fix="set data.chat_template; set data.chat to true, or leave it out",
                key="prompt",
            )
        text = (self._config.get("system") or "") + (prompt or "")
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        ids = self._ids(text, special=not (bos and text.startswith(bos)))
        # Some tokenizers add the end token to every text; a prompt goes on.
        if ids[-1:] == [eos] and self._ids(text)[-1:] != [eos]:
            ids.pop()
        return ids

    def _ids(self, text: str, special: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _render(self, messages: list[Any], row: Mapping[str, Any], **how: Any) -> Any:
        tools: Any = row.get(self._tools) if isinstance(self._tools, str) else self._tools
        try:
            tools = json.loads(tools) if isinstance(tools, str) else _without_none(tools)
            options = {"tokenize": False, **self._config.get("chat_template_kwargs", {}), **how}
            return self.tokenizer.apply_chat_template(
                messages, tools=tools or None, chat_template=self.template, **options
            )
        except Exception as error:
            raise DataError(
                f"the chat template fails on {messages!r:.300}: {type(error).__name__}: {error}",
                fix="correct the row, or set another data.chat_template",
            ) from error

    def _encode(self, prompt: Any, answer: Any, row: Mapping[str, Any]) -> Answered:
        if not self.chat:
            if isinstance(answer, list) or answer is None:
                self._prompt_ids(answer or prompt, row)  # raises
            ids = self._prompt_ids(prompt, row)
            learned = self._ids(answer)
            if learned[-1:] != [self.tokenizer.eos_token_id]:
                learned = [*learned, self.tokenizer.eos_token_id]
            mask = [0] * len(ids) + [1] * len(learned)
            ids = ids + learned
        else:
            asked = self._conversation(prompt)
            given = self._messages(answer, "assistant") if answer is not None else []
            first = len(asked) if given else 0
            ids, mask = self._learned_turns([*asked, *given], first, row)
        mask[:1] = [0]  # nothing predicts the first token
        if 1 not in mask:
            raise DataError(
                f"a row has no completion and no turn of the assistant to learn: {row!r:.200}",
                fix="add one to the row, or remove the row",
            )
        return self._fit(ids, mask.index(1), mask)

    def _learned_turns(
        self, messages: list[dict[str, Any]], first: int, row: Mapping[str, Any]
    ) -> Answered:
        """A rendered conversation, of which the assistant's turns from ``first`` on are learned."""
        turns = [i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"]
        if re.search(r"{%-?\s*generation", str(self.template)):
            how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            out = self._render(messages, row, **how)
            begin = len(self._ids(self._render(messages[:first], row))) if first else 0
            return out["input_ids"], [0] * begin + list(out["assistant_masks"])[begin:]
        whole, end = self._render(messages, row), 0
        ids: list[int] = []
        mask: list[int] = []
        for turn in turns:
            before = self._render(messages[:turn], row, add_generation_prompt=True) if turn else ""
            until = self._render(messages[: turn + 1], row)
            begin = next(
                (at for at, (a, b) in enumerate(zip(before, until, strict=False)) if a != b),
                min(len(before), len(until)),
            )
            if not whole.startswith(until) or begin < end:
                raise DataError(
                    f"the chat template changes turn {turn} when other turns follow it: "
                    f"{messages!r:.300}",
                    fix="use a template with {% generation %}, or give each answer its own row, "
                    "with prompt and completion",
                )
            skipped, learned = self._ids(whole[end:begin]), self._ids(until[begin:])
            special = set(self.tokenizer.all_special_ids)
            ends = [i for i, token in enumerate(learned, 1) if token in special][-1:]
            # What a template writes behind the end token, such as a line break, is never generated.
            if not ends or self.tokenizer.decode(learned[ends[0] :]).strip():
                ends = [len(learned)]
            mask += [0] * len(skipped) + [1] * ends[0] + [0] * (len(learned) - ends[0])
            ids, end = ids + skipped + learned, len(until)
        rest = self._ids(whole[end:])
        return ids + rest, mask + [0] * len(rest)

    def _fit(self, ids: list[int], prompt: int, mask: Sequence[int] = ()) -> Answered:
        """Applies ``max_prompt_tokens`` to a row whose prompt has this many tokens."""
        most = self._config.get("max_prompt_tokens")
        if most is None or prompt <= most:
            return ids, list(mask)
        if self._config.get("long_prompts") != "cut":
            raise DataError(
                f"a prompt has {prompt} tokens, and the limit is {most}: "
                f"{self.tokenizer.decode(ids)!r:.99}",
                fix="raise data.max_prompt_tokens, or set data.long_prompts to drop or cut",
            )
        return ids[prompt - most :], list(mask[prompt - most :])


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def pad(rows: Sequence[list[int] | Answered], pad_id: int) -> BatchedDataDict[Any]:
    """One batch of rows, padded on the right.

    Args:
        rows: Token ids of prompts; or ids with the mask of what is learned, as
            :meth:`Encoder.answered` returns them.
        pad_id: Fills ``input_ids``.

    Returns:
        ``input_ids`` ``[B, S]`` and ``input_lengths`` ``[B]`` int64; with masks also ``token_mask``
        ``[B, S]`` and ``sample_mask`` ``[B]`` float32.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from rl_core.batch import BatchedDataDict

    ids = [torch.tensor(row[0] if isinstance(row, tuple) else row) for row in rows]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_id),
        "input_lengths": torch.tensor([len(row) for row in ids]),
    }
    masks = [torch.tensor(row[1], dtype=torch.float32) for row in rows if isinstance(row, tuple)]
    if masks:
        batch["token_mask"] = pad_sequence(masks, batch_first=True)
        batch["sample_mask"] = torch.ones(len(masks))
    return BatchedDataDict(batch)
