"""Bytes become choices: whole characters, and log-probabilities of exactly the bytes shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.gateway.choices import ChoiceWriter, TokenLogprobs, join_choices, token_name


def written(data: bytes, sizes: list[int], stops: tuple[str, ...] = ()) -> list:
    """The choices of a text that comes in pieces of these sizes."""
    writer, choices, at = ChoiceWriter(0, stops, logprobs=1), [], 0
    for size in [*sizes, len(data)]:
        piece, at = data[at : at + size], at + size
        choices.append(writer.take(TokenLogprobs(byte, -1.0, ((byte, -1.0),)) for byte in piece))
        if writer.stopped:
            break
    return [choice for choice in [*choices, writer.end()] if choice is not None]


@given(data=st.binary(max_size=40) | st.text(max_size=20).map(str.encode), sizes=st.lists(st.integers(0, 5)))
def test_however_bytes_come_the_text_is_the_same_and_every_byte_has_its_place(data, sizes):
    choices = written(data, sizes)
    whole = join_choices(choices)
    assert whole.text == data.decode("utf-8", "replace")
    assert whole.logprobs.tokens == [token_name(bytes([byte])) for byte in data]
    offsets = whole.logprobs.text_offset
    assert offsets == sorted(offsets)
    assert set(offsets) == set(range(len(whole.text)))


@given(
    text=st.text(alphabet="abä", max_size=30),
    stop=st.text(alphabet="abä", min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 4)),
)
def test_neither_a_stop_string_nor_its_log_probabilities_are_shown(text, stop, sizes):
    choices = written(text.encode(), sizes, (stop,))
    whole, expected = join_choices(choices), text.partition(stop)[0]
    assert whole.text == expected
    assert whole.logprobs.tokens == [token_name(bytes([byte])) for byte in expected.encode()]
    assert whole.finish_reason == ("stop" if stop in text else "length")


def test_no_part_of_a_stream_has_half_a_character():
    choices = written("a€b".encode(), [1, 1, 1, 1, 1])
    assert [choice.text for choice in choices] == ["a", "€", "b", ""]
    assert [choice.logprobs.tokens for choice in choices][1] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


def test_bytes_are_counted_to_the_end_of_the_stop_string():
    writer = ChoiceWriter(0, ["cd"], None)
    writer.take(map(TokenLogprobs, b"abcdefgh"))
    assert writer.num_bytes == 4


@given(
    data=st.binary(max_size=30) | st.text(alphabet="abä", max_size=30).map(str.encode),
    sizes=st.lists(st.integers(0, 5)),
    stops=st.lists(st.text(alphabet="abä", min_size=1, max_size=2), max_size=2),
)
def test_without_log_probabilities_the_same_is_shown_and_counted(data, sizes, stops):
    each, plain, at = ChoiceWriter(0, stops, None), ChoiceWriter(0, stops, None), 0
    for size in [*sizes, len(data)]:
        piece, at = data[at : at + size], at + size
        assert plain.take_plain(piece) == each.take(map(TokenLogprobs, piece))
        assert (plain.num_tokens, plain.num_bytes) == (each.num_tokens, each.num_bytes)
    assert plain.end() == each.end()


def test_the_prompt_is_echoed_whatever_it_says():
    writer = ChoiceWriter(0, ["stop"], logprobs=0)
    assert writer.echo([TokenLogprobs(byte) for byte in b"stop here"]).text == "stop here"
    assert not writer.stopped


@pytest.mark.parametrize(
    "byte, name", [(0x41, "A"), (0x0A, "\n"), (0x7F, "\x7f"), (0x80, "bytes:\\x80"), (255, "bytes:\\xff")]
)
def test_a_byte_that_is_no_character_has_a_name(byte, name):
    assert token_name(bytes([byte])) == name
