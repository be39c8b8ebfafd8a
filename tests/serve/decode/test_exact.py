"""The exact decoders: autoregressive writes what BlockModel writes; speculative is greedily equal to it and in
distribution equal to the model."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import replace
from itertools import product

import pytest
import torch

from blocktrain.errors import ConfigError
from blocktrain.serve.decode import decoder as decoders
from blocktrain.serve.decode.decoder import best_draft_tokens, decode, decoder_of
from blocktrain.serve.decode.request import Mode, Request, WrittenToken, check
from blocktrain.serve.segment import segment as segments_module
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.segment.sampling import gumbels, perturbed, probabilities, verified
from blocktrain.serve.traversal import Traversal, Verify

PROMPT = b"The president of "
LONG_PROMPT = PROMPT * 3 + b"and so on"
OUTPUTS, NUM_BYTES, TEMPERATURE = 500, 2, 0.8


def run(forward, request):
    """The bytes, and the last step's counts."""

    async def collect():
        return [step async for step in decode(forward, request)]

    steps = asyncio.run(collect())
    return bytes(byte.value for step in steps for byte in step.written), steps[-1].stats


def of_model(model, max_tokens, prompt=PROMPT, seed=0, **settings):
    return bytes(model.generate(prompt, max_tokens, torch.Generator().manual_seed(seed), **settings))


def test_autoregressive_bytes_are_those_of_the_model_beyond_its_context(model, local, kind):
    """The context is 64: the window moves twice."""
    written, stats = run(local, Request(LONG_PROMPT, 40, temperature=0.7, top_p=0.9, seed=3))
    assert written == of_model(model(kind), 40, LONG_PROMPT, seed=3, temperature=0.7, top_p=0.9)
    assert (stats.traversals, stats.written) == (40, 40)


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0], [1, 2, 3]]], ids=str)
@pytest.mark.parametrize("draft_tokens", [None, 3])
def test_greedy_speculation_writes_the_model_s_bytes(model, segments, kind, cut, draft_tokens):
    forward = LocalForward(*segments(model(kind), cut))
    request = Request(PROMPT, 20, Mode.SPECULATIVE, temperature=0, draft_tokens=draft_tokens)
    assert run(forward, request)[0] == of_model(model(kind), 20, temperature=0)


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 40])
def test_speculation_ends_where_it_is_told_and_moves_the_window_where_it_must(model, stacked, max_tokens):
    written, stats = run(stacked, Request(LONG_PROMPT, max_tokens, Mode.SPECULATIVE, temperature=0, draft_tokens=7))
    assert written == of_model(model("stacked"), max_tokens, LONG_PROMPT, temperature=0)
    assert stats.written == max_tokens


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9)])
def test_neither_the_length_nor_the_width_of_drafts_changes_a_byte(agreeing, temperature, top_p):
    texts, traversals = set(), []
    for draft_tokens, candidates in ((1, 1), (4, 1), (4, 3), (None, 8)):
        settings = {"draft_tokens": draft_tokens, "candidates": candidates, "temperature": temperature, "top_p": top_p}
        text, stats = run(agreeing, Request(b"ab", 40, Mode.SPECULATIVE, seed=2, **settings))
        texts.add(text)
        traversals.append(stats.traversals)
    assert len(texts) == 1
    assert traversals[0] > traversals[1] > traversals[2]


def test_speculation_writes_what_the_whole_model_draws_with_the_noise_of_each_position(model, local, kind):
    """Computed here without any draft: one byte after the other, by the largest perturbed logit."""
    text = list(PROMPT)
    for _ in range(20):
        logits, noise = model(kind).logits(torch.tensor([text]))[0, -1], gumbels(5, len(text), 1, 256)[0]
        text.append(int(perturbed(logits, noise, 0.8, 0.95).argmax()))
    written, stats = run(local, Request(PROMPT, 20, Mode.SPECULATIVE, 0.8, 0.95, seed=5))
    assert list(written) == text[len(PROMPT) :]
    assert stats.exact == 20


@pytest.mark.parametrize("draft_tokens", [1, 3, None])
def test_greedy_speculation_equals_the_model_where_drafts_are_often_accepted(letters, agreeing, draft_tokens):
    """40 bytes with a context of 16: the window moves four times."""
    written, stats = run(agreeing, Request(PROMPT, 40, Mode.SPECULATIVE, temperature=0, draft_tokens=draft_tokens))
    assert written == of_model(letters, 40, temperature=0)
    assert 0 < stats.accepted <= stats.drafted
    assert stats.traversals < 35


def exact(model, prompt):
    """The probability of each continuation by letters, and of all others together."""
    chances = {}
    for letters in product(b"abc", repeat=NUM_BYTES):
        shares = probabilities(model.logits(torch.tensor([[*prompt, *letters]]))[0], TEMPERATURE)
        places = range(len(prompt) - 1, len(prompt) + NUM_BYTES - 1)
        chances[bytes(letters)] = math.prod(
            float(shares[at, letter]) for at, letter in zip(places, letters, strict=True)
        )
    return chances | {b"others": 1 - sum(chances.values())}


def chi_squared(outputs, chances):
    """(statistic, its 99.9 % point by Wilson and Hilferty)."""
    counts = {key: sum(output == key for output in outputs) for key in chances}
    counts[b"others"] = len(outputs) - sum(counts.values())
    cells = [(counts[key], len(outputs) * chance) for key, chance in chances.items() if len(outputs) * chance >= 1]
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + 3.09 * spread**0.5) ** 3
    return sum((count - expected) ** 2 / expected for count, expected in cells), limit


@pytest.fixture(scope="session")
def speculated(letters, segments, write):
    """Many outputs of the mode, each with its own seed, all in common batches."""

    def outputs(mode=Mode.SPECULATIVE, count=OUTPUTS, **settings):
        parts = segments(letters, [[0], [1]])
        asking = [
            decoder_of(Request(b"ab", NUM_BYTES, mode, TEMPERATURE, seed=seed, **settings), parts[0].info, str(seed))
            for seed in range(count)
        ]
        return write(parts, asking)

    return outputs


@pytest.mark.parametrize("draft_tokens", [1, None])
def test_speculation_is_distributed_as_the_model(letters, speculated, draft_tokens):
    statistic, limit = chi_squared(speculated(draft_tokens=draft_tokens), exact(letters, b"ab"))
    assert statistic < limit


def test_a_wrong_rule_would_be_caught(letters, speculated, monkeypatch):
    """Drawing from the first row's draft is distributed as the drafter, which the test above would not let pass."""

    def trusting(t, verify):
        return (
            verified(t, verify).with_(written=bytes(t.tails[0].tolist()))
            if t.tails is not None
            else verified(t, verify)
        )

    monkeypatch.setattr(segments_module, "verified", trusting)
    statistic, limit = chi_squared(speculated(draft_tokens=1, candidates=1), exact(letters, b"ab"))
    assert statistic > 2 * limit


def test_the_largest_perturbed_logit_is_distributed_as_the_softmax():
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 2.0], dtype=torch.double)
    model = probabilities(logits, 0.7, 0.95)
    drawn = perturbed(logits, gumbels(1, 0, 4000, 5), 0.7, 0.95).argmax(-1)
    counts, possible = torch.bincount(drawn, minlength=5), model > 0
    assert counts[~possible].sum() == 0
    expected = 4000 * model[possible]
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 18.5  # 99.9 % of 4 degrees of freedom


def tree(columns, rows):
    """A tree by its columns of (parent, token), and the model's logits: after token x it writes x + 1."""
    tails, parents = (torch.tensor([[node[which] for node in c] for c in columns]).T.byte() for which in (1, 0))
    logits = torch.nn.functional.one_hot(torch.arange(1, 11) % 10, 10).float()
    verify = Verify(0.0, 1.0, 0, 0)
    at_prompt, behind = logits[0:1], logits[tails.long()]
    return Traversal(
        "s", b"\0", tails=tails, parents=parents, verify=verify, prompt_logits=at_prompt, tail_logits=behind
    )


@pytest.mark.parametrize(
    "columns, written",
    [
        ([[(0, 1), (0, 5)], [(0, 2), (0, 7)], [(0, 3), (1, 8)]], [1, 2, 3, 4]),  # all of the first row, and one more
        ([[(0, 5), (0, 1)], [(1, 2), (1, 7)], [(0, 8), (0, 3)]], [1, 2, 3, 4]),  # across rows, by their parents
        ([[(0, 1), (0, 5)], [(1, 2), (0, 7)], [(0, 3), (1, 3)]], [1, 2]),  # the right token behind the wrong parent
        ([[(0, 4), (0, 5)], [(0, 2), (1, 2)], [(0, 3), (1, 3)]], [1]),  # nothing drafted was right
    ],
)
def test_a_tree_is_followed_as_far_as_the_model_draws_its_tokens(columns, written):
    t = tree(columns, 2)
    reply = verified(t, t.verify)
    assert list(reply.written) == written
    assert (reply.tails is None) == (len(written) == 1)
    if reply.tails is not None:
        assert reply.tails.tolist() == [written[:-1]]
        assert reply.tail_logits.shape == (1, len(written) - 1, 10)


@pytest.mark.parametrize(
    "acceptance, token_s, traversal_s, best",
    [(0.5, 1.0, 1e-9, 1), (0.9, 0.001, 0.4, 36), (0.9, 0.01, 0.4, 18), (0.5, 0.001, 0.4, 7), (1.0, 0.001, 0.4, 64)],
)
def test_drafts_are_longer_where_traversals_are_dear_and_drafts_are_good(acceptance, token_s, traversal_s, best):
    assert best_draft_tokens(acceptance, token_s, traversal_s) == best


def test_the_best_draft_is_the_best_of_all():
    def pace(k):
        return sum(0.8**i for i in range(k + 1)) / (0.1 + k * 0.004)

    assert best_draft_tokens(0.8, 0.004, 0.1) == max(range(1, 65), key=pace)


def test_a_decoder_learns_how_far_to_draft(stacked):
    """A round trip of two seconds, a drafted byte of a millisecond: drafts grow until the acceptance rate forbids
    it."""
    asking, lengths = decoder_of(Request(PROMPT, 40, Mode.SPECULATIVE, temperature=0), stacked.info, "s"), []
    while (asked := asking.ask()) is not None:
        lengths.append(asked.draft.length)
        reply = stacked.run(asked)
        timed = tuple(replace(stage, drafted_s=0.001 * asked.draft.length) for stage in reply.trace[:1])
        asking.take(reply.with_(trace=timed), seconds=2.0)
    assert lengths[0] == decoders.FIRST_DRAFT_TOKENS
    assert len(set(lengths)) > 1


def test_log_probabilities_are_the_model_s(model, local, kind):
    for mode in (Mode.AUTOREGRESSIVE, Mode.SPECULATIVE):
        asking = decoder_of(Request(PROMPT, 6, mode, temperature=0.5, seed=1), local.info, mode)
        written = []
        while (asked := asking.ask()) is not None:
            written += asking.take(local.run(asked), 0.1)
        text = PROMPT + bytes(byte.value for byte in written)
        logs = model(kind).logits(torch.tensor([list(text)]))[0].double().log_softmax(-1)
        for at, byte in enumerate(written, len(PROMPT)):
            assert byte.log_probability == pytest.approx(float(logs[at - 1, text[at]]), abs=1e-4)
            assert byte.likeliest(1)[0][0] == int(logs[at - 1].argmax())


def test_a_byte_without_logits_has_no_probability():
    assert (WrittenToken(65).log_probability, WrittenToken(65).likeliest(3)) == (None, [])


@pytest.mark.parametrize("mode", [Mode.AUTOREGRESSIVE, Mode.SPECULATIVE, Mode.SWEEP])
def test_an_empty_prompt_starts_a_new_line(stacked, mode):
    assert run(stacked, Request(b"", 5, mode, seed=1))[0] == run(stacked, Request(b"\n", 5, mode, seed=1))[0]


def test_a_session_is_forgotten_at_the_end_and_when_nobody_listens_any_more(stacked):
    async def listen(steps_wanted):
        async with aclosing(decode(stacked, Request(PROMPT, 5))) as steps:
            async for number, _ in _numbered(steps):
                assert stacked.segments[0].cached_bytes
                if number == steps_wanted:
                    break

    for steps_wanted in (2, 100):
        asyncio.run(listen(steps_wanted))
        assert [segment.cached_bytes for segment in stacked.segments] == [0, 0]


async def _numbered(steps):
    number = 0
    async for step in steps:
        number += 1
        yield number, step


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"mode": "backwards"}, 'there is no mode "backwards": choose one of autoregressive, speculative, sweep'),
        ({"max_tokens": 0}, "max_bytes = 0 is too small"),
        ({"temperature": -0.1}, "temperature = -0.1 is out of range"),
        ({"temperature": math.nan}, "temperature = nan is out of range"),
        ({"top_p": 0}, "top_p = 0 is out of range"),
        ({"seed": -1}, "seed = -1 is out of range"),
        ({"candidates": 0, "mode": "sweep"}, "candidates = 0 is out of range"),
        ({"candidates": 257, "mode": "sweep"}, "give 1 to 256"),
        ({"candidates": 2}, "mode autoregressive has no candidates: leave them out, or choose mode speculative or"),
        ({"draft_tokens": 0, "mode": "sweep"}, "draft_bytes = 0 is too small"),
        ({"draft_tokens": 2}, "mode autoregressive drafts nothing"),
    ],
)
def test_a_request_is_checked_at_birth(settings, complaint):
    with pytest.raises(ConfigError) as refused:
        Request(PROMPT, **settings)
    assert complaint in str(refused.value)


def test_a_draft_longer_than_the_context_is_refused(stacked):
    with pytest.raises(ConfigError, match="draft_bytes = 64 does not fit behind a prompt in the model's context of 64"):
        check(Request(PROMPT, mode=Mode.SPECULATIVE, draft_tokens=64), stacked.info)
