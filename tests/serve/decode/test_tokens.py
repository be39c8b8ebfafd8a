"""Decoders of a model with a tokenizer: they count tokens, write the model's own ones, and split no character."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from itertools import product

import pytest
import torch

from blocktrain.errors import ConfigError
from blocktrain.model.stack import window_start
from blocktrain.serve.decode.decoder import decode, decoder_of
from blocktrain.serve.decode.request import Mode, Request, TextStream, check
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.segment.sampling import probabilities
from blocktrain.serve.segment.segment import Segment
from blocktrain.serve.traversal import Traversal

PROMPT = "Das Wasser fließt – 你好".encode()
TWO = [[0, 1], [2, 3]]
OUTPUTS, NUM_TOKENS, TEMPERATURE = 400, 2, 0.8


def run(forward, request):
    """The tokens, and the last step's counts."""

    async def collect():
        return [step async for step in decode(forward, request)]

    steps = asyncio.run(collect())
    return [token.value for step in steps for token in step.written], steps[-1].stats


@pytest.fixture
def forward(token_model, token_segments, kind):
    return LocalForward(*token_segments(token_model(kind), TWO))


def test_autoregressive_tokens_are_those_of_the_model_beyond_its_context(token_model, forward, tokenizer, kind):
    """The context is 64 tokens: the window moves."""
    prompt = PROMPT * 9
    written, stats = run(forward, Request(prompt, 30, temperature=0.7, top_p=0.9, seed=3))
    ids, generator = tokenizer.encode(prompt).tolist(), torch.Generator().manual_seed(3)
    assert len(ids) > 64
    assert written == list(token_model(kind).generate(ids, 30, generator, temperature=0.7, top_p=0.9))
    assert (stats.traversals, stats.written) == (30, 30)
    assert stats.prompt_bytes_unread == len(tokenizer.decode(ids[: window_start(len(ids), 64)])) > 0


@pytest.mark.parametrize("draft_tokens", [None, 3])
def test_greedy_speculation_writes_the_models_tokens(token_model, forward, tokenizer, kind, draft_tokens):
    request = Request(PROMPT, 20, Mode.SPECULATIVE, temperature=0, draft_tokens=draft_tokens)
    ids, generator = tokenizer.encode(PROMPT).tolist(), torch.Generator()
    assert run(forward, request)[0] == list(token_model(kind).generate(ids, 20, generator, temperature=0))


def test_how_far_is_drafted_changes_the_traversals_and_not_the_tokens(counted_model, token_segments):
    forward, texts, traversals = LocalForward(*token_segments(counted_model, [[0], [1]])), set(), []
    for draft_tokens in (1, 4, None):
        tokens, stats = run(forward, Request(b"ab", 40, Mode.SPECULATIVE, seed=2, draft_tokens=draft_tokens))
        texts.add(tuple(tokens))
        traversals.append(stats.traversals)
    assert len(texts) == 1
    assert traversals[0] > traversals[1]


def test_speculation_with_a_tokenizer_is_distributed_as_the_model(counted_model, token_segments, tokenizer):
    """χ² over all pairs of the three tokens, and all others together."""
    prompt, some = tokenizer.encode(b"ab").tolist(), (300, 301, 302)
    chances = {}
    for pair in product(some, repeat=NUM_TOKENS):
        shares = probabilities(counted_model.logits(torch.tensor([[*prompt, *pair]]))[0], TEMPERATURE)
        places = range(len(prompt) - 1, len(prompt) + NUM_TOKENS - 1)
        chances[pair] = math.prod(float(shares[at, token]) for at, token in zip(places, pair, strict=True))
    forward = LocalForward(*token_segments(counted_model, [[0], [1]]))
    asked = (Request(b"ab", NUM_TOKENS, Mode.SPECULATIVE, TEMPERATURE, seed=seed) for seed in range(OUTPUTS))
    counts = Counter(tuple(run(forward, request)[0]) for request in asked)
    cells = [(counts[pair], OUTPUTS * chance) for pair, chance in chances.items()]
    cells.append((OUTPUTS - sum(count for count, _ in cells), OUTPUTS * (1 - sum(chances.values()))))
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3  # 99.9 %, Wilson and Hilferty
    assert sum((count - expected) ** 2 / expected for count, expected in cells if expected >= 1) < limit


def test_a_denoising_sweep_writes_the_models_tokens(token_model, token_segments, tokenizer):
    forward = LocalForward(*token_segments(token_model("spans"), TWO))
    written, stats = run(forward, Request(PROMPT, 16, Mode.SWEEP, seed=4))
    ids = tuple(tokenizer.encode(PROMPT).tolist())
    assert tuple(written) == token_model("spans").sweep(ids, 16, torch.Generator().manual_seed(4))
    assert stats.traversals == 1


@pytest.mark.parametrize("candidates", [1, 4])
def test_a_weighed_sweep_writes_all_tokens_behind_the_exact_ones(forward, candidates):
    written, stats = run(forward, Request(PROMPT, 12, Mode.SWEEP, candidates=candidates))
    assert (len(written), stats.traversals, stats.exact > 0) == (12, 1 + (candidates > 1), candidates > 1)


def test_an_empty_prompt_starts_at_a_new_line(forward, tokenizer):
    assert run(forward, Request(b"", 5))[0] == run(forward, Request(b"\n", 5))[0]


@pytest.mark.parametrize("text", ["Übermut – 你好, Flüsse 👋", "ßßß"])
def test_a_stream_of_tokens_emits_only_whole_characters(tokenizer, text):
    """Tokens of single bytes split every character here."""
    ids = [int(token) for byte in text.encode() for token in tokenizer.encode(bytes([byte]))]
    stream, parts = TextStream(), []
    for token in ids:
        parts.append(stream.feed(tokenizer.decode([token])))
    assert "".join(parts) == text
    assert stream.finish() == ""


def test_a_stop_string_is_found_across_the_borders_of_tokens(tokenizer):
    ids = tokenizer.encode("Das Wasser fließt weiter".encode()).tolist()
    stop = "sser fl"
    assert not any(stop.encode() in tokenizer.decode([token]) for token in ids)
    stream = TextStream([stop])
    assert "".join(stream.feed(tokenizer.decode([token])) for token in ids) == "Das Wa"
    assert stream.stopped_by == stop


def test_what_is_refused_is_said_in_tokens(token_model, token_segments, kind):
    (segment,) = token_segments(token_model(kind), [range(4)])
    with pytest.raises(ConfigError, match="context of 64 tokens: give at most 63"):
        check(Request(b"a", 100, Mode.SPECULATIVE, draft_tokens=64), segment.info)


@pytest.mark.parametrize(
    "sent, complaint",
    [
        (Traversal("s", (310,)), "other tokens than 0 to 309"),
        (Traversal("s", (-1,)), "other tokens than 0 to 309"),
        (Traversal("s", b"bytes"), "other tokens than 0 to 309"),
        (Traversal("s", (1,), tails=torch.zeros(1, 2, dtype=torch.uint8)), "send int32"),
        (Traversal("s", (1,), tails=torch.full((1, 2), 310, dtype=torch.int32)), "tails with other tokens"),
        (Traversal("s", (1,), prompt_logits=torch.zeros(1, 256)), "256 columns, the model has 310 tokens"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(token_model, token_segments, sent, complaint):
    (segment,) = token_segments(token_model("stacked"), [range(4)])
    (outcome,) = segment.advance([sent])
    assert isinstance(outcome, ConfigError)
    assert complaint in str(outcome)


def test_a_segment_needs_the_models_own_tokenizer(token_model):
    model = token_model("stacked")
    tensors = {index: block.state_dict() for index, block in enumerate(model.blocks)}
    with pytest.raises(ConfigError, match=r"has the tokenizer bpe:310 with 310 tokens, got bytes with 256: give"):
        Segment(model.spec, tensors, None, version="v")


def test_many_texts_in_one_batch_are_written_as_each_alone(token_model, token_segments, tokenizer):
    segments = token_segments(token_model("stacked"), TWO)
    prompts = [b"Fluss", "Flüsse".encode(), b"Das Wasser"]
    decoders = [decoder_of(Request(p, 6, temperature=0), segments[0].info, str(n)) for n, p in enumerate(prompts)]
    written = [[] for _ in prompts]
    while any(asked := [each.ask() for each in decoders]):
        for segment in segments:
            asked = segment.advance(asked)
        for at, (decoder, reply) in enumerate(zip(decoders, asked, strict=True)):
            written[at] += [token.value for token in decoder.take(reply, 0.01)]
    alone = LocalForward(*token_segments(token_model("stacked"), TWO))
    assert written == [run(alone, Request(p, 6, temperature=0))[0] for p in prompts]
