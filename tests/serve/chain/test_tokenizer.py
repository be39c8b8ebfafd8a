"""A model with a tokenizer over TCP: the gateway gets the tokenizer from a stage, and the tokens are the same."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

import pytest
import torch

from blocktrain.errors import ConfigError, FrameError
from blocktrain.serve.chain.frames import decode, encode
from blocktrain.serve.chain.messages import Answer, FetchTokenizer, Head, TokenizerFile
from blocktrain.serve.chain.stage import Stage
from blocktrain.serve.decode.decoder import decode as write
from blocktrain.serve.decode.request import Mode, Request
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.traversal import Traversal

CUT = [[0, 1], [2], [3]]
HASH = "0" * 64


async def tokens_of(forward, request):
    return [token.value async for step in write(forward, request) for token in step.written]


@pytest.mark.parametrize("mode", list(Mode))
def test_tokens_over_tcp_are_those_of_one_process(serve, token_model, token_segments, tokenizer, kind, mode):
    request = Request("Flüsse – 你好".encode(), 14, mode, seed=6)
    local = LocalForward(*token_segments(token_model(kind), CUT))

    async def main():
        async with serve.chain_of(token_segments(token_model(kind), CUT)) as pipeline:
            assert pipeline.info.tokenizer.sha256 == tokenizer.sha256
            return await tokens_of(pipeline, request)

    assert asyncio.run(main()) == asyncio.run(tokens_of(local, request))


def test_a_stage_that_sends_another_tokenizer_is_passed_over(
    serve, token_model, token_segments, tokenizer, monkeypatch
):
    asked = []

    def damaged(stage, sha256):
        asked.append(stage.address)
        file = b"{}" if len(asked) == 1 else tokenizer.file
        return TokenizerFile(sha256=sha256, file=file)

    monkeypatch.setattr(Stage, "_tokenizer", damaged)

    async def main():
        async with serve.chain_of(token_segments(token_model("stacked"), CUT)) as pipeline:
            return pipeline.info.tokenizer.sha256

    assert asyncio.run(main()) == tokenizer.sha256
    assert len(set(asked)) == 2


def test_without_a_tokenizer_the_gateway_says_what_is_wrong(serve, token_model, token_segments, monkeypatch):
    monkeypatch.setattr(Stage, "_tokenizer", lambda stage, sha256: TokenizerFile(sha256=sha256))

    async def main():
        hasty = replace(serve.quick, attempt_s=0.2)
        async with serve.chain_of(token_segments(token_model("stacked"), CUT), hasty):
            pass

    with pytest.raises(ConfigError, match="no stage sent the model's tokenizer"):
        asyncio.run(main())


def test_tokens_travel_as_they_are():
    sent = Traversal(
        "s", (5, 309, 2**20 - 1), tails=torch.tensor([[1, 300]], dtype=torch.int32), tail_logits=torch.zeros(1, 2, 320)
    )
    _, got = decode(encode(Answer(id="a", attempt=0, head=Head.of(sent)), sent))
    assert got.prompt == sent.prompt
    assert torch.equal(got.tails, sent.tails)


def test_a_tokenizer_travels_in_a_frame_of_its_own(tokenizer):
    assert decode(encode(FetchTokenizer(sha256=HASH)))[0] == FetchTokenizer(sha256=HASH)
    message, _ = decode(encode(TokenizerFile(sha256=HASH, file=tokenizer.file)))
    assert hashlib.sha256(message.file).hexdigest() == tokenizer.sha256


@pytest.mark.parametrize(
    "frames, complaint",
    [
        (encode(TokenizerFile(sha256=HASH))[:1], "came with 1 frames"),
        ([*encode(FetchTokenizer(sha256=HASH)), b"x"], "came with 2 frames"),
        (
            [encode(TokenizerFile(sha256=HASH))[0].replace(b'"sha256"', b'"file":"x","sha256"'), b"y"],
            "a tokenizer of 1",
        ),
    ],
)
def test_a_damaged_message_about_a_tokenizer_is_refused(frames, complaint):
    with pytest.raises(FrameError, match=complaint):
        decode(frames)


def test_tokens_of_two_kinds_in_one_traversal_are_refused():
    sent = Traversal("s", (1, 2), tails=torch.zeros(1, 2, dtype=torch.uint8))
    with pytest.raises(FrameError, match='"tails" holds'):
        decode(encode(Answer(id="a", attempt=0, head=Head.of(sent)), sent))
