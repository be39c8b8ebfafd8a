"""A lease with blobs, as bytes and back; and what a worker says that it holds."""

import hashlib

import pytest

from blocktrain.errors import TensorError
from blocktrain.wire.attached import MOST_HELD, Held, encode_attached, read_attached
from blocktrain.wire.messages import Blob, TrainLease

LEASE = TrainLease(lease="1", phase=0, shard=0, step_start=0, steps=1, time_left_s=1.0, trained=(), below=(), ahead=())
CONTENTS = (b"first\nwith a line feed", b"", b"third")
BLOBS = [Blob(sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content)) for content in CONTENTS]


def test_a_lease_and_its_blobs_arrive_as_they_were_sent():
    lease, contents = read_attached(b"".join(encode_attached(LEASE, BLOBS, CONTENTS)))
    assert lease == LEASE
    assert [bytes(contents[blob.sha256]) for blob in BLOBS] == [*CONTENTS]


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda data: data[:-1], "damaged"),
        (lambda data: data.replace(b"third", b"bird!"), "damaged"),
        (lambda data: data.replace(b"\n", b""), "cannot be read"),
        (lambda data: b"", "cannot be read"),
    ],
)
def test_what_is_not_what_its_message_says_is_refused(damage, says):
    with pytest.raises(TensorError, match=says):
        read_attached(damage(b"".join(encode_attached(LEASE, BLOBS, CONTENTS))))


def test_what_a_worker_holds_is_said_in_one_header():
    held = Held(frozenset({(0, 3), (12, 45)}), frozenset({BLOBS[0].sha256}))
    assert Held.parse(held.header()) == held
    assert Held.parse(Held().header()) == Held()


@pytest.mark.parametrize("header", ["", "?", "held 1", "1.x -1.2 " + "9" * 40 + ".1", "a" * 63])
def test_words_that_mean_nothing_hold_nothing(header):
    assert Held.parse(header) == Held()


def test_a_worker_of_very_many_blocks_names_some_of_them():
    many = Held(frozenset((block, 1) for block in range(2 * MOST_HELD)))
    assert len(Held.parse(many.header()).versions) == MOST_HELD
