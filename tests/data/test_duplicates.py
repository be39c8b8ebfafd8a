"""Near-duplicates: what counts as one."""

from __future__ import annotations

import random

import pytest

from blocktrain.data.duplicates import HeldOutSketches, sketch


def prose(seed: int) -> bytes:
    drawn = random.Random(seed)
    return " ".join("".join(drawn.choices("aeinorst", k=drawn.randint(2, 8))) for _ in range(2000)).encode()


HELD_OUT = prose(1)
OTHER = prose(2)
HELD = HeldOutSketches([sketch(HELD_OUT), sketch(prose(3))])


@pytest.mark.parametrize(
    "text, duplicate",
    [
        (HELD_OUT, True),
        (HELD_OUT.replace(b"tea", b"coffee"), True),
        (HELD_OUT[3000:9000], True),
        (OTHER + HELD_OUT + OTHER, True),
        (OTHER, False),
        (OTHER + HELD_OUT[:1500], False),
        (b"short", False),
        (b"", False),
    ],
    ids=["equal", "edited", "a part", "contained in a longer text", "another", "a quotation", "short", "empty"],
)
def test_a_near_duplicate_shares_half_of_its_shingles_or_holds_half_of_a_held_out_text(text, duplicate):
    assert HELD.near_duplicate(text) is duplicate


def test_short_texts_are_compared_as_a_whole():
    held = HeldOutSketches([sketch(b"a short note"), sketch(b"x" * 31)])
    assert held.near_duplicate(b"a short note")
    assert not held.near_duplicate(b"a short boat")


def test_without_held_out_text_nothing_is_a_duplicate():
    assert not HeldOutSketches([]).near_duplicate(HELD_OUT)
