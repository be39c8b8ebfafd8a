"""Text: whole characters only, nothing behind a stop string, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.decode.request import TextStream

chunks = st.lists(st.binary(max_size=6), max_size=8)
stops = st.lists(st.text(alphabet="ab\né", min_size=1, max_size=3), max_size=3)
letters = st.lists(st.text(alphabet="ab\néc", max_size=5).map(str.encode), max_size=8)


def streamed(parts, stop=()):
    stream = TextStream(stop)
    return "".join([*(stream.feed(part) for part in parts), stream.finish()]), stream.stopped_by


def cut(text, stop):
    """What should come: everything before the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        if found := [each for each in stop if text[:end].endswith(each)]:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(chunks)
def test_the_characters_are_those_of_all_bytes_decoded_at_once(parts):
    assert streamed(parts) == (b"".join(parts).decode("utf-8", "replace"), None)


@given(letters, stops)
def test_nothing_comes_behind_the_first_stop_string_and_nothing_before_it_is_lost(parts, stop):
    assert streamed(parts, stop) == cut(b"".join(parts).decode(), stop)


@given(letters, stops)
def test_what_has_come_is_never_taken_back(parts, stop):
    """Byte by byte: everything given so far begins the final text."""
    stream, sent = TextStream(stop), []
    for byte in b"".join(parts):
        sent.append(stream.feed([byte]))
    assert cut(b"".join(parts).decode(), stop)[0].startswith("".join(sent))


def test_a_character_comes_with_its_last_byte():
    stream = TextStream()
    assert [stream.feed([byte]) for byte in "a€".encode()] == ["a", "", "", "€"]


def test_what_may_become_a_stop_string_waits():
    stream = TextStream(["\n\n"])
    assert [stream.feed(part) for part in (b"a\n", b"b\n", b"\nc")] == ["a", "\nb", ""]
    assert stream.stopped_by == "\n\n"


@pytest.mark.parametrize("stop", [[], ["xyz"]])
def test_an_unfinished_character_is_replaced_at_the_end(stop):
    assert streamed([b"a\xe2\x82"], stop) == ("a�", None)
