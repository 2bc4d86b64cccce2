"""Rows are read as they are written, and become the tokens that the template has."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rl_core.errors import ConfigError, DataError
from rl_train.data import Order, load_rows
from rl_train.encoding import Encoder, pad

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ think | default('') }}{% endif %}"
)
MASKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Callable[..., Any]:
    """``tokenizer(template=None)`` has a token for each byte, and puts <s> before plain text."""

    def make(template: str | None = None) -> Any:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters])}
        inner = Tokenizer(models.BPE(vocabulary, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
        names = {"pad_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[3]}
        made = PreTrainedTokenizerFast(
            tokenizer_object=inner, additional_special_tokens=[SPECIAL[2]], **names
        )
        made.backend_tokenizer.decoder = decoders.ByteLevel()
        made.chat_template = template
        return made

    return make


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def learned(tokenizer: Any, answered: tuple[list[int], list[int]]) -> str:
    ids, mask = answered
    assert len(ids) == len(mask)
    return str(tokenizer.decode([token for token, counts in zip(ids, mask, strict=True) if counts]))


def test_json_rows_stay_as_they_are_written(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "x": {"k": 1}}, {"prompt": "b", "x": {"other": "t"}, "more": None}]
    lines = load_rows({"path": write(tmp_path / "a.jsonl", *rows)})
    assert list(lines) == rows
    assert lines.columns == ["prompt", "x", "more"]
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    assert list(load_rows({"path": str(tmp_path / "a.json")})) == rows
    both = load_rows({"path": str(tmp_path / "a.json*"), "limit": 3})
    assert [row["prompt"] for row in both] == ["a", "b", "a"]


def test_a_changed_file_is_read_anew_and_nothing_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.csv"
    for answer in ("3", "4"):
        file.write_text(f"prompt,answer\n1+2=,{answer}\n", encoding="utf-8")
        os.utime(file, (1, 1))
        rows = load_rows({"path": str(file)})
        assert rows[0] == {"prompt": "1+2=", "answer": int(answer)}
    from datasets import Dataset

    Dataset.from_dict({"prompt": ["x", "y"]}).to_parquet(str(tmp_path / "a.parquet"))
    capfd.readouterr()
    assert [row["prompt"] for row in load_rows({"path": str(tmp_path / "a.parquet")})] == ["x", "y"]
    file.rename(tmp_path / "of csv.txt")
    assert load_rows({"path": str(tmp_path), "limit": 1})[:] == [{"prompt": "x"}]
    assert capfd.readouterr() == ("", "")


def test_a_function_makes_rows(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    file.write_text("def rows(n):\n    for i in range(n):\n        yield {'prompt': str(i)}\n")
    rows = load_rows({"path": f"{file}:rows", "options": {"n": 3}})
    assert [row["prompt"] for row in rows] == ["0", "1", "2"]
    with pytest.raises(ConfigError, match="write 'rows'"):
        load_rows({"path": f"{file}:row"})
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        load_rows({"path": "nowhere.py:rows"})


@pytest.mark.parametrize(
    ("text", "config", "error", "match"),
    [
        ('{"prompt": "a"}\n\n{"prompt": \n', {}, DataError, r"bad\.jsonl, line 3: not valid JSON"),
        ("[1]", {}, DataError, "entry 0: 1 is not an object"),
        ('[{"prompt": "a"},\n{"prompt" 1}]', {}, DataError, "line 2: not valid JSON"),
        ("", {}, DataError, "has no rows"),
        ('{"prompt": "a"}\n{"prompt": 7}', {}, DataError, "line 2: 'prompt' is 7 .int., neither"),
        ('{"prompt": "a"}\n{"prompt": " "}', {}, DataError, "line 2: 'prompt' is empty"),
        ('{"prompt": "a"}\n{"a": " "}', {}, DataError, "line 2: 'prompt' is missing"),
        ('{"prompt": [{"content": ""}]}', {}, DataError, "entry 0 is .* without a role"),
        ('{"quest": "a", "b": 1}', {}, ConfigError, "no column of prompts; the columns are quest"),
        ('{"quest": "a"}', {"prompt": "questt"}, ConfigError, "Fix: write 'quest'"),
        ('{"prompt": "a"}', {"answer": "solution"}, ConfigError, "data.answer: .* no column"),
        ('{"prompt": "a"}', {"promptt": "x"}, ConfigError, "did you mean 'prompt'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    tmp_path: Path, text: str, config: dict[str, Any], error: type[Exception], match: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=match):
        load_rows({"path": str(file), **config})


def test_a_missing_file_has_its_neighbour_and_a_broken_table_its_cause(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"prompt": "a"})
    with pytest.raises(ConfigError, match=r"no file .*trainn.*\nFix: write '.*train\.jsonl'"):
        load_rows({"path": str(tmp_path / "trainn.jsonl")})
    (tmp_path / "a.csv").write_text('prompt,b\n"x,1\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv: .*EOF inside string"):
        load_rows({"path": str(tmp_path / "a.csv")})


def test_a_hub_that_cannot_be_reached_says_what_else_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach 'who/what' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError, match=r"is not a file.*reach 'who/what'[^$]*hf download"):
        load_rows({"path": "who/what"})


def test_long_prompts_are_dropped_refused_or_cut(tmp_path: Path, tokenizer: Any) -> None:
    plain = tokenizer()
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1234567", "solution": None},
        {"prompt": "12", "solution": 5},
    )
    config = {"path": path, "max_prompt_tokens": 5, "answer": "solution"}
    rows = load_rows(config, plain)
    assert (len(rows), rows.dropped, rows[0]["answer"], rows.place(0)[-6:]) == (1, 1, 5, "line 2")
    with pytest.raises(
        DataError, match=r"line 1: the prompt has 8 tokens, and the limit is 5 \(1 of 2"
    ):
        load_rows({**config, "long_prompts": "error"}, plain)
    cut = {**config, "long_prompts": "cut"}
    assert len(load_rows(cut, plain)) == 2
    assert plain.decode(Encoder(plain, cut).prompt({"prompt": "1234567"})) == "34567"
    answered = Encoder(plain, cut).answered({"prompt": "1234567", "completion": "8"})
    assert (plain.decode(answered[0]), sum(answered[1])) == ("345678<|im_end|>", 2)
    with pytest.raises(DataError, match=r"the limit is 1 \(2 of 2"):
        load_rows({**config, "max_prompt_tokens": 1}, plain)


def test_plain_text_has_one_begin_token_and_answers_end(tokenizer: Any) -> None:
    plain = tokenizer()
    encoder = Encoder(plain, {"system": "Add: "})
    assert plain.decode(encoder.prompt({"question": "1+1="})) == "<s>Add: 1+1="
    assert plain.decode(Encoder(plain, {}).prompt({"prompt": "<s>1"})) == "<s>1"
    answered = encoder.answered({"prompt": "1+1=", "answer": "2"})
    assert learned(plain, answered) == "2<|im_end|>"
    whole = Encoder(plain, {"completion": "text"}).answered({"text": "all of it"})
    assert learned(plain, whole) == "all of it<|im_end|>"
    with pytest.raises(DataError, match="chat_template"):
        encoder.prompt({"prompt": TALK[:1]})
    with pytest.raises(ConfigError, match="no chat template"):
        Encoder(plain, {"chat": True})


def test_a_chat_has_system_tools_and_options(tmp_path: Path, tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": None}}
    (tmp_path / "tools.json").write_text(json.dumps([tool]), encoding="utf-8")
    chat = tokenizer(CHATML)
    config = {"system": "Be brief.", "chat_template_kwargs": {"think": "<think>"}}
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )
    for prompt in ("one", TALK[:1], TALK[:2]):
        assert chat.decode(Encoder(chat, config).prompt({"messages": prompt})) == expected
    for tools in ([tool], str(tmp_path / "tools.json"), "tools"):
        encoder = Encoder(chat, {**config, "tools": tools})
        text = chat.decode(encoder.prompt({"prompt": "one", "tools": json.dumps([tool])}))
        assert text.startswith(
            '<|im_start|>system\nTools: [{"type": "function", "function": {"name"'
        )
        assert "parameters" not in text or tools != [tool]
    given = tmp_path / "template.jinja"
    given.write_text(CHATML, encoding="utf-8")
    plain = tokenizer()
    assert Encoder(plain, {"chat_template": str(given)}).chat
    with pytest.raises(DataError, match=r"template fails on .*nope"):
        Encoder(plain, {"chat_template": "{{ raise_exception('nope') }}"}).prompt({"prompt": "a"})


def test_the_turns_of_the_assistant_are_learned_with_their_end_tokens(tokenizer: Any) -> None:
    chat = tokenizer(CHATML)
    answered = Encoder(chat, {}).answered({"messages": TALK})
    assert learned(chat, answered) == "two<|im_end|>four<|im_end|>"
    assert chat.decode(answered[0]) == chat.apply_chat_template(TALK, tokenize=False)
    # Of a completion the turns in it alone; its prompt is what generation gets.
    row = {"prompt": TALK[:3], "completion": "four"}
    ids, mask = Encoder(chat, {}).answered(row)
    assert learned(chat, (ids, mask)) == "four<|im_end|>"
    assert ids[: mask.index(1)] == Encoder(chat, {}).prompt(row)
    # Reasoning that the prompt begins is not learned again; a template may mask by itself.
    thinks = Encoder(chat, {"chat_template_kwargs": {"think": "<think>"}})
    assert learned(chat, thinks.answered({"prompt": "q", "answer": "<think>a"})) == "a<|im_end|>"
    masked = Encoder(chat, {"chat_template": MASKED})
    assert learned(chat, masked.answered({"messages": TALK})) == "two<|im_end|>four<|im_end|>"
    assert learned(chat, masked.answered({"prompt": TALK[:2], "completion": TALK[2:]})) == (
        "four<|im_end|>"
    )


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    encoder = Encoder(tokenizer(REWRITES), {})
    with pytest.raises(DataError, match="turn 1 when other turns follow"):
        encoder.answered({"messages": TALK})
    assert encoder.answered({"prompt": TALK[:3], "completion": "four"})
    with pytest.raises(DataError, match="the completion of a row is missing"):
        encoder.answered({"messages": TALK[:3]})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "one", "chosen": "two", "rejected": "2"},
        {"prompt": TALK[:1], "chosen": TALK[1:2], "rejected": [{**TALK[1], "content": "2"}]},
        {"chosen": TALK[:2], "rejected": [TALK[0], {**TALK[1], "content": "2"}]},
        {"prompt": "one", "chosen": TALK[:2], "rejected": [TALK[0], {**TALK[1], "content": "2"}]},
    ],
    ids=["texts", "explicit", "implicit", "both"],
)
def test_pairs_are_those_of_trl(tokenizer: Any, row: dict[str, Any]) -> None:
    chat = tokenizer(CHATML)
    chosen, rejected = Encoder(chat, {}).pair(row)
    assert [learned(chat, each) for each in (chosen, rejected)] == ["two<|im_end|>", "2<|im_end|>"]
    assert chosen[0][: chosen[1].index(1)] == Encoder(chat, {}).prompt({"prompt": "one"})


def test_an_order_goes_on_where_it_was_and_repeats_nothing_in_an_epoch() -> None:
    order = Order(10, seed=3)
    epochs = order.take(30)
    assert [sorted(epochs[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    assert epochs[:10] != epochs[10:20]
    other = Order(10, seed=3)
    assert other.take(7) == epochs[:7]
    assert other.epoch == 0.7
    resumed = Order(10, seed=8)
    resumed.load(other.state())
    assert [*resumed.take(4), *resumed.take(19)] == epochs[7:30] == other.take(23)
    assert Order(3, 0, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ConfigError, match="was 10 when the checkpoint was saved, and is 11 now"):
        Order(11, 3).load(other.state())


def test_rows_are_padded_on_the_right() -> None:
    batch = pad([([5, 6, 7], [0, 1, 1]), ([8], [0])], pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["input_lengths"].tolist() == [3, 1]
    assert batch["token_mask"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch["sample_mask"].tolist() == [1, 1]
    assert set(pad([[1], [2, 3]], 0)) == {"input_ids", "input_lengths"}


@pytest.mark.parametrize("template", [CHATML, REWRITES])
def test_turns_of_an_environment_are_what_the_template_puts_between(
    tokenizer: Any, template: str
) -> None:
    """A turn that ended with its end token goes on after it; one that was cut has none."""
    chat = tokenizer(template)
    encoder, end = Encoder(chat, {}), chat.eos_token_id
    between = encoder.between([{"role": "tool", "content": "42"}], end, {})
    assert chat.decode(between) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert encoder.between([{"role": "tool", "content": "42"}], end + 1, {}) == [end, *between]
    assert chat.decode(encoder.between("=42", end, {})) == "=42"
    with pytest.raises(ConfigError, match="no chat template"):
        Encoder(chat, {"chat": False}).between([{"role": "tool", "content": "42"}], end, {})
