"""What travels arrives as it was sent, to the wire format's stated error; anything else is refused in our words."""

from __future__ import annotations

import json
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import FrameError
from blocktrain.io.arrays import as_arrays
from blocktrain.serve.chain import frames
from blocktrain.serve.chain.frames import decode, encode, quantised, without_states
from blocktrain.serve.chain.messages import PROTOCOL, Advance, Answer, Cancel, Head, Hello
from blocktrain.serve.traversal import Draft, Noise, Piece, StageTiming, Traversal, Verify, Weigh
from blocktrain.wire.safetensors import encode as encode_tensors

PROMPT = b"Once upon a time"
ROUNDING = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 0.5 / 127}  # of the largest value of a position
# Of the log-probabilities of a small trained model over three stages: nats, at most and on average.
LOGIT_ERROR = {"fp32": (1e-5, 1e-6), "fp16": (0.02, 0.006), "bf16": (0.15, 0.04), "int8": (0.25, 0.05)}


def full_traversal(wire: str = "fp32") -> Traversal:
    g = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    return Traversal(
        "session",
        PROMPT,
        tails=torch.tensor([[1, 2], [3, 255]], dtype=torch.uint8),
        parents=torch.tensor([[0, 1], [0, 0]], dtype=torch.uint8),
        start=3,
        read=2,
        draft=Draft(2, 2, 7, 0.5, 0.9, offset=4),
        weigh=Weigh(0.5, 7, offset=4),
        verify=Verify(0.5, 0.9, 7, offset=4),
        piece=Piece("stream", first=3, total=5),
        noise=Noise(5, 9),
        missing=(1,),
        wire=wire,
        prompt_state=random(1, 13, 8),
        tail_state=random(2, 2, 8),
        prompt_logits=random(2, 256),
        tail_logits=random(2, 2, 256),
        draft_log_likelihood=random(2),
        log_weights=random(2),
        written=b"abc",
        degraded=True,
        trace=(StageTiming("tcp://a:1", (0, 1), 0.1, 0.2, 0.3),),
    )


def advance_of(traversal: Traversal) -> Advance:
    return Advance(
        id="id",
        attempt=1,
        version="v",
        reply_to="ab",
        route=("tcp://127.0.0.1:7001",),
        time_left_s=1.0,
        head=Head.of(traversal),
    )


def sent(traversal: Traversal) -> Traversal:
    message = advance_of(traversal)
    received, arrived = decode(encode(message, traversal))
    assert received == message
    assert arrived is not None
    return arrived


def assert_equal(ours: Traversal, theirs: Traversal) -> None:
    for name, value in vars(theirs).items():
        mine = getattr(ours, name)
        assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, name


def test_a_traversal_arrives_as_it_was_sent():
    assert_equal(sent(full_traversal()), full_traversal())
    assert_equal(sent(Traversal("s", PROMPT)), Traversal("s", PROMPT))


@pytest.mark.parametrize("wire", ROUNDING)
def test_each_format_keeps_states_and_logits_to_its_rounding(wire):
    traversal, arrived = full_traversal(wire), sent(full_traversal(wire))
    for name in frames.FLOATS:
        before, after = getattr(traversal, name), getattr(arrived, name)
        peak = before.abs().amax(-1, keepdim=True)
        assert ((after - before).abs() <= ROUNDING[wire] * peak + 1e-9).all(), name
    for name in frames.EXACT:
        assert torch.equal(getattr(arrived, name), getattr(traversal, name)), name


@pytest.mark.parametrize("wire, share", [("fp16", 0.55), ("bf16", 0.55), ("int8", 0.35)])
def test_smaller_formats_send_fewer_bytes(wire, share):
    big, small = (full_traversal(each) for each in ("fp32", wire))
    assert len(encode(advance_of(small), small)[1]) < share * len(encode(advance_of(big), big)[1]) + 500


def test_weights_that_half_precision_cannot_hold_travel_whole():
    weights = torch.linspace(0, 1, 8) / 3
    assert torch.equal(sent(Traversal("s", PROMPT, log_weights=weights)).log_weights, weights)


def test_a_value_too_large_for_half_precision_travels_whole():
    state = torch.full((1, 1, 4), 1e6)
    assert torch.equal(sent(Traversal("s", PROMPT, prompt_state=state, wire="fp16")).prompt_state, state)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=20))
def test_int8_is_off_by_at_most_half_a_step(values):
    x = torch.tensor([values])
    q, scale = quantised(x)
    assert ((q * scale[:, None] - x).abs() <= scale[:, None] * 0.501 + 1e-30).all()


def test_the_way_back_carries_no_states():
    arrived = sent(without_states(full_traversal()))
    assert (arrived.prompt_state, arrived.tail_state) == (None, None)
    assert arrived.prompt_logits is not None


@pytest.mark.parametrize("wire", LOGIT_ERROR)
def test_the_error_of_a_trained_models_logits_is_as_stated(trained_segments, wire):
    text = Traversal("s", b"9 bottles of beer on the wall, 9 bottles", read=30, wire=wire)
    exact, rounded = text, text
    for segment in trained_segments:
        (exact,), (rounded,) = segment.advance([exact.with_(session="exact")]), segment.advance([sent(rounded)])
    error = (sent(rounded).prompt_logits.log_softmax(-1) - exact.prompt_logits.log_softmax(-1)).abs()
    most, mean = LOGIT_ERROR[wire]
    assert error.max() <= most
    assert error.mean() <= mean


# What others send


def tampered(**changes: object) -> list[bytes]:
    header, payload = encode(advance_of(full_traversal()), full_traversal())
    return [json.dumps({**json.loads(header), **changes}).encode(), payload]


def with_tensors(**tensors: torch.Tensor) -> list[bytes]:
    header, _ = encode(advance_of(full_traversal()), full_traversal())
    return [header, encode_tensors(as_arrays(tensors))]


def with_tensor_header(header: object) -> list[bytes]:
    text = json.dumps(header).encode()
    return [tampered()[0], struct.pack("<Q", len(text)) + text + bytes(4)]


def shaped(shape: list[int], name: str = "prompt") -> dict[str, object]:
    return {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}


BYTES = torch.zeros(3, dtype=torch.uint8)
BAD = {
    "no frame": ([], "1 or 2 frames"),
    "three frames": ([b"{}"] * 3, "1 or 2 frames"),
    "not JSON": ([b"GET / HTTP/1.1"], "not JSON"),
    "not a table": ([b"[1]"], "protocol none"),
    "deep": ([b"[" * 100_000], "not JSON"),
    "large header": ([b" " * (frames.MAX_HEADER_BYTES + 1)], "at most"),
    "no protocol": ([b'{"kind": "cancel", "id": "x"}'], "protocol none"),
    "a protocol that is no number": ([b'{"protocol": "%d", "kind": "cancel", "id": "x"}' % PROTOCOL], "protocol none"),
    "other protocol": (tampered(protocol=PROTOCOL + 1), "install the same version"),
    "unknown kind": (tampered(kind="dance"), "not a message"),
    "unknown key": (tampered(hat="red"), "not a message"),
    "odd route": (tampered(route=["http://x"]), "not a message"),
    "no payload": (tampered()[:1], "came with 1 frames"),
    "needless payload": ([*encode(Hello(id=1)), b""], "came with 2 frames"),
    "cut payload": ([tampered()[0], tampered()[1][:-1]], "second frame"),
    "pickle": ([tampered()[0], b"\x80\x04K\x01."], "second frame"),
    "no prompt": (with_tensors(tails=BYTES[None]), "without a prompt"),
    "strange tensor": (with_tensors(prompt=BYTES, hat=BYTES), '"hat" is not part'),
    "prompt of floats": (with_tensors(prompt=torch.ones(3)), "bytes are expected"),
    "flat state": (with_tensors(prompt=BYTES, prompt_state=torch.ones(3)), "1 axes"),
    "integer state": (with_tensors(prompt=BYTES, prompt_state=torch.ones(1, 3, 2, dtype=torch.int64)), "expected"),
    "int8 without scale": (with_tensors(prompt=BYTES, prompt_state=torch.ones(1, 3, 2, dtype=torch.int8)), "scale"),
    "nan": (with_tensors(prompt=BYTES, prompt_state=torch.full((1, 3, 2), torch.nan)), "not finite"),
    "narrow logits": (with_tensors(prompt=BYTES, prompt_logits=torch.ones(1, 255)), "256 are expected"),
    "uneven rows": (with_tensors(prompt=BYTES, tails=BYTES[None], tail_state=torch.ones(2, 3, 4)), "rows and lengths"),
    "65 axes": (with_tensor_header(shaped([1] * 65)), "65 axes and at most 8"),
    "a shape of megabytes": (with_tensor_header(shaped([2**31 - 1] * 90_000)), "at most 8192 are accepted"),
    "a name that is no text": (with_tensor_header(shaped([1], "\ud800")), "second frame"),
    "a number of 100,000 digits": ([b'{"protocol": ' + b"9" * 100_000 + b"}"], "not JSON"),
    "rows of nothing": (with_tensors(prompt=BYTES, tail_state=torch.ones(2, 3, 4)), "rows and lengths"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_message_is_refused_with_the_reason(name):
    sent, reason = BAD[name]
    with pytest.raises(FrameError, match=reason):
        decode(sent)


@given(st.lists(st.binary(max_size=200), max_size=3))
def test_random_bytes_are_refused(parts):
    with pytest.raises(FrameError):
        decode(parts)


@given(st.integers(0, 1), st.integers(0, 2000), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_harmless(part, place, mask):
    whole = [bytearray(each) for each in encode(advance_of(full_traversal()), full_traversal())]
    whole[part][place % len(whole[part])] ^= mask
    with suppress(FrameError):  # the only way out
        decode([bytes(each) for each in whole])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(tampered()[0]))), json_values)
def test_any_value_in_any_field_is_taken_or_refused(key, value):
    with suppress(FrameError):
        decode(tampered(**{key: value}))


def test_what_the_checks_overlook_is_refused_too(monkeypatch):
    def defect(*_: object) -> None:
        raise ZeroDivisionError("a defect \ud800")

    monkeypatch.setattr(frames, "_check_shapes", defect)
    with pytest.raises(FrameError, match=r"cannot be read \(ZeroDivisionError: a defect \?\): send what") as refused:
        decode(tampered())
    assert str(refused.value).encode()


def test_a_traversal_too_large_is_not_even_sent(monkeypatch):
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 1000)
    with pytest.raises(FrameError, match="at most 1000"):
        encode(advance_of(full_traversal()), full_traversal())


def test_every_kind_of_message_arrives_as_it_was_sent():
    traversal = full_traversal()
    for message in (Hello(id=3), Cancel(id="x")):
        assert decode(encode(message)) == (message, None)
    answer = Answer(id="x", attempt=2, head=Head.of(traversal))
    assert decode(encode(answer, traversal))[0] == answer
