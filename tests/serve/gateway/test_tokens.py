"""The gateway of a model with a tokenizer, with the real openai client: a token is a token, a text is whole."""

from __future__ import annotations

import asyncio

import pytest
import torch

from blocktrain.cli.shared.gateway_client import generate_remotely
from blocktrain.data.tokenizer import learn_tokenizer
from blocktrain.serve.decode.decoder import decode
from blocktrain.serve.decode.request import Mode, Request
from blocktrain.serve.gateway.choices import ChoiceWriter, TokenLogprobs, join_choices
from blocktrain.serve.segment.local import LocalForward

PROMPT = "Das Wasser fließt – 你好"
CUT = [[0, 1], [2, 3]]


@pytest.fixture(scope="module")
def gateway(opened, token_model, token_segments):
    return opened(LocalForward(*token_segments(token_model("stacked"), CUT)))


@pytest.fixture(scope="module")
def client(gateway):
    with gateway.client() as client:
        yield client


def completion(client, **fields):
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "seed": 5, **fields})


def decoded(gateway, tokenizer, **fields) -> bytes:
    async def written():
        request = Request(**{"prompt": PROMPT.encode(), "max_tokens": 16, "seed": 5, **fields})
        return [token.value async for step in decode(gateway.forward, request) for token in step.written]

    return tokenizer.decode(asyncio.run(written()))


@pytest.mark.parametrize("mode", list(Mode))
def test_the_text_is_that_of_the_decoder(gateway, client, tokenizer, mode):
    answer = completion(client, extra_body={"mode": mode.value})
    assert answer.choices[0].text == decoded(gateway, tokenizer, mode=mode).decode("utf-8", "replace")


def test_usage_counts_tokens_and_the_effort_counts_bytes(gateway, client, tokenizer):
    answer = completion(client)
    usage, effort = answer.usage, answer.model_extra["blocktrain"]
    assert usage.prompt_tokens == len(tokenizer.encode(PROMPT.encode())) < len(PROMPT.encode())
    assert usage.completion_tokens == effort["tokens_written"] == 16
    assert effort["bytes_written"] == len(decoded(gateway, tokenizer, mode=Mode.SPECULATIVE)) > 16


def test_a_stream_brings_the_same_text_without_a_broken_character(client):
    parts = [part.choices[0].text for part in completion(client, stream=True) if part.choices]
    assert "".join(parts) == completion(client).choices[0].text


def test_echoed_log_probabilities_are_those_of_the_model(client, token_model, tokenizer):
    answer = completion(client, echo=True, logprobs=2, max_tokens=0).choices[0]
    ids = tokenizer.encode(PROMPT.encode()).tolist()
    truth = token_model("stacked").logits(torch.tensor([ids]))[0].log_softmax(-1)
    expected = [float(truth[at, token]) for at, token in enumerate(ids[1:])]
    assert answer.text == PROMPT
    assert answer.logprobs.token_logprobs[0] is None
    assert answer.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert answer.logprobs.text_offset == sorted(answer.logprobs.text_offset)
    assert len(answer.logprobs.tokens) == len(ids)


def test_a_stop_string_ends_the_text_across_tokens(client):
    whole = completion(client).choices[0].text
    stop = whole[3:7]
    answer = completion(client, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_the_model_says_what_its_tokens_are(client):
    (card,) = client.models.list().data
    assert (card.model_extra["tokenizer"], card.model_extra["vocabulary"]) == ("bpe", 310)


def test_generate_asks_a_gateway_for_tokens_and_cuts_the_text_at_its_bytes(gateway, client):
    request, shown = Request(PROMPT.encode(), 16, Mode.SPECULATIVE, seed=58), []
    whole = generate_remotely(gateway.url, request, [], shown.append)
    assert whole.text == completion(client, seed=58).choices[0].text
    assert "".join(shown) == PROMPT + whole.text
    assert (whole.tokens, whole.bytes > 16) == (16, True)
    cut = generate_remotely(gateway.url, request, [], lambda text: None, longest_bytes=9)
    assert cut.text == whole.text.encode()[:9].decode("utf-8", "ignore")
    assert cut.bytes == 9


def test_every_token_has_its_place_although_it_splits_characters():
    """Offsets are those of the characters in which tokens begin; what is shown never ends within one."""
    tokenizer = learn_tokenizer(iter(["–—…" * 30 + "abc"]), 258)
    ids = tokenizer.encode("a–b—c…".encode()).tolist()
    writer = ChoiceWriter(0, (), 0, tokenizer)
    parts = [part for token in ids if (part := writer.take([TokenLogprobs(token, -1.0)])) is not None]
    whole = join_choices([*parts, writer.end()])
    assert any(name.startswith("bytes:") for name in whole.logprobs.tokens)
    assert whole.text == "a–b—c…"
    starts = [len(tokenizer.decode(ids[:at]).decode("utf-8", "ignore")) for at in range(len(ids))]
    assert whole.logprobs.text_offset == starts
