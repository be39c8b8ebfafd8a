"""What lossy updates leave out is kept and sent later: by a worker for the coordinator, and from a block's course."""

from __future__ import annotations

import math
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from blocktrain.errors import TensorError
from blocktrain.wire.codecs.base import PIECE
from blocktrain.wire.codecs.floats import Float16, Float32
from blocktrain.wire.codecs.integers import Int8
from blocktrain.wire.codecs.sparse import Sparse
from blocktrain.wire.codecs.table import make_codec
from blocktrain.wire.error_feedback import ErrorFeedback
from blocktrain.wire.updates import (
    apply_update,
    encode_update,
    read_update,
)

sys.path.insert(0, str(Path(__file__).parent))
from made_updates import (
    SHAPES,
    SMALL,
    close,
    equal,
    lossy_codecs,
    normal,
    remade,
    seeds,
    trained,
)


def sent(feedback, published, after, codec, earlier=None):
    """The update, accepted."""
    data = feedback.compress(published, after, codec, earlier)
    feedback.accepted(data, published, after, earlier)
    return data


@lossy_codecs
@given(seed=seeds)
def test_one_worker_goes_on_from_its_own_weights_whatever_was_sent_of_them(codec, seed):
    feedback, published = ErrorFeedback(), normal(SHAPES, seed)
    assert equal(feedback.start(published), published)
    for step in range(3):
        after = trained(feedback.start(published), step)
        published = apply_update(published, read_update(sent(feedback, published, after, codec), SHAPES))
        for name, tensor in feedback.start(published).items():
            assert close(tensor, after[name], atol=1e-4)


def test_small_values_are_sent_in_the_end():
    feedback, codec = ErrorFeedback(), Sparse(chunk=64, kept=1)
    published, goal = {"x": np.zeros(64, np.float32)}, {"x": np.linspace(0.5, 1.0, 64, dtype=np.float32)}
    for _ in range(64):
        published = apply_update(published, read_update(sent(feedback, published, goal, codec), {"x": (64,)}))
    assert close(published["x"], goal["x"], rtol=2**-8)


def off(some, others):
    return math.hypot(*(np.linalg.norm(some[name] - others[name]) for name in others))


def course_of(start, seed, rounds):
    """Versions of a block that goes straight on."""
    step = normal(SHAPES, seed, 0.01)
    return [{name: np.asarray(start[name] - number * step[name]) for name in start} for number in range(rounds)]


@lossy_codecs
def test_an_update_coded_from_the_course_decodes_with_the_two_versions_that_it_was_built_on(codec):
    earlier, base, after = course_of(normal(SHAPES, 1), 2, 3)
    update = read_update(encode_update(base, after, codec, earlier), SHAPES, expected=codec)
    assert update.from_course
    assert update.needs_base
    plain = apply_update(base, read_update(encode_update(base, after, codec), SHAPES))
    assert off(apply_update(base, update, earlier), after) <= 0.55 * off(plain, after)


@lossy_codecs
def test_pieces_and_whole_changes_from_the_course_are_the_same(codec):
    earlier, base, after = course_of(normal(SHAPES, 1), 2, 3)
    update = read_update(encode_update(base, after, codec, earlier), SHAPES)
    for name in SHAPES:
        whole = update.change(name, base[name], earlier[name])
        assert close(update.delta(name, base[name], earlier[name]).astype(np.float32), whole, rtol=1e-6)


def test_a_piece_that_was_used_is_not_held_while_the_next_is_waited_for():
    before, after = normal({"up": (3, PIECE)}, 1), normal({"up": (3, PIECE)}, 2)
    pieces = read_update(encode_update(before, after, Int8()), {"up": (3, PIECE)}).pieces("up")
    used = weakref.ref(next(pieces))
    assert used() is None


@pytest.mark.parametrize(
    "given", [{}, {"base": np.zeros((24, 16), np.float32)}, {"earlier": np.zeros((24, 16), np.float32)}]
)
def test_an_update_coded_from_the_course_is_not_read_without_both_versions(given):
    earlier, base, after = course_of(normal(SHAPES, 1), 2, 3)
    update = read_update(encode_update(base, after, SMALL, earlier), SHAPES)
    with pytest.raises(TensorError, match="where it is coded from the course, the one before"):
        update.delta("layers.0.up", **given)


@pytest.mark.parametrize("codec, value", [("sparse", "0"), ("int8", ""), ("fp32", "1")])
def test_only_lossy_updates_may_be_coded_from_the_course_and_say_so_in_one_way(codec, value):
    with pytest.raises(TensorError, match="from_course"):
        read_update(remade(make_codec(codec), {"from_course": value}), SHAPES)


@pytest.mark.parametrize("codec, uses_it", [("int8", False), ("sparse", True), ("vector", True)])
def test_only_codecs_that_send_little_go_by_the_course(codec, uses_it):
    earlier, base, after = course_of(normal(SHAPES, 1), 2, 3)
    data = ErrorFeedback().compress(base, after, make_codec(codec), earlier)
    assert read_update(data, SHAPES).from_course == uses_it


@pytest.mark.parametrize("codec", ["sparse", "vector"])
def test_after_a_step_that_was_far_too_large_updates_are_of_the_usual_size_again(codec):
    earlier, *_, base, after = course_of(normal(SHAPES, 1), 2, 1000)
    update = read_update(ErrorFeedback().compress(base, after, make_codec(codec), earlier), SHAPES)
    assert math.sqrt(update.squared_norm(base, earlier)) <= 1.1 * off(base, after)


@lossy_codecs
def test_what_is_left_out_is_the_same_part_of_the_weights_whether_by_the_course_or_not(codec):
    earlier, base, after = course_of(normal(SHAPES, 1), 2, 3)
    feedback = ErrorFeedback()
    update = read_update(sent(feedback, base, after, codec, earlier), SHAPES)
    published = apply_update(base, update, earlier)
    for name, tensor in feedback.start(published).items():
        assert close(tensor, after[name], atol=1e-5)


def test_another_codec_sends_what_is_left_over():
    before, feedback = normal(SHAPES, 1), ErrorFeedback()
    after = trained(before, 2)
    published = apply_update(before, read_update(sent(feedback, before, after, SMALL), SHAPES))
    rest = sent(feedback, published, feedback.start(published), Float16())
    published = apply_update(published, read_update(rest, SHAPES))
    for name in SHAPES:
        assert close(published[name], after[name], rtol=0.001, atol=1e-4)


@lossy_codecs
def test_an_update_that_was_not_accepted_changes_nothing(codec):
    before, feedback = normal(SHAPES, 1), ErrorFeedback()
    sent(feedback, before, trained(before, 2), codec)
    start = feedback.start(before)
    feedback.compress(before, trained(start, 3), codec)
    assert equal(feedback.start(before), start)


def test_the_next_phase_takes_over_what_is_unsent_of_the_blocks_it_goes_on_with():
    before, feedback = normal({"0.up": (8, 8), "1.up": (8, 8)}, 1), ErrorFeedback()
    sent(feedback, before, trained(before, 2), SMALL)
    unsent = feedback.unsent["1.up"]
    following = {"1.up": before["1.up"], "2.up": np.ones((8, 8), np.float32)}
    feedback.forget_others(following)
    assert equal(feedback.start(following), {"1.up": before["1.up"] - unsent, "2.up": np.ones((8, 8), np.float32)})
    assert feedback.unsent.keys() == {"1.up"}


def test_fp32_leaves_nothing_behind():
    before, feedback, codec = normal(SHAPES, 1), ErrorFeedback(), Float32()
    after = trained(before, 2)
    assert sent(feedback, before, after, codec) == encode_update(before, after, codec)
    assert feedback.unsent == {}


def test_a_residual_of_another_block_is_refused():
    feedback = ErrorFeedback()
    feedback.unsent = {"gain": np.ones(3, np.float32)}
    with pytest.raises(TensorError, match="give two states of the same block"):
        feedback.start(normal(SHAPES, 1))
