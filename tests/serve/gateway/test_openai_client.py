"""The gateway with the real openai client."""

from __future__ import annotations

import asyncio
from collections import deque

import openai
import pytest
import torch

from blocktrain.errors import Overloaded, StageUnreachable
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.serve.decode.decoder import decode
from blocktrain.serve.decode.request import Mode, Request
from blocktrain.serve.gateway.validate import derived_seed
from blocktrain.train.run import load_model

PROMPT = "7 bottles of"


def completion(client, **fields):
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "seed": 5, **fields})


def written_by_the_decoder(gateway, **fields) -> bytes:
    async def written() -> bytes:
        request = Request(**{"prompt": PROMPT.encode(), "max_tokens": 24, "seed": 5, **fields})
        return bytes([byte.value async for step in decode(gateway.forward.real, request) for byte in step.written])

    return asyncio.run(written())


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_the_text_is_that_of_the_decoder(gateway, client, mode, temperature):
    answer = completion(client, temperature=temperature, extra_body={"mode": mode.value})
    expected = written_by_the_decoder(gateway, mode=mode, temperature=temperature)
    assert answer.choices[0].text == expected.decode("utf-8", "replace")
    assert answer.choices[0].finish_reason == "length"


def test_an_autoregressive_text_is_that_of_the_model_in_one_process(client, model):
    answer = completion(client, extra_body={"mode": "autoregressive"})
    truth = load_model(RunDirectory.open(model)).generate(PROMPT.encode(), 24, torch.Generator().manual_seed(5))
    assert answer.choices[0].text == bytes(truth).decode("utf-8", "replace")


def test_bytes_are_counted_as_tokens(client):
    answer = completion(client, prompt="wörk")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 24, 29)


def test_the_answer_says_what_the_text_cost(client):
    effort = completion(client, extra_body={"mode": "autoregressive"}).model_extra["blocktrain"]
    assert (effort["mode"], effort["traversals"], effort["bytes_per_traversal"]) == ("autoregressive", 24, 1.0)
    assert 0 < effort["first_byte_s"] <= effort["seconds"]
    assert not effort["degraded"]


def test_a_sweep_takes_one_traversal_behind_its_exact_beginning(client):
    effort = completion(client, extra_body={"mode": "sweep", "candidates": 3}).model_extra["blocktrain"]
    assert (effort["traversals"], effort["bytes_per_traversal"]) == (2, 12)
    assert 1 <= effort["exact"] < 24


@pytest.mark.parametrize("mode", list(Mode))
def test_a_stream_brings_the_same_text_in_parts(client, mode):
    fields = {"extra_body": {"mode": mode.value}, "temperature": 0.9}
    parts = list(completion(client, stream=True, **fields))
    assert "".join(part.choices[0].text for part in parts) == completion(client, **fields).choices[0].text
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert len({part.id for part in parts}) == 1


def test_a_stream_ends_with_the_usage_where_that_is_asked_for(client):
    *_, last = completion(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 24


def test_n_texts_differ_and_the_first_is_the_one_alone(client):
    answer = completion(client, n=3)
    alone = completion(client).choices[0].text
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].text == alone
    assert len({choice.text for choice in answer.choices}) == 3
    assert completion(client, seed=derived_seed(5, 2)).choices[0].text == answer.choices[2].text


def test_n_texts_stream_side_by_side(client):
    parts = list(completion(client, n=2, stream=True))
    texts = ["".join(part.choices[0].text for part in parts if part.choices[0].index == index) for index in (0, 1)]
    assert texts == [choice.text for choice in completion(client, n=2).choices]


def test_a_prompt_in_a_list_is_answered_as_it_is_alone(client):
    prompts = ["1 bott", "99 bottles of beer"]
    together = completion(client, prompt=prompts, n=2).choices
    alone = [choice for prompt in prompts for choice in completion(client, prompt=prompt, n=2).choices]
    assert [choice.text for choice in together] == [choice.text for choice in alone]


def test_without_a_seed_the_answer_names_the_one_it_took(client):
    answer = completion(client, seed=None)
    again = completion(client, seed=answer.model_extra["blocktrain"]["seed"])
    assert again.choices[0].text == answer.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_behind_a_stop_string_is_shown_nor_any_of_it(client, stream):
    whole = completion(client, max_tokens=60).choices[0].text
    stop = whole[20:23]
    answer = completion(client, max_tokens=60, stop=["never this", stop], stream=stream)
    choices = [part.choices[0] for part in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_bytes_shown(client):
    choice = completion(client, temperature=0, logprobs=3, max_tokens=12).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())
    assert choice.logprobs.text_offset == list(range(len(choice.text)))


def test_no_top_bytes_come_where_none_are_asked_for(client):
    logprobs = completion(client, logprobs=0).choices[0].logprobs
    assert logprobs.top_logprobs is None
    assert len(logprobs.token_logprobs) == 24


def test_echo_scores_the_prompt_as_the_model_in_one_process_does(client, model):
    prompt = "7 wörks of"
    answer = completion(client, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    data = torch.tensor([list(prompt.encode())])
    truth = load_model(RunDirectory.open(model)).logits(data)[0].log_softmax(-1)
    got = answer.choices[0].logprobs
    assert answer.choices[0].text == prompt
    assert got.tokens[:5] == ["7", " ", "w", "bytes:\\xc3", "bytes:\\xb6"]
    assert got.text_offset[2:6] == [2, 3, 3, 4]
    assert got.token_logprobs[0] is None
    expected = truth[:-1].gather(-1, data[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got.token_logprobs[1:]), expected, atol=1e-4, rtol=0)


def test_echo_puts_the_prompt_before_the_text(client):
    assert completion(client, echo=True).choices[0].text == PROMPT + completion(client).choices[0].text


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("prompt", ["", "x" * 64])
def test_a_prompt_may_be_empty_or_fill_the_context(client, mode, prompt):
    answer = completion(client, prompt=prompt, echo=True, logprobs=0, extra_body={"mode": mode.value})
    assert answer.choices[0].text.startswith(prompt)
    assert len(answer.choices[0].logprobs.tokens) == len(prompt) + 24


@pytest.mark.parametrize("mode, read", [("autoregressive", 44), ("speculative", 44), ("sweep", 44)])
def test_of_a_prompt_longer_than_the_context_the_end_is_read_and_the_answer_says_so(gateway, client, mode, read):
    prompt = "7 bottles of beer, " * 4  # 76 bytes; the model reads 64
    answer = completion(client, prompt=prompt, extra_body={"mode": mode})
    expected = written_by_the_decoder(gateway, prompt=prompt.encode(), mode=Mode(mode))
    assert answer.choices[0].text == expected.decode("utf-8", "replace")
    assert answer.model_extra["blocktrain"]["prompt_bytes_unread"] == 76 - read
    assert answer.usage.prompt_tokens == 76


def test_the_end_of_a_prompt_longer_than_the_context_is_scored(client, model):
    prompt = "7 bottles of beer, " * 4
    answer = completion(client, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    got = answer.choices[0].logprobs.token_logprobs
    assert (len(got), got[:13]) == (76, [None] * 13)
    end = completion(client, prompt=prompt[12:], max_tokens=0, echo=True, logprobs=0)
    assert got[13:] == end.choices[0].logprobs.token_logprobs[1:]
    assert answer.model_extra["blocktrain"]["prompt_bytes_unread"] == 12


def test_nothing_at_all_is_asked_of_the_model_where_an_empty_prompt_is_scored(client):
    answer = completion(client, prompt="", echo=True, max_tokens=0, logprobs=1, n=2)
    assert [choice.text for choice in answer.choices] == ["", ""]
    assert answer.model_extra["blocktrain"]["traversals"] == 0


def test_the_model_can_be_asked_about(client):
    (listed,) = client.models.list().data
    assert listed == client.models.retrieve("tiny")
    assert (listed.id, listed.model_extra["context"]) == ("tiny", 64)
    assert listed.model_extra["modes"] == ["speculative", "sweep", "autoregressive"]


@pytest.mark.parametrize(
    "fields, error, param, words",
    [
        ({"model": "gpt-2"}, openai.NotFoundError, "model", 'no model "gpt-2" is served here: ask for "tiny"'),
        ({"n": 17}, openai.BadRequestError, "n", "n = 17 is not accepted: give 1 to 16"),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens", "give 1 to 4096"),
        ({"logprobs": 6}, openai.BadRequestError, "logprobs", "give 0 to 5"),
        ({"suffix": "end"}, openai.BadRequestError, "suffix", "suffix is not supported"),
        ({"extra_body": {"mood": "sweep"}}, openai.BadRequestError, "mood", "did you mean mode?"),
    ],
)
def test_what_cannot_be_is_the_client_s_exception(client, fields, error, param, words):
    with pytest.raises(error) as raised:
        completion(client, **fields)
    assert raised.value.param == param
    assert words in raised.value.message


def test_a_chat_is_answered_with_how_to_ask_a_base_model(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
    assert raised.value.code == "base_model"
    assert "this is a base model, which continues text and was not trained to chat" in raised.value.message
    assert "POST /v1/completions" in raised.value.message


def test_an_unknown_key_is_the_client_s_exception(gateway):
    with gateway.client("another-key-altogether") as stranger, pytest.raises(openai.AuthenticationError):
        completion(stranger)


@pytest.mark.parametrize(
    "fault, error, code",
    [
        (StageUnreachable("tcp://a:7001: gone"), openai.InternalServerError, "stage_unreachable"),
        (Overloaded("queue full", 2.5), openai.RateLimitError, "overloaded"),
        (RuntimeError("a defect"), openai.InternalServerError, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_before_the_first_byte_is_an_error_status(opened, forward, fault, error, code, stream):
    forward.faults[1] = fault
    with opened(forward).client() as client, pytest.raises(error) as raised:
        completion(client, stream=stream)
    assert raised.value.code == code
    assert raised.value.response.headers.get("retry-after") == {"overloaded": "3", "stage_unreachable": "1"}.get(code)
    assert "a defect" not in raised.value.message
    assert forward.open == set()


def test_a_fault_in_the_middle_of_a_stream_is_its_last_event(opened, forward):
    forward.faults[4] = StageUnreachable("tcp://a:7001 went away: try again")
    parts = []
    with opened(forward).client() as client:
        stream = completion(client, stream=True, extra_body={"mode": "autoregressive"})
        with pytest.raises(openai.APIError, match="went away"):
            deque(map(parts.append, stream))
    assert len(parts) == 3
    assert forward.open == set()
