"""What a gateway streams, as its client reads it."""

from __future__ import annotations

import pytest

from blocktrain.cli.shared.gateway_client import StreamedPart, read_event
from blocktrain.errors import GatewayUnreachable


@pytest.mark.parametrize(
    "line, part",
    [
        ('data: {"choices": [{"text": "a"}, {"text": null}]}', StreamedPart("a")),
        (
            'data: {"blocktrain": {"bytes_written": 3, "traversals": 2, "prompt_bytes_unread": 1}}',
            StreamedPart("", 3, 2, 1),
        ),
        ("data: [DONE]", None),
        (": a comment", None),
        ("", None),
    ],
)
def test_an_event_is_text_and_costs(line, part):
    assert read_event(line) == part


@pytest.mark.parametrize(
    "data", ["", "3", "[]", '{"choices": 3}', '{"choices": [3]}', '{"error": 3}', '{"x": 1e999, "error": null}']
)
def test_what_no_gateway_sends_is_a_value_error(data):
    with pytest.raises(ValueError):
        read_event(f"data: {data}")


@pytest.mark.parametrize("number", ["9" * 5000, "NaN", "-Infinity"])
def test_numbers_that_no_gateway_sends_are_too(number):
    with pytest.raises(ValueError):
        read_event(f'data: {{"blocktrain": {{"traversals": {number}}}}}')


def test_an_error_in_the_middle_is_said():
    with pytest.raises(GatewayUnreachable, match="stopped in the middle: no stage"):
        read_event('data: {"error": {"message": "no stage"}}')
