"""Stop strings: the first token that completes a match, found in the text as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rl_backends.generation.stop_strings import StopStrings
from rl_conformance.models import make_tokenizer

TOKENIZER = make_tokenizer()


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces, and bytes for what has none, as sentencepiece makes them: byte b is token 2 + b."""
    words = ["<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "op", "\u2581st", "\N{CJK UNIFIED IDEOGRAPH-5B57}", "-" * 40]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")


BYTE_FALLBACK = byte_fallback_tokenizer()


def first_match(tokens: list[int], strings: list[str], tokenizer=TOKENIZER) -> int | None:
    """Decodes every prefix from scratch."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=False)
        if any(string in text for string in strings):
            return count
    return None


def watched(tokens: list[int], strings: list[str], tokenizer=TOKENIZER) -> int | None:
    watcher = StopStrings(strings, tokenizer)
    return next((i for i, token in enumerate(tokens, 1) if watcher.push(token)), None)


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("a long text with the end in it", ["the end"]),
        ("1234 then 12", ["4 t", "n 1"]),
        ("no match here", ["zzz"]),
        ("naïve café 漢字 and more", ["字"]),
        ("naïve café", ["é"]),
        ("<eos> by name", ["<eos>"]),
        ("x", ["x"]),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", ["ab"]),
    ],
)
def test_a_row_ends_where_decoding_every_prefix_says(text: str, strings: list[str]):
    tokens = TOKENIZER.encode(text)
    assert watched(tokens, strings) == first_match(tokens, strings)


@given(
    st.lists(st.integers(0, 268), max_size=40),
    st.lists(st.text(alphabet="aeinrth12 é�<", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_any_tokens_and_strings_end_where_decoding_every_prefix_says(
    tokens: list[int], strings: list[str]
):
    assert watched(tokens, strings) == first_match(tokens, strings)


_ENCODED = st.sampled_from(["\N{CJK UNIFIED IDEOGRAPH-5B57}", "\N{HUGGING FACE}", "st"]).map(
    lambda text: [2 + byte for byte in text.encode()]
)
_TOKEN = st.integers(0, len(BYTE_FALLBACK) - 1).map(lambda token: [token])


@given(
    st.lists(st.one_of(_ENCODED, _ENCODED, _ENCODED, _TOKEN), min_size=1, max_size=60),
    st.integers(0, 200),
    st.integers(1, 4),
)
def test_runs_of_bytes_end_where_decoding_every_prefix_says(
    runs: list[list[int]], start: int, length: int
):
    tokens = [token for run in runs for token in run]
    text = BYTE_FALLBACK.decode(tokens)
    start = start % max(1, len(text))
    strings = [text[start : start + length] or "x"]
    expected = first_match(tokens, strings, BYTE_FALLBACK)
    assert watched(tokens, strings, BYTE_FALLBACK) == expected


def test_a_long_run_of_bytes_is_decoded_from_its_beginning():
    ideograph = [2 + byte for byte in "\N{CJK UNIFIED IDEOGRAPH-5B57}".encode()]
    face = [2 + byte for byte in "\N{HUGGING FACE}".encode()]
    tokens = [259, *ideograph * 40, *face, *ideograph]
    text = "\N{HUGGING FACE}"
    assert watched(tokens, [text], BYTE_FALLBACK) == len(tokens) - 3
    stray = [259, 2 + 0xFF, *tokens[1:]]
    assert watched(stray, [text], BYTE_FALLBACK) is None


def test_a_match_may_span_tokens_that_add_no_text_of_their_own():
    half = TOKENIZER.encode("é")
    assert len(half) == 2
    tokens = [*TOKENIZER.encode("caf"), *half]
    assert watched(tokens, ["fé"]) == len(tokens)


class _Bytes:
    """A tokenizer of single bytes, but for one long token."""

    LONG = 256

    def convert_ids_to_tokens(self, token):
        return "-" * 40 if token == self.LONG else chr(token)

    def decode(self, tokens, **_):
        pieces = (b"-" * 40 if token == self.LONG else bytes([token]) for token in tokens)
        return b"".join(pieces).decode(errors="replace")


def test_a_long_last_token_does_not_push_a_match_out_of_sight():
    text = "\N{GRINNING FACE}" * 12 + "-"
    watcher = StopStrings([text], _Bytes())
    tokens = [*text[:-1].encode(), _Bytes.LONG]
    assert [watcher.push(token) for token in tokens] == [False] * 48 + [True]
